"""The one mover: the only place where the status of a run or a job is written (docs/design.md, rule 2).

A move is a guarded UPDATE (`WHERE status = old AND attempt = n AND queue = q`) whose row count says who won. In the
same transaction it writes the event and shifts that queue's counters, so they can't disagree.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import F
from django.dispatch import Signal
from django.utils import timezone

from dstackweb.accounts.models import User
from dstackweb.lib.models import watch_time
from dstackweb.lib.times import to_ms
from dstackweb.progress import finalize
from dstackweb.runs import past_log, wakeups
from dstackweb.runs.codes import PlaceEnd, RunEventKind
from dstackweb.runs.models import Job, Run, RunEvent
from dstackweb.runs.shared_rows import count_job_end, count_moved, shared_rows_last
from dstackweb.runs.states import ENDED, JOB_ENDED, JOB_MOVES, PLACED, RUN_MOVES, WAITING, JobStatus, RunStatus

events_written = Signal()
"""The run events `events` were written, in this transaction; their `run` holds the values after the move."""


class IllegalTransition(RuntimeError):
    """A transition that the table does not allow: a bug in the caller. Has the run's last events."""

    def __init__(self, run: Run, old: str, new: str, what: str = "run") -> None:
        history = list(run.events.order_by("-id").values_list("kind", "data")[:10])
        super().__init__(f"{what} of {run.name} (id {run.pk}): {old} → {new} is not allowed; last events: {history}")


class RunChanged(Exception):
    """Another transaction moved a run first; nothing was written."""


def lock_run(run_id: int) -> Run:
    """Lock a run's row and load it, so that changes to its jobs happen one after another.

    Call first in a transaction: rows are always locked in the order of docs/architecture.md.
    (An UPDATE, not `select_for_update`, which does nothing on SQLite.) Raises Run.DoesNotExist.
    """
    Run.objects.filter(pk=run_id).update(version=F("version") + 1)
    return Run.objects.select_related("queue", "project").get(pk=run_id)


def lock_job(job_id: UUID, *related: str) -> Job:
    """Lock a job's run, as `lock_run`, and load the job with it and more `related` rows. Raises Job.DoesNotExist."""
    run = Job.objects.filter(pk=job_id).values("run_id")
    Run.objects.filter(pk__in=run).update(version=F("version") + 1)
    return Job.objects.select_related("run", *related).get(pk=job_id)


def record(
    run: Run,
    kind: RunEventKind,
    data: dict[str, Any],
    *,
    actor: User | None = None,
    node: int | None = None,
    attempt: int | None = None,
    at: dt.datetime | None = None,
    is_locked: bool = False,
) -> RunEvent:
    """Write an event, and raise the version for polls unless the transaction made or locked the run (`is_locked`)."""
    if not is_locked:
        Run.objects.filter(pk=run.pk).update(version=F("version") + 1)
    event = RunEvent.objects.create(
        run=run, kind=kind, actor=actor, node=node, attempt=attempt or run.attempt, data=data, at=at or timezone.now()
    )
    events_written.send(sender=RunEvent, events=[event])
    return event


def move_run(
    run: Run,
    new: RunStatus,
    *,
    now: dt.datetime,
    actor: User | None = None,
    event: RunEventKind | None = None,
    data: dict[str, Any] | None = None,
    **fields: Any,
) -> bool:
    """Move `run` from the status it was loaded with to `new`, with `fields` written in the same UPDATE.

    Returns False, changing nothing, when another transaction moved it first, also to another queue, or a newer
    attempt has begun. On success `run` holds the new values. Raises IllegalTransition for a move outside the table.
    """
    with shared_rows_last(savepoint=False):
        try:
            move_runs([run], new, now=now, actor=actor, event=event, data=[data or {}], **fields)
        except RunChanged:  # by its first statement, so nothing was written
            return False
    return True


def move_runs(
    runs: Sequence[Run],
    new: RunStatus,
    *,
    now: dt.datetime,
    data: Sequence[dict[str, Any]],
    actor: User | None = None,
    event: RunEventKind | None = None,
    **fields: Any,
) -> None:
    """Move many runs as `move_run` moves one, all or none, in a handful of statements; `data` has one entry per run.

    Raises RunChanged when another transaction moved one of them first. Call inside a transaction
    (`shared_rows_last`) that the exception leaves, which has locked the queues of several runs.
    """
    alike: dict[tuple[RunStatus, int, int, bool], list[Run]] = defaultdict(list)
    for run in runs:
        old = RunStatus(run.status)
        if new not in RUN_MOVES[old]:
            raise IllegalTransition(run, old, new)
        unstarted = new == RunStatus.RUNNING and run.started_at is None
        alike[old, run.queue_id, run.attempt, unstarted].append(run)
    written: dict[int, dict[str, Any]] = {}
    for (old, queue_id, attempt, unstarted), group in sorted(alike.items()):
        values = fields | _moments(old, new, now, unstarted=unstarted)
        keys = [run.pk for run in group]
        mine = Run.objects.filter(pk__in=keys, status=old, attempt=attempt, queue=queue_id)
        if mine.update(status=new, version=F("version") + 1, **values) != len(keys):
            raise RunChanged("a run was changed meanwhile")
        written |= dict.fromkeys(keys, values)
    if left := [run.pk for run in runs if run.status == RunStatus.SUBMITTED]:
        past_log.close_places(left, now, PlaceEnd(new.value))
    over = [(run.pk, run.attempt) for run in runs if run.status in PLACED and new not in PLACED]
    if over and finalize.end(over, to_ms(now)):
        wakeups.request_task_settling()
    kind, was = event or RunEventKind(new.value), {run.pk: RunStatus(run.status).value for run in runs}
    events = RunEvent.objects.bulk_create(
        RunEvent(run=run, kind=kind, actor=actor, attempt=run.attempt, data={"from": was[run.pk], **more}, at=now)
        for run, more in zip(runs, data, strict=True)
    )
    count_moved(runs, new, now)
    for run in runs:
        run.status = new
        for name, value in written[run.pk].items():
            setattr(run, name, value)
    events_written.send(sender=RunEvent, events=events)


def _moments(old: RunStatus, new: RunStatus, now: dt.datetime, *, unstarted: bool) -> dict[str, Any]:
    """The time fields that a transition sets; `unstarted`: its attempt starts."""
    if new in ENDED:
        return {"ended_at": now, "retry_at": None}
    if unstarted:
        return {"started_at": now}
    entered = {"place_since": now} if new == RunStatus.SUBMITTED else {}
    if old in PLACED and new in WAITING:
        return {"exit_code": None, "started_at": None, **entered}
    return {"queued_at": now, **entered} if entered else {}


def move_job(
    job: Job,
    new: JobStatus,
    *,
    now: dt.datetime,
    event: RunEventKind | None = None,
    unclaimed: bool = False,
    **fields: Any,
) -> bool:
    """Move a job, guarded by its status, and if `unclaimed` by its having no runner yet. Call after `lock_run`."""
    old = JobStatus(job.status)
    if new not in JOB_MOVES[old]:
        raise IllegalTransition(job.run, old, new, what=f"job {job.node} of attempt {job.attempt}")
    guard = {"claim_nonce": ""} if unclaimed else {}
    if new in JOB_ENDED:
        fields |= {"ended_at": now, "secrets_held": ""}
    elif new == JobStatus.RUNNING:
        fields["started_at"] = now
    with transaction.atomic(savepoint=False):
        if not Job.objects.filter(pk=job.pk, status=old, **guard).update(
            status=new, status_at_s=watch_time(), **fields
        ):
            return False
        recorded = ("exit_code", "termination_reason", "message", "detail", "stop_reason")
        detail = {name: fields[name] for name in recorded if fields.get(name) not in (None, "", {})}
        record(
            job.run,
            event or RunEventKind(f"job_{new.value}"),
            {"from": old.value, **detail},
            node=job.node,
            attempt=job.attempt,
            at=now,
            is_locked=True,
        )
        if new in JOB_ENDED:
            count_job_end(job, now)
    job.status = new
    for name, value in fields.items():
        setattr(job, name, value)
    return True
