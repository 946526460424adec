"""Runs that wait for the end of others, or of sweeps (`after`): they are pending, without a position, until they enter
their queue. Sweeps that wait are in `sweeps.creation`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any

from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Conflict, Invalid, NotFound
from dstackweb.lib.sql import for_each
from dstackweb.runs import selectors, wakeups
from dstackweb.runs.codes import DependencyOutcome, MessageCode, RunEventKind
from dstackweb.runs.concurrency import may_change
from dstackweb.runs.models import Dependency, Queue, Run, Sweep
from dstackweb.runs.queue import member_shares
from dstackweb.runs.queue.queues import take_seniority
from dstackweb.runs.shared_rows import shared_rows_last
from dstackweb.runs.states import ENDED, Reason, RunStatus
from dstackweb.runs.sweeps.selectors import find_sweep
from dstackweb.runs.transitions import lock_run, move_run
from dstackweb.spec.codes import On, Otherwise
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.spec.run_file import RunFile

AT_ONCE = 500
"""Runs that one check decides on."""


class Consequence(Enum):
    """What follows for a waiting run or sweep."""

    WAIT = auto()
    ENTER = auto()
    CANCEL = auto()
    KEEP = auto()
    """It stays as it is until someone releases or stops it."""


def outcome(on: On, status: str | None) -> DependencyOutcome:
    """What becomes of a wait for the end of a run or sweep with this status; None: it was removed."""
    if status is not None and status not in ENDED:
        return DependencyOutcome.WAITING
    is_done = status == RunStatus.DONE
    is_met = status is not None and {On.DONE: is_done, On.FAILED: not is_done, On.ENDED: True}[on]
    return DependencyOutcome.MET if is_met else DependencyOutcome.UNMET


def decide(found: Sequence[Dependency]) -> Consequence:
    """What follows from all waits of a run (pure): one that can't be met any more decides before the rest has ended."""
    unmet = [one for one in found if one.outcome == DependencyOutcome.UNMET]
    if any(one.otherwise == Otherwise.CANCEL for one in unmet):
        return Consequence.CANCEL
    if any(one.outcome == DependencyOutcome.WAITING for one in found):
        return Consequence.WAIT
    return Consequence.KEEP if unmet else Consequence.ENTER


def find(project: Project, spec: EffectiveSpec, run_file: RunFile, beside: Collection[str] = ()) -> list[Dependency]:
    """The waits of a run, not stored. Raises Invalid. A name of `beside`, of the same file, has no predecessor yet."""
    if spec.after and spec.schedule:
        msg = _("a run has either a `schedule` or an `after`: both say when it enters its queue")
        raise Invalid.at("after", msg=msg, line=run_file.line("after"))
    found: dict[Run | Sweep | str, Dependency] = {}
    for number, wanted in enumerate(spec.after):
        line = run_file.line(f"after.{number}") or run_file.line("after")
        before: Run | Sweep | str = wanted.run
        name, became = wanted.run, DependencyOutcome.WAITING
        if wanted.run not in beside:
            try:
                before = _predecessor(project, wanted.run)
            except NotFound as error:
                raise Invalid.at("after", number, "run", msg=str(error), line=line) from None
            name, became = before.name, outcome(wanted.on, before.status)
            if became == DependencyOutcome.UNMET:
                msg = _("%(predecessor)s is %(status)s, so this run would never start")
                values = {"predecessor": name, "status": before.status}
                raise Invalid.at("after", number, msg=msg % values, line=line)
        if before in found:
            raise Invalid.at("after", number, msg=_("%(run)s is listed twice") % {"run": name}, line=line)
        found[before] = Dependency(
            predecessor=before if isinstance(before, Run) else None,
            sweep=before if isinstance(before, Sweep) else None,
            name=name,
            on=wanted.on,
            otherwise=wanted.otherwise,
            outcome=became.value,
        )
    return list(found.values())


def _predecessor(project: Project, name: str) -> Run | Sweep:
    """The run or sweep with this uid, or the newest of this name. Raises NotFound."""
    try:
        sweep = find_sweep(project, name)
    except NotFound:
        return selectors.find_run(project, name)
    try:
        run = selectors.find_run(project, name)
    except NotFound:
        return sweep
    return run if run.submitted_at > sweep.submitted_at else sweep


def waits(dependencies: Sequence[Dependency]) -> bool:
    """Whether a run with these is not to enter its queue yet."""
    return decide(dependencies) != Consequence.ENTER


def detail(dependencies: Sequence[Dependency]) -> dict[str, Any]:
    """The detail of the message of a run that waits for others, or was canceled because of them."""

    def those(wanted: DependencyOutcome) -> list[dict[str, str]]:
        return [{"name": one.name, "on": one.on} for one in dependencies if one.outcome == wanted]

    return {
        "code": MessageCode.AFTER,
        "waits": those(DependencyOutcome.WAITING),
        "unmet": those(DependencyOutcome.UNMET),
    }


def settle(now: dt.datetime) -> None:
    """Decide on waiting runs whose predecessors have ended or were removed."""
    due = Dependency.objects.filter(OVER, outcome=DependencyOutcome.WAITING, run__isnull=False)
    ids = due.order_by("run_id").values_list("run_id", flat=True).distinct()[:AT_ONCE]
    for_each([pk for pk in ids if pk is not None], partial(_settle, now=now))


OVER = (
    Q(predecessor__status__in=ENDED)
    | Q(sweep__ended_at__isnull=False)
    | Q(predecessor__isnull=True, sweep__isnull=True)
)
"""Waits for what has ended or was removed."""


def take_stock(follower: Run | Sweep) -> tuple[list[Dependency], Consequence]:
    """Note how the predecessors of a locked run or sweep have ended, and what follows for it."""
    found = list(follower.dependencies.select_related("predecessor", "sweep__count").order_by("pk"))
    for one in found:
        if one.outcome == DependencyOutcome.WAITING:
            one.outcome = outcome(On(one.on), one.of.status if one.of else None)
    Dependency.objects.bulk_update(found, ["outcome"])
    return found, decide(found)


def stop_waiting(follower: Run | Sweep) -> None:
    """Note that a run or sweep was released from what it still waits for."""
    undecided = [DependencyOutcome.WAITING, DependencyOutcome.UNMET]
    follower.dependencies.filter(outcome__in=undecided).update(outcome=DependencyOutcome.RELEASED)


def _settle(run_id: int, now: dt.datetime) -> None:
    """Note how predecessors have ended, and move the run on. Repeatable."""
    with shared_rows_last():
        queue, run = _locked(run_id)
        if run is None:
            return  # it was moved to another queue meanwhile: the next check finds it
        found, consequence = take_stock(run)
        if run.status != RunStatus.PENDING:
            return
        match consequence:
            case Consequence.ENTER:
                _enter(run, queue, RunEventKind.FOLLOWS, now, data={"runs": [one.name for one in found]})
            case Consequence.CANCEL:
                reason, why = Reason.DEPENDENCY_NOT_MET, detail(found)
                move_run(
                    run,
                    RunStatus.TERMINATED,
                    now=now,
                    data={"reason": reason, **why},
                    termination_reason=reason,
                    status_detail=why,
                )
                wakeups.request_pass()  # runs may wait for this one
            case Consequence.WAIT | Consequence.KEEP:
                Run.objects.filter(pk=run.pk).update(status_detail=detail(found))


def release(run: Run, user: User, role: str) -> Run:
    """Let a run enter its queue without waiting for others any longer. Raises Conflict if it doesn't, Forbidden."""
    may_change(run, user, role)
    with shared_rows_last():
        queue, fresh = _locked(run.pk)
        if fresh is None or fresh.status != RunStatus.PENDING or fresh.status_detail.get("code") != MessageCode.AFTER:
            raise Conflict(_("run %(run)s doesn't wait for other runs") % {"run": run.name})
        stop_waiting(fresh)
        _enter(fresh, queue, RunEventKind.RELEASED, timezone.now(), actor=user)
    return Run.objects.select_related("queue", "project", "user").get(pk=run.pk)


def _locked(run_id: int) -> tuple[Queue, Run | None]:
    """A run and its queue with its next seniority, both locked; None where it is in another queue now."""
    queue = take_seniority(Run.objects.values_list("queue_id", flat=True).get(pk=run_id))
    run = lock_run(run_id)
    return queue, run if run.queue_id == queue.pk else None


def _enter(
    run: Run,
    queue: Queue,
    event: RunEventKind,
    now: dt.datetime,
    actor: User | None = None,
    data: dict[str, Any] | None = None,
) -> None:
    run.seniority_us = queue.last_seniority_us
    member_shares.enter(queue, run)
    move_run(
        run,
        RunStatus.SUBMITTED,
        now=now,
        actor=actor,
        event=event,
        data=data,
        seniority_us=run.seniority_us,
        penalty_s=run.penalty_s,
        penalty_basis=run.penalty_basis,
        rank=run.rank,
        status_detail={},
    )
    wakeups.request_pass()
