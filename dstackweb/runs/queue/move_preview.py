"""Plans and previews moves of waiting runs, from `positions` and with `moves`. Reads only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from django.utils.translation import gettext as _

from dstackweb.accounts.access import allows
from dstackweb.accounts.models import User
from dstackweb.lib.errors import Conflict, Forbidden, Invalid, NotFound, Stale
from dstackweb.runs import selectors
from dstackweb.runs.concurrency import may_change
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.queue import ordering
from dstackweb.runs.queue.moves import MoveBounds, PriorityTooHigh, Slot, plan_alone, plan_move, plan_permutation
from dstackweb.runs.queue.positions import (
    FIRST,
    LAST,
    RankKey,
    nearby_ranks,
    read_runs,
    runs_ahead,
    runs_between,
    seniorities,
    to_slot,
    to_slots,
    walk_from,
)
from dstackweb.runs.states import PLACED, RunStatus

MAX_MOVED = 1000
"""Most runs in one move."""
MAX_NAMED = 3
"""Most other runs that a preview names."""
MAX_COUNTED = 1000
"""Most runs ahead that are counted for the result of a move, so that its cost does not grow with the queue."""
PlanFunction = Callable[[Sequence[Slot], Iterable[Slot], Iterable[Slot]], list[Slot]]
"""The changes when runs are put between those ahead and those behind, each nearest first."""


@dataclass(frozen=True)
class MoveTarget:
    """`before` or `after` the run `anchor`, or the `top` or `bottom` of the queue."""

    where: Literal["before", "after", "top", "bottom"]
    anchor: Run | None = None


@dataclass(frozen=True)
class _Move:
    """A move to plan: `moved`, the slots of `runs`, go to `cut`; positions are counted up to `most` runs ahead."""

    queue: Queue
    runs: Mapping[int, Run]
    moved: list[Slot]
    cut: RankKey
    bounds: MoveBounds
    user: User
    most: int | None


@dataclass(frozen=True)
class RunChange:
    """A run before and after a move. Positions count from 1, and are None where they were not counted."""

    run: Run
    priority_before: int
    priority_after: int
    position_before: int | None
    position_after: int | None
    penalty_s: int | None = None
    """What its member's share puts it behind in its new queue; None where it keeps its queue."""


@dataclass(frozen=True)
class MoveEffect:
    """The effect of a move on the moved runs (none if they are there already) and on others.

    `slips` has the nearest few of `slips_total`, which is None where they were not counted. `exact`: the runs get the
    chosen position; a member's may get the nearest of their own instead. `move_id` is what can be undone, `written` the
    slots that change.
    """

    changes: list[RunChange]
    slips: list[RunChange] = field(default_factory=list)
    slips_total: int | None = 0
    exact: bool = True
    move_id: int | None = None
    written: list[Slot] = field(default_factory=list)


NOTHING = MoveEffect([])


def plan_reordering(
    queue: Queue,
    runs: Mapping[int, Run],
    user: User,
    role: str,
    target: MoveTarget,
    now_us: int,
    most: int | None = None,
) -> MoveEffect:
    """Plan moving these runs to `target` at this time (µs), both from `read_to_move`.

    The runs keep their order. Positions are counted up to `most` runs ahead, without it all.
    Raises Forbidden, Invalid; Conflict for a run without a position, Stale for one that is in another queue now.
    """
    for run in runs.values():
        check_may_leave(queue, run, user, role)
        _check_waits(run)
    moved = sorted((to_slot(run) for run in runs.values()), key=lambda place: place.key)
    oldest, newest = seniorities(queue, now_us)
    bounds = MoveBounds(queue.step_us, oldest, newest + queue.max_penalty_s * ordering.SECOND_US)
    move = _Move(queue, runs, moved, _cut(queue, target, runs), bounds, user, most)
    if allows(role, "manager"):
        return _anywhere(move, partial(plan_move, bounds=bounds))
    return _past_own_alone(move) or _among_own(move)


def read_to_move(
    queue: Queue, run_ids: Sequence[int], target: MoveTarget, *, lock: bool = False
) -> tuple[dict[int, Run], MoveTarget]:
    """Read the runs to move, at least one, and the target. Raises Invalid for too many runs, NotFound, Conflict."""
    if len(run_ids) > MAX_MOVED:
        raise Invalid.at(
            "runs",
            msg=_("at most %(max_moved)s runs can be moved at once, not %(count)s")
            % {"max_moved": MAX_MOVED, "count": len(run_ids)},
        )
    found = read_runs(queue, [*run_ids, *([target.anchor.pk] if target.anchor else [])], lock=lock)
    runs = {pk: found[pk] for pk in run_ids if pk in found}
    if len(runs) < len(set(run_ids)):
        raise NotFound(_("one of these runs no longer exists. Nothing was moved."))
    if target.anchor is None:
        return runs, target
    anchor = found.get(target.anchor.pk)
    if anchor is None or anchor.queue_id != queue.pk:
        raise Conflict(
            _("run %(anchor)s is no longer in queue %(queue)s. Nothing was moved.")
            % {"anchor": target.anchor.name, "queue": queue.name}
        )
    return runs, MoveTarget(target.where, anchor)


def check_may_leave(queue: Queue, run: Run, user: User, role: str) -> None:
    """Raises Forbidden, and Stale for a run that is in another queue now."""
    may_change(run, user, role)
    if run.queue_id != queue.pk:
        raise Stale(
            _("run %(run)s is in queue %(queue)s now. Nothing was moved.") % {"run": run.name, "queue": run.queue.name},
            queue=run.queue.name,
        )


def _check_waits(run: Run) -> None:
    """Raises Conflict for a run without a position, and says why."""
    if run.status == RunStatus.SUBMITTED:
        return
    if run.status == RunStatus.PENDING:
        why = _("run %(run)s is pending: it has no position until it enters the queue. Nothing was moved.")
    elif run.status in PLACED:
        why = _("run %(run)s has left the queue: it is %(status)s. Nothing was moved.")
    else:
        why = _("run %(run)s has already ended (%(status)s). Nothing was moved.")
    raise Conflict(why % {"run": run.name, "status": run.status}, run=run.name, status=run.status)


def _cut(queue: Queue, target: MoveTarget, moved: Collection[int]) -> RankKey:
    """The target as a key: runs before it are ahead of the gap, the others behind."""
    if target.where in ("top", "bottom"):
        return FIRST if target.where == "top" else LAST
    if target.anchor is None:
        raise Invalid.at(target.where, msg=_("name the run to move %(where)s") % {"where": target.where})
    if target.anchor.pk in moved:
        raise Invalid.at(
            target.where, msg=_("run %(anchor)s cannot be moved next to itself") % {"anchor": target.anchor.name}
        )
    _check_waits(target.anchor)
    rank, pk = target.anchor.rank, target.anchor.pk
    return (rank, pk) if target.where == "before" else (rank, pk + 1)


def _anywhere(move: _Move, plan: PlanFunction) -> MoveEffect:
    moved, cut, runs = move.moved, move.cut, move.runs
    front, nearest_ahead = itertools.tee(walk_from(move.queue, cut, True, runs))
    back, nearest_behind = itertools.tee(walk_from(move.queue, cut, False, runs))
    written = plan(moved, front, back)
    if not written:
        return NOTHING
    ahead = runs_ahead(move.queue, [cut, *(place.key for place in moved)], move.most)
    now = {change.id: change.priority for change in written}
    gap = None if (before := ahead[cut]) is None else before - sum(place.key < cut for place in moved)
    changes = [
        _changed(runs[place.id], place.priority, now, position(ahead[place.key]), position(gap, index))
        for index, place in enumerate(moved)
    ]
    others_ahead = [ahead_of - n for n, place in enumerate(moved) if (ahead_of := ahead[place.key]) is not None]
    if gap is None or len(others_ahead) < len(moved):
        return MoveEffect(changes, [], None, written=written)
    back_by, forward_by = max(0, max(others_ahead) - gap), max(0, gap - min(others_ahead))
    slipping = zip(nearest_behind, range(gap, gap + min(back_by, MAX_NAMED)), strict=False)
    rising = zip(nearest_ahead, range(gap - 1, gap - 1 - min(forward_by, MAX_NAMED), -1), strict=False)
    places = {place.id: (place.priority, index) for place, index in (*slipping, *rising)}
    along = read_runs(move.queue, list(places)[:MAX_NAMED])
    slips = [
        _changed(
            along[pk],
            priority,
            now,
            index + 1 + sum(others <= index for others in others_ahead),
            index + 1 + (len(moved) if index >= gap else 0),
        )
        for pk, (priority, index) in places.items()
        if pk in along
    ]
    return MoveEffect(changes, slips, back_by + forward_by, written=written)


def _changed(run: Run, priority: int, now: Mapping[int, int], before: int | None, after: int | None) -> RunChange:
    """A run at other positions, with the priorities that change `now`."""
    return RunChange(run, priority, now.get(run.pk, priority), before, after)


def position(ahead: int | None, further: int = 0) -> int | None:
    """The position with so many runs ahead, where they were counted."""
    return None if ahead is None else ahead + further + 1


def _past_own_alone(move: _Move) -> MoveEffect | None:
    """Plan a member's move past only their own runs: only the moved ones change. None if others are in between."""
    moved, cut = move.moved, move.cut
    first, last = min(moved[0].key, cut), max((moved[-1].rank, moved[-1].id + 1), cut)
    waiting = selectors.in_order(move.queue)
    own = runs_between(waiting.filter(user=move.user), first, last)
    # The nearest position to the target behind or ahead of others' runs.
    nearest = cut
    if cut == first and (head := own.values_list("rank", "pk").first()):
        nearest = head
    elif cut == last and (tail := own.order_by("-rank", "-id").values_list("rank", "pk").first()):
        nearest = tail[0], tail[1] + 1
    if runs_between(waiting.exclude(user=move.user), moved[0].key, moved[-1].key, nearest).exists():
        return None
    plan = partial(plan_alone, bounds=move.bounds, most=move.queue.project.member_max_priority)
    found = _anywhere(replace(move, cut=nearest), plan)
    if not found.written:
        return None
    exact = not runs_between(waiting.exclude(pk__in=move.runs), nearest, cut).exists()
    return replace(found, exact=exact)


def _among_own(move: _Move) -> MoveEffect:
    """Plan a member's move: their runs swap positions, all others stay."""
    queue, runs, moved, cut, user = move.queue, move.runs, move.moved, move.cut, move.user
    first, last = min(moved[0].key, cut), max(moved[-1].key, cut)
    waiting = selectors.in_order(queue)
    slots = to_slots(runs_between(waiting.filter(user=user), first, (last[0], last[1] + 1)))
    if left := runs.keys() - {place.id for place in slots}:
        # Stopped or placed meanwhile: neither waits for the queue's lock.
        raise Conflict(
            _("run %(name)s has just left the queue. Nothing was moved. Try again.") % {"name": runs[min(left)].name}
        )
    staying = [place for place in slots if place.id not in runs]
    index = sum(place.key < cut for place in staying)
    order = [*staying[:index], *moved, *staying[index:]]
    if order == slots:
        if not runs_between(waiting.exclude(pk__in=runs), first, last).exists():
            return NOTHING
        names = ", ".join(runs[place.id].name for place in moved[:MAX_NAMED])
        raise Forbidden(
            _(
                "only other members' runs are between %(names)s and that position; only managers can move a run past "
                "them. Nothing was moved."
            )
            % {"names": names}
        )
    try:
        written = plan_permutation(
            slots, order, nearby_ranks(queue, slots, user), move.bounds, queue.project.member_max_priority
        )
    except PriorityTooHigh as above:
        name = read_runs(queue, [above.run_id])[above.run_id].name
        raise Forbidden(
            _(
                "run %(name)s would need priority %(priority)s there; the maximum for members is %(most)s here. "
                "Nothing was moved."
            )
            % {"name": name, "priority": above.priority, "most": queue.project.member_max_priority}
        ) from None
    place_of_first, place_of_last = slots[index].key, slots[index + len(moved) - 1].key
    exact = not runs_between(waiting.exclude(user=user), cut, place_of_first, place_of_last).exists()
    return _permutation_effect(move, slots, order, written, exact)


def _permutation_effect(
    move: _Move, slots: list[Slot], order: list[Slot], written: list[Slot], exact: bool
) -> MoveEffect:
    moved = move.runs
    slot_of = {slot.id: number for number, slot in enumerate(slots)}
    now = {change.id: change.priority for change in written}
    at = {place.id: number for number, place in enumerate(order)}
    along = [place for place in order if place.id not in moved and slot_of[place.id] != at[place.id]]
    # Runs that fall back first; of each kind those nearest to the target.
    losing = [place for place in along if at[place.id] > slot_of[place.id]]
    gaining = [place for place in reversed(along) if at[place.id] < slot_of[place.id]]
    named = (losing + gaining)[:MAX_NAMED]
    shown = [place for place in order if place.id in moved] + named
    keys = {slots[number].key for place in shown for number in (slot_of[place.id], at[place.id])}
    ahead = runs_ahead(move.queue, keys, move.most)
    found = {**moved, **read_runs(move.queue, (place.id for place in named))}
    previewed = [
        _changed(
            found[place.id],
            place.priority,
            now,
            position(ahead[slots[slot_of[place.id]].key]),
            position(ahead[slots[at[place.id]].key]),
        )
        for place in shown
    ]
    changes, slips = previewed[: len(moved)], previewed[len(moved) :]
    if any(None in (slip.position_before, slip.position_after) for slip in slips):
        return MoveEffect(changes, [], None, exact, written=written)
    return MoveEffect(changes, slips, len(along), exact, written=written)
