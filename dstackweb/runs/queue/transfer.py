"""Moves waiting runs to another queue of their project, all or none, with seniority and priority, and previews it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from django.db.models import BigIntegerField, F, Value
from django.db.models.functions import Greatest
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.models import User
from dstackweb.lib.errors import Conflict, Invalid, NotFound
from dstackweb.runs import past_log, selectors, wakeups
from dstackweb.runs.codes import PlaceEnd, RunEventKind
from dstackweb.runs.concurrency import check_seen
from dstackweb.runs.models import Queue, Run, RunEvent
from dstackweb.runs.queue import member_shares, ordering
from dstackweb.runs.queue.move_preview import MAX_COUNTED, MAX_MOVED, MoveEffect, RunChange, check_may_leave, position
from dstackweb.runs.queue.ordering import Penalty
from dstackweb.runs.queue.positions import RankKey, runs_ahead
from dstackweb.runs.queue.queues import lock_queue, refuse_draining
from dstackweb.runs.shared_rows import count_queue_change, shared_rows_last
from dstackweb.runs.states import WAITING, RunStatus
from dstackweb.runs.transitions import events_written

CHUNK = 200
"""Runs written by one statement."""


@dataclass(frozen=True)
class Transfer(MoveEffect):
    """The effect of moving runs to `target`: positions before are in their old queue, those after in the new one.

    `slips_total` is how many runs there move back. `entries` are the moved runs in their new order, with `queue` and
    `rank` as there, and their penalties. `is_reordered`: the ageing step or the shares there change their order.
    `beside` waits there now where the first of them will.
    """

    target: Queue | None = None
    entries: list[tuple[Run, Penalty]] = field(default_factory=list)
    is_reordered: bool = False
    beside: Run | None = None


def preview(runs: Sequence[Run], user: User, role: str, name: str) -> Transfer:
    """What `transfer` would do now, with the same errors. Reads only."""
    source, target = _check(runs, user, role, name)
    return _planned(source, target, _movable(runs, source, target), None)


def waiting_of(queue: Queue, username: str) -> list[Run]:
    """All runs of a member that wait in this queue, in order. Raises NotFound without any, Invalid for too many."""
    found = list(
        selectors.in_order(queue)
        .filter(user__username=username)
        .select_related("queue", "project", "user")[: MAX_MOVED + 1]
    )
    if not found:
        raise NotFound(
            _("no run of %(username)s waits in queue %(queue)s") % {"username": username, "queue": queue.name}
        )
    _check_count(found)
    return found


def transfer(
    runs: Sequence[Run], user: User, role: str, name: str, if_match: Mapping[int, str] | None = None
) -> Transfer:
    """Move these waiting runs of one queue to the queue of this name, in the order that they have.

    All or none; `if_match` has the etags of runs as they were seen, by id. Raises Stale with what changed, Conflict for
    a run that does not wait and for a draining queue, Forbidden, Invalid, NotFound.
    """
    source, found = _check(runs, user, role, name)
    with shared_rows_last():
        held = {queue_id: lock_queue(queue_id) for queue_id in sorted({source.pk, found.pk})}
        source, target = held[source.pk], held[found.pk]
        fresh = _locked(runs)
        check_seen(runs, fresh, if_match)
        effect = _planned(source, target, _movable(list(fresh.values()), source, target), MAX_COUNTED)
        if effect.entries:
            _write(source, target, effect.entries, user)
    return effect


def _check(runs: Sequence[Run], user: User, role: str, name: str) -> tuple[Queue, Queue]:
    """The queue of these runs, and the one that they go to."""
    if not runs:
        raise Invalid.at("runs", msg=_("name at least one run"))
    _check_count(runs)
    source = runs[0].queue
    for run in runs:
        check_may_leave(source, run, user, role)
    target = Queue.objects.select_related("project").filter(project=source.project_id, name=name).first()
    if target is None:
        raise Invalid.at("queue", msg=_("no queue %(name)s in this project") % {"name": repr(name)})
    return source, target


def _check_count(runs: Collection[Run]) -> None:
    if len(runs) > MAX_MOVED:
        raise Invalid.at("runs", msg=_("at most %(max_moved)s runs can be moved at once") % {"max_moved": MAX_MOVED})


def _locked(runs: Sequence[Run]) -> dict[int, Run]:
    """These runs, locked in the order of ids (an UPDATE, which SQLite knows too), as they are now."""
    keys = sorted(run.pk for run in runs)
    for pk in keys:
        Run.objects.filter(pk=pk).update(version=F("version") + 1)
    found = selectors.without_texts(Run.objects.filter(pk__in=keys)).select_related("queue", "project", "user")
    return {run.pk: run for run in found}


def _movable(runs: Sequence[Run], source: Queue, target: Queue) -> list[Run]:
    """The runs in the order that they have; none where they are in that queue already."""
    for run in runs:
        if run.status not in WAITING:
            raise Conflict(
                _("run %(run)s is %(status)s: only waiting runs can change their queue")
                % {"run": run.name, "status": run.status},
                run=run.name,
                status=run.status,
            )
    if target.pk == source.pk:
        return []
    refuse_draining(target)
    return sorted(runs, key=lambda run: (run.rank, run.pk))


def _planned(source: Queue, target: Queue, runs: Sequence[Run], most: int | None) -> Transfer:
    """The effect on these runs, in order; positions are counted up to `most` runs ahead, without it all."""
    if not runs:
        return Transfer([], target=target)
    penalties = member_shares.foresee_all(target, runs)
    keys = {
        run.pk: (ordering.rank(run.seniority_us, run.priority, target.step_us, share.seconds), run.pk)
        for run, share in zip(runs, penalties, strict=True)
    }
    waits = {run.pk for run in runs if run.status == RunStatus.SUBMITTED}
    before = runs_ahead(source, [(run.rank, run.pk) for run in runs if run.pk in waits], most)
    there = runs_ahead(target, [keys[pk] for pk in waits], most)
    order = sorted(zip(runs, penalties, strict=True), key=lambda entry: keys[entry[0].pk])
    entering = [run.pk for run, _share in order if run.pk in waits]
    after = {pk: position(there[keys[pk]], index) for index, pk in enumerate(entering)}
    changes = [
        RunChange(
            run,
            run.priority,
            run.priority,
            position(before[run.rank, run.pk]) if run.pk in waits else None,
            after.get(run.pk),
            share.seconds,
        )
        for run, share in zip(runs, penalties, strict=True)
    ]
    first = min((keys[pk] for pk in waits), default=None)
    return Transfer(
        changes,
        slips_total=0 if not first else None if most is not None else target.count.submitted - (there[first] or 0),
        target=target,
        entries=[(_as_there(run, target, keys[run.pk]), share) for run, share in order],
        is_reordered=[run.pk for run, _share in order] != [run.pk for run in runs],
        beside=_beside(target, first) if first else None,
    )


def _beside(target: Queue, key: RankKey) -> Run | None:
    """The run that waits at this place now, or the last one of the queue."""
    waiting = selectors.without_texts(selectors.in_order(target)).select_related("queue", "user")
    behind = waiting.filter(rank__gte=key[0]).exclude(rank=key[0], pk__lt=key[1]).first()
    return behind or waiting.order_by("-rank", "-id").first()


def _as_there(run: Run, target: Queue, key: RankKey) -> Run:
    """The run as it will be in that queue; not saved."""
    there = copy.copy(run)
    there.queue, there.rank = target, key[0]
    return there


def _write(source: Queue, target: Queue, entries: Sequence[tuple[Run, Penalty]], user: User) -> None:
    """Write what was planned. The queues and runs are locked."""
    now = timezone.now()
    runs = [run for run, _share in entries]
    waiting = [run for run in runs if run.status == RunStatus.SUBMITTED]
    # Scheduled runs have not entered their queue yet: their seniority is in the future.
    entered = [run.seniority_us for run in runs if not (run.status == RunStatus.PENDING and run.attempt == 1)]
    if entered:  # later submissions queue behind them
        newest = Greatest(F("last_seniority_us"), Value(max(entered), output_field=BigIntegerField()))
        Queue.objects.filter(pk=target.pk).update(last_seniority_us=newest)
    member_shares.add_queued(target, waiting)
    past_log.close_places([run.pk for run in waiting], now, PlaceEnd.QUEUE)
    for run, share in entries:
        run.place_since, run.penalty_s, run.penalty_basis = now, share.seconds, share.basis
    Run.objects.bulk_update(runs, ["queue", "place_since", "penalty_s", "penalty_basis", "rank"], batch_size=CHUNK)
    data = {"from": source.name, "to": target.name}
    events = RunEvent.objects.bulk_create(
        RunEvent(run=run, kind=RunEventKind.QUEUE, actor=user, attempt=run.attempt, at=now, data=data) for run in runs
    )
    for run in runs:
        count_queue_change(run, source.pk, target.pk)
    events_written.send(sender=RunEvent, events=events)
    wakeups.request_pass()
