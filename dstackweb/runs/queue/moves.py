"""Computes the new ranks of moved runs (docs/design.md#scheduling). Pure: slots go in, those that change come out.

Here a run's penalty is part of its seniority, as if it came so much later: rank = seniority_us - priority * step_us.
Seniority changes within the range from the queue's oldest run to now, or to now with the highest penalty. If a member's
move passes only their own runs, which may be a hundred thousand, only the moved runs change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dstackweb.lib.errors import Conflict
from dstackweb.lib.language import gettext as _
from dstackweb.runs.queue.ordering import MIN_GAP_US, PRIORITY_MAX, PRIORITY_MIN

NUDGE_US = 64
"""How far a permuted rank may differ from its slot, where ids would order equal ranks wrongly."""
GAPS_US = (*(MIN_GAP_US >> n for n in range(MIN_GAP_US.bit_length())), 0)
"""Gaps to try on each side of a moved run, widest first; with 0, ids order equal ranks."""
FAR = 1 << 80
"""Beyond every rank."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A waiting run's position data; its penalty is in `seniority_us`."""

    id: int
    rank: int
    seniority_us: int
    priority: int

    @property
    def key(self) -> tuple[int, int]:
        return self.rank, self.id


@dataclass(frozen=True, slots=True)
class MoveBounds:
    """A queue's ageing step, and the oldest and newest seniority (µs) that a move may assign."""

    step_us: int
    oldest_us: int
    newest_us: int

    def window(self, priority: int) -> tuple[int, int]:
        """The first and last rank possible with this priority."""
        return self.oldest_us - priority * self.step_us, self.newest_us - priority * self.step_us

    def priority_for(self, rank: int, wanted: int, most: int = PRIORITY_MAX) -> int | None:
        """The priority nearest to `wanted`, at most `most`, that allows this rank; None if there is none."""
        low, high = self.priorities(rank, rank)
        high = min(high, most)
        return min(max(wanted, low), high) if low <= high else None

    def priorities(self, first: int, last: int) -> tuple[int, int]:
        """The lowest and highest priority that allow some rank from `first` to `last`."""
        return (
            max(PRIORITY_MIN, -((last - self.oldest_us) // self.step_us)),
            min(PRIORITY_MAX, (self.newest_us - first) // self.step_us),
        )

    def put(self, run: Slot, rank: int, priority: int) -> Slot:
        return Slot(run.id, rank, rank + priority * self.step_us, priority)


class PriorityTooHigh(Exception):
    """Run `run_id` would need at least `priority` for its new position, and may not have it."""

    def __init__(self, run_id: int, priority: int) -> None:
        super().__init__(f"run {run_id} needs priority {priority}")
        self.run_id, self.priority = run_id, priority


def plan_move(moved: Sequence[Slot], before: Iterable[Slot], after: Iterable[Slot], bounds: MoveBounds) -> list[Slot]:
    """Put `moved`, in this order, between two neighbours; returns the changed ones, none if they are there.

    `before` and `after` are the other waiting runs ahead of and behind the gap, each nearest first, and read only as
    needed. Raises Conflict when no rank is left between the queue's oldest run and now.
    """
    front, back = _Neighbors(before), _Neighbors(after)
    left, right = front.at(0), back.at(0)
    standing = [run.key for run in (left, *moved, right) if run is not None]
    if all(one < other for one, other in itertools.pairwise(standing)):
        return []
    planned = _between(moved, left, right, bounds) or _squeeze(moved, front, back, bounds)
    return _changes(planned, (*moved, *front.fetched, *back.fetched))


def plan_alone(
    moved: Sequence[Slot], before: Iterable[Slot], after: Iterable[Slot], bounds: MoveBounds, most: int
) -> list[Slot]:
    """As `plan_move`, changing only `moved`, with priorities up to `most` or their own. Empty if that is impossible."""
    planned = _between(moved, next(iter(before), None), next(iter(after), None), bounds) or []
    if any(place.priority > max(most, run.priority) for run, place in zip(moved, planned, strict=False)):
        return []
    return _changes(planned, moved)


def plan_permutation(
    own: Sequence[Slot], order: Sequence[Slot], others: Iterable[Slot], bounds: MoveBounds, most: int
) -> list[Slot]:
    """Give a member's runs `own`, sorted, each other's ranks so that they stand in `order`; no one else moves.

    `others` are the runs of others whose ranks are within NUDGE_US of one in `own`. A run's priority changes by the
    fewest points that its new rank allows, and exceeds `most` only where it did before. Raises PriorityTooHigh where
    it would have to, Conflict where equal ranks leave no room.
    """
    planned: list[Slot] = []
    for slots, left, right in _blocks(own, others):
        runs = order[len(planned) : len(planned) + len(slots)]
        windows = [_slot(run, slot.rank, bounds, most) for run, slot in zip(runs, slots, strict=True)]
        ranks = _fit(runs, windows, [slot.rank for slot in slots], left, right, gap=0)
        if ranks is None:
            raise _no_room()
        for run, rank in zip(runs, ranks, strict=True):
            priority = bounds.priority_for(rank, run.priority, max(most, run.priority))
            assert priority is not None, "a rank in the window has a priority"
            planned.append(bounds.put(run, rank, priority))
    return _changes(planned, own)


def _slot(run: Slot, rank: int, bounds: MoveBounds, most: int) -> tuple[int, int]:
    """The ranks near `rank` that `run` may have with the priority needed there."""
    priority = bounds.priority_for(rank, run.priority, max(most, run.priority))
    if priority is None:
        least, highest = bounds.priorities(rank, rank)
        raise PriorityTooHigh(run.id, least) if least <= highest else _no_room()
    low, high = bounds.window(priority)
    return max(low, rank - NUDGE_US), min(high, rank + NUDGE_US)


def _no_room() -> Conflict:
    return Conflict(_("no rank is left between the runs there. Try again in a moment"))


def _changes(planned: Iterable[Slot], was: Iterable[Slot]) -> list[Slot]:
    before = {run.id: run for run in was}
    return [run for run in planned if run != before[run.id]]


class _Neighbors:
    """Neighbours on one side, nearest first, fetched as needed. `runs` has them with planned changes."""

    def __init__(self, runs: Iterable[Slot]) -> None:
        self.fetched: list[Slot] = []
        self.runs: list[Slot] = []
        self._rest: Iterator[Slot] = iter(runs)

    def at(self, index: int) -> Slot | None:
        while len(self.runs) <= index:
            run = next(self._rest, None)
            if run is None:
                return None
            self.fetched.append(run)
            self.runs.append(run)
        return self.runs[index]


def _behind(edge: Slot | None, run: Slot, gap: int = 0) -> int:
    """The first rank for `run` behind `edge`, with this gap."""
    return -FAR if edge is None else edge.rank + (gap or int(run.id < edge.id))


def _ahead(edge: Slot | None, run: Slot, gap: int = 0) -> int:
    """The last rank for `run` ahead of `edge`, with this gap."""
    return FAR if edge is None else edge.rank - (gap or int(run.id > edge.id))


def _between(moved: Sequence[Slot], left: Slot | None, right: Slot | None, bounds: MoveBounds) -> list[Slot] | None:
    """Slots between two neighbours that stay; None if there is no room."""
    first, last = max(_behind(left, run) for run in moved), min(_ahead(right, run) for run in moved)
    priorities = _fewest_points([run.priority for run in moved], first, last, bounds)
    if priorities is None:
        return None
    windows = [bounds.window(priority) for priority in priorities]
    wanted = [run.seniority_us - priority * bounds.step_us for run, priority in zip(moved, priorities, strict=True)]
    for gap in GAPS_US:
        if ranks := _fit(moved, windows, wanted, left, right, gap):
            return [bounds.put(*each) for each in zip(moved, ranks, priorities, strict=True)]
    return None


def _fewest_points(wanted: Sequence[int], first: int, last: int, bounds: MoveBounds) -> list[int] | None:
    """Priorities for runs in this order from rank `first` to `last`, with the fewest points changed.

    More priority only brings a run further ahead. So of the runs placed so far only the lowest priority matters: the
    next run must still fit behind it. None when `first` to `last` cannot be reached.
    """
    low, high = bounds.priorities(first, last)
    if low > high or first > last:
        return None
    tops = {
        p: min(high, (bounds.newest_us - max(first, bounds.window(p)[0])) // bounds.step_us)
        for p in range(high, low - 1, -1)
    }
    points = {least: abs(least - wanted[0]) for least in tops}
    steps: list[dict[int, tuple[int, int]]] = []
    for want in wanted[1:]:
        following: dict[int, int] = {}
        step: dict[int, tuple[int, int]] = {}
        cheapest = high
        for least in tops:
            kept = min(max(want, least), tops[least])
            ways = [(points[least] + abs(kept - want), least, kept)]
            if cheapest > least:
                ways.append((points[cheapest] + abs(least - want), cheapest, least))
            following[least], *origin = min(ways)
            step[least] = (origin[0], origin[1])
            if points[least] < points[cheapest]:
                cheapest = least
        points = following
        steps.append(step)
    least = min(points, key=points.__getitem__)
    chosen: list[int] = []
    for step in reversed(steps):
        least, priority = step[least]
        chosen.append(priority)
    return [least, *reversed(chosen)]


def _fit(
    runs: Sequence[Slot],
    windows: Sequence[tuple[int, int]],
    wanted: Sequence[int],
    left: Slot | None,
    right: Slot | None,
    gap: int,
) -> list[int] | None:
    """Ranks in this order between two neighbours, in their windows and near those wanted; None if gaps don't fit."""
    latest: list[int] = []
    edge = right
    for run, (low, high) in zip(reversed(runs), reversed(windows), strict=True):
        rank = min(high, _ahead(edge, run, gap))
        if rank < low:
            return None
        latest.append(rank)
        edge = Slot(run.id, rank, 0, 0)
    ranks: list[int] = []
    edge = left
    for run, (low, _high), last, want in zip(runs, windows, reversed(latest), wanted, strict=True):
        first = max(low, _behind(edge, run, gap))
        if first > last:
            return None
        ranks.append(min(max(want, first), last))
        edge = Slot(run.id, ranks[-1], 0, 0)
    return ranks


def _squeeze(moved: Sequence[Slot], front: _Neighbors, back: _Neighbors, bounds: MoveBounds) -> list[Slot]:
    """Place the runs one by one; for each without room, as few neighbours as possible shift."""
    planned: dict[int, Slot] = {}
    for run in moved:
        places = _between([run], front.at(0), back.at(0), bounds)
        if places is None:
            ways = (_push(run, front.at(0), back, bounds, 1), _push(run, back.at(0), front, bounds, -1))
            places = min((way for way in ways if way), key=len, default=None)
        if places is None:
            raise _no_room()
        given_way = {place.id: place for place in places[1:]}
        for line in (front, back):
            line.runs = [given_way.get(one.id, one) for one in line.runs]
        front.runs.insert(0, places[0])
        planned |= {place.id: place for place in places}
    return list(planned.values())


def _push(run: Slot, fixed: Slot | None, line: _Neighbors, bounds: MoveBounds, sign: int) -> list[Slot] | None:
    """`run` as close to `fixed` as possible, then the runs of `line` that must shift for it, as little as possible.

    `sign` 1 shifts later runs back, -1 earlier ones forward. None if a seniority would leave its allowed range.
    """
    edge_of = _behind if sign > 0 else _ahead
    edge = edge_of(fixed, run)
    reached = [
        rank
        for low, high in map(bounds.window, range(PRIORITY_MIN, PRIORITY_MAX + 1))
        if low <= (rank := max(low, edge) if sign > 0 else min(high, edge)) <= high
    ]
    if not reached:
        return None
    rank = min(reached) if sign > 0 else max(reached)
    priority = bounds.priority_for(rank, run.priority)
    assert priority is not None, "a rank that was reached has a priority"
    places = [bounds.put(run, rank, priority)]
    while (next_one := line.at(len(places) - 1)) is not None:
        rank = edge_of(places[-1], next_one)
        if (next_one.rank - rank) * sign >= 0:
            break
        low, high = bounds.window(next_one.priority)
        if not low <= rank <= high:
            return None
        places.append(bounds.put(next_one, rank, next_one.priority))
    return places


def _blocks(own: Sequence[Slot], others: Iterable[Slot]) -> Iterator[tuple[list[Slot], Slot | None, Slot | None]]:
    """A member's runs in consecutive groups, each with the other members' runs on both sides."""
    mine = {run.id for run in own}
    block: list[Slot] = []
    left: Slot | None = None
    for run in sorted((*own, *others), key=lambda run: run.key):
        if run.id in mine:
            block.append(run)
            continue
        if block:
            yield block, left, run
        block, left = [], run
    if block:
        yield block, left, None
