"""Moves waiting runs by hand under the queue's lock: preview, move, undo (docs/design.md#scheduling)."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from django.db import connection, transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.access import allows, role_in
from dstackweb.accounts.models import User
from dstackweb.lib.errors import Conflict, Forbidden, Invalid, NotFound, Stale
from dstackweb.runs import past_log, wakeups
from dstackweb.runs.codes import PlaceEnd, RunEventKind
from dstackweb.runs.concurrency import check_priority, check_seen, may_change, stale_error
from dstackweb.runs.models import Move, Queue, Run, RunEvent
from dstackweb.runs.queue import ordering
from dstackweb.runs.queue.move_preview import (
    MAX_COUNTED,
    MoveEffect,
    MoveTarget,
    RunChange,
    plan_reordering,
    position,
    read_to_move,
)
from dstackweb.runs.queue.moves import Slot
from dstackweb.runs.queue.positions import read_runs, runs_ahead, seniorities, to_slot
from dstackweb.runs.queue.queues import lock_queue, now_us
from dstackweb.runs.shared_rows import touch
from dstackweb.runs.states import ENDED, WAITING, RunStatus

UNDO_S = 10
"""How long pages offer to undo a move."""
UNDO_GRACE_S = 3
"""How much later an undo may arrive."""
MoveStamp = tuple[dt.datetime | None, int | None]
"""When and by whom a run was last moved."""


class Place(NamedTuple):
    """What a run's rank comes from."""

    seniority_us: int
    priority: int
    penalty_s: int

    @classmethod
    def of(cls, run: Run) -> Place:
        return cls(run.seniority_us, run.priority, run.penalty_s)

    def changed(self, change: Slot, oldest_us: int, newest_us: int, most_s: int) -> Place:
        """With the rank of a planned change. The penalty (≤ `most_s`) changes only to keep the seniority in range."""
        late_us, second = change.seniority_us, ordering.SECOND_US
        highest = (late_us - oldest_us) // second
        lowest = -((newest_us - late_us) // second)
        penalty_s = max(min(self.penalty_s, max(highest, 0)), min(lowest, most_s))
        return Place(late_us - penalty_s * second, change.priority, penalty_s)


def preview(runs: Sequence[Run], user: User, role: str, target: MoveTarget) -> MoveEffect:
    """What `move` would do now, with the same errors. Reads only."""
    queue = _queue_of(runs)
    found, target = read_to_move(queue, [run.pk for run in runs], target)
    return plan_reordering(queue, found, user, role, target, now_us())


def move(
    runs: Sequence[Run], user: User, role: str, target: MoveTarget, if_match: Mapping[int, str] | None = None
) -> MoveEffect:
    """Put waiting runs of one queue where `target` says; they keep their order among each other (R24).

    A manager's stand exactly there. A member's change places with the member's other runs, so that no one else's
    position changes. All or nothing; `if_match` has the etags of runs as they were seen, by id.
    Raises Stale with what changed, Conflict for a run that doesn't wait, Forbidden, Invalid, NotFound.
    """
    with transaction.atomic():
        queue = lock_queue(_queue_of(runs).pk)
        found, target = read_to_move(queue, [run.pk for run in runs], target, lock=True)
        check_seen(runs, found, if_match)
        effect = plan_reordering(queue, found, user, role, target, now_us(), MAX_COUNTED)
        if not effect.written:
            return effect
        at = timezone.now()
        along = read_runs(queue, {change.id for change in effect.written} - found.keys(), lock=True)
        for run in along.values():
            if run.status != RunStatus.SUBMITTED:
                raise Conflict(
                    _("run %(run)s has just left the queue. Nothing was moved. Try again.") % {"run": run.name}
                )
        before = found | along
        moved = {change.run.pk for change in effect.changes}
        written = {change.id: change for change in effect.written}
        for pk in moved - written.keys():
            written[pk] = to_slot(before[pk])
        bounds = *seniorities(queue, now_us()), queue.max_penalty_s
        places = {pk: Place.of(before[pk]).changed(change, *bounds) for pk, change in written.items()}
        _write(queue, places, before, dict.fromkeys(moved, (at, user.pk)), at)
        where = {"target": target.where} | ({"anchor": target.anchor.name} if target.anchor else {})
        RunEvent.objects.bulk_create(_event(change, RunEventKind.MOVED, user, at, where) for change in effect.changes)
        _record_priorities({pk: place for pk, place in places.items() if pk in along}, before, user, at)
        made = _remember(queue, user, at, places, before, moved)
        touch(queue.pk)
        wakeups.request_pass()
    return replace(effect, move_id=made.pk)


def set_priorities(
    runs: Sequence[Run], user: User, role: str, priority: int, if_match: Mapping[int, str] | None = None
) -> MoveEffect:
    """Give runs of one queue this priority, all or none (R24). One that waits changes its place with it.

    For a placed run it is recorded, and holds if it comes back to the queue. Positions are not looked up.
    Raises Stale with what changed, Conflict for a run that has ended, Forbidden, Invalid, NotFound.
    """
    for run in runs:
        may_change(run, user, role)
        check_priority(run.project, role, priority)
    with transaction.atomic():
        queue = lock_queue(_queue_of(runs).pk)
        before = read_runs(queue, (run.pk for run in runs), lock=True)
        fresh = check_seen(runs, before, if_match)
        for run in fresh:
            if run.status in ENDED:
                raise Conflict(
                    _("run %(run)s has already ended (%(status)s). Its priority was not changed.")
                    % {"run": run.name, "status": run.status}
                )
        changed = _give_priority(queue, fresh, user, priority)
        to_undo = {run.pk: place for run, place in changed.items() if run.status in WAITING}
        made = _remember(queue, user, timezone.now(), to_undo, before, set()) if to_undo else None
    changes = [RunChange(run, run.priority, priority, None, None) for run in changed]
    return MoveEffect(changes, move_id=made.pk if made else None)


def set_priority_of_all(queue: Queue, run_ids: Collection[int], user: User, priority: int) -> None:
    """Give those of these runs that have not ended this priority; it is not undone. Call with the queue locked."""
    found = read_runs(queue, run_ids, lock=True).values()
    active = [run for run in found if run.status not in ENDED and run.queue_id == queue.pk]
    _give_priority(queue, active, user, priority)


def _give_priority(queue: Queue, runs: Iterable[Run], user: User, priority: int) -> dict[Run, Place]:
    """The runs, which are locked, that change by it, with their new places."""
    changed = {run: Place.of(run)._replace(priority=priority) for run in runs if run.priority != priority}
    if changed:
        at, before = timezone.now(), {run.pk: run for run in changed}
        places = {run.pk: place for run, place in changed.items()}
        _write(queue, places, before, {}, at)
        _record_priorities(places, before, user, at)
        touch(queue.pk)
        wakeups.request_pass()
    return changed


def undoable(queue: Queue, user: User) -> Move | None:
    """The member's latest move in this queue that can still be undone."""
    since = timezone.now() - dt.timedelta(seconds=UNDO_S + UNDO_GRACE_S)
    return Move.objects.filter(queue=queue, user=user, undone_at=None, at__gte=since).order_by("-at", "-id").first()


def undo(move_id: int, user: User) -> MoveEffect:
    """Undo a move, by its author, who is still a member, and within UNDO_S: every run is as before the move.

    Raises Stale when one of the runs has changed since or left the queue, Conflict when it is too late or was undone
    already, Forbidden, NotFound.
    """
    found = Move.objects.select_related("queue__project").filter(pk=move_id).first()
    if found is None:
        raise NotFound(_("this move no longer exists and cannot be undone"))
    role = role_in(found.queue.project, user)
    if found.user_id != user.pk or role is None or not allows(role, "member"):
        raise Forbidden(_("only the author of a move can undo it"))
    with transaction.atomic():
        queue = lock_queue(found.queue_id)
        found.refresh_from_db()
        at = timezone.now()
        if found.undone_at is not None:
            raise Conflict(_("this move was undone already"))
        if at - found.at > dt.timedelta(seconds=UNDO_S + UNDO_GRACE_S):
            raise Conflict(
                _("a move can be undone for %(seconds)s seconds; this one is older. Nothing was changed.")
                % {"seconds": UNDO_S}
            )
        changes = _undo_changes(queue, found.changes, user, at)
        Move.objects.filter(pk=found.pk).update(undone_at=at)
        touch(queue.pk)
        wakeups.request_pass()
    return MoveEffect(changes)


def _undo_changes(queue: Queue, changes: list[Any], user: User, at: dt.datetime) -> list[RunChange]:
    before = read_runs(queue, (pk for pk, *_states in changes), lock=True)
    for pk, _was, became, _moved in changes:
        if pk not in before or before[pk].queue_id != queue.pk or before[pk].status not in WAITING:
            raise _gone(before.get(pk))
        if Place.of(before[pk]) != Place(*became):
            raise stale_error(before[pk])
    moved = {pk: stamp for pk, _was, _became, stamp in changes if stamp is not None}
    shown = {pk: before[pk] for pk in (moved or before)}
    position_before = _positions(queue, shown)
    back = {pk: Place(*was) for pk, was, _became, _moved in changes}
    stamps = {pk: (dt.datetime.fromisoformat(at) if at else None, by) for pk, (at, by) in moved.items()}
    _write(queue, back, before, stamps, at)
    position_after = _positions(queue, shown)
    undone = [
        RunChange(run, run.priority, back[pk].priority, position_before.get(pk), position_after.get(pk))
        for pk, run in shown.items()
    ]
    RunEvent.objects.bulk_create(
        _event(change, RunEventKind.MOVE_UNDONE, user, at, {}) for change in undone if change.run.pk in moved
    )
    _record_priorities({pk: place for pk, place in back.items() if pk not in moved}, before, user, at)
    return undone


def _queue_of(runs: Sequence[Run]) -> Queue:
    """The queue of these runs as they were read. Raises Invalid without one, or with several."""
    if not runs:
        raise Invalid.at("runs", msg=_("name at least one run"))
    if len({run.queue_id for run in runs}) > 1:
        raise Invalid.at("runs", msg=_("these runs are in different queues"))
    return runs[0].queue


def _write(
    queue: Queue,
    places: Mapping[int, Place],
    before: Mapping[int, Run],
    stamps: Mapping[int, MoveStamp],
    now: dt.datetime,
) -> None:
    """Write the places and ranks, and who moved the runs when. The runs are locked."""
    past_log.close_places([pk for pk in places if before[pk].status == RunStatus.SUBMITTED], now, PlaceEnd.MOVED)
    step, stored = queue.step_us, connection.ops.adapt_datetimefield_value
    rows = []
    for pk, place in sorted(places.items()):
        at, by = stamps.get(pk, (before[pk].moved_at, before[pk].moved_by_id))
        rank = ordering.rank(place.seniority_us, place.priority, step, place.penalty_s)
        rows.append((*place, place.penalty_s, rank, stored(now), stored(at) if at else None, by, pk))
    sql = (
        "UPDATE runs_run SET seniority_us = %s, priority = %s, penalty_s = %s, "
        "penalty_basis = CASE penalty_s WHEN %s THEN penalty_basis ELSE '{}' END, "  # no longer of the member's share
        "rank = %s, place_since = %s, moved_at = %s, moved_by_id = %s, version = version + 1 WHERE id = %s"
    )
    with connection.cursor() as cursor:
        cursor.executemany(sql, rows)


def _record_priorities(places: Mapping[int, Place], before: Mapping[int, Run], user: User, at: dt.datetime) -> None:
    RunEvent.objects.bulk_create(
        RunEvent(
            run=run,
            kind=RunEventKind.PRIORITY,
            actor=user,
            attempt=run.attempt,
            at=at,
            data={"from": run.priority, "to": place.priority},
        )
        for pk, place in places.items()
        if (run := before[pk]).priority != place.priority
    )


def _event(change: RunChange, kind: RunEventKind, user: User, at: dt.datetime, more: dict[str, Any]) -> RunEvent:
    data = {
        "from": change.position_before,
        "to": change.position_after,
        "priority": [change.priority_before, change.priority_after],
    }
    return RunEvent(run=change.run, kind=kind, actor=user, attempt=change.run.attempt, at=at, data=data | more)


def _remember(
    queue: Queue, user: User, at: dt.datetime, places: Mapping[int, Place], before: Mapping[int, Run], moved: set[int]
) -> Move:
    changes = []
    for pk, place in sorted(places.items()):
        run = before[pk]
        stamp = [run.moved_at.isoformat() if run.moved_at else None, run.moved_by_id] if pk in moved else None
        changes.append([pk, list(Place.of(run)), list(place), stamp])
    return Move.objects.create(queue=queue, user=user, at=at, changes=changes)


def _positions(queue: Queue, ids: Collection[int]) -> dict[int, int | None]:
    """The positions of waiting runs, counted to MAX_COUNTED."""
    waiting = Run.objects.filter(pk__in=ids, status=RunStatus.SUBMITTED, queue=queue)
    keys = {pk: (rank, pk) for rank, pk in waiting.values_list("rank", "pk")}
    ahead = runs_ahead(queue, keys.values(), MAX_COUNTED)
    return {pk: position(ahead[key]) for pk, key in keys.items()}


def _gone(run: Run | None) -> Stale:
    if run is None:
        return Stale(_("a run of this move no longer exists. Nothing was undone."))
    if run.status in WAITING:
        text = _("run %(run)s is in queue %(queue)s now. Nothing was undone.")
    else:
        text = _("run %(run)s is %(status)s now. Nothing was undone.")
    values = {"run": run.name, "queue": run.queue.name, "status": run.status}
    return Stale(text % values, run=run.name, status=run.status)
