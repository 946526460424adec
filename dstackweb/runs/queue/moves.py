"""Where a moved run's rank comes from (docs/design.md#scheduling). Pure: places go in, changes come out.

    rank = seniority_us - priority * step_us        ascending, then id

A moved run stands exactly where it was put. Its seniority moves between the queue's oldest and now; where that isn't
enough, its priority changes by the fewest points that are; where no rank is left between its neighbours, the fewest
of them give way by the fewest µs, in their seniority alone.

A member's move permutes the ranks of their own runs, so that nobody else's position changes; past none but their own
runs, which may be a hundred thousand, only the moved ones change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dstackweb.lib.errors import Conflict
from dstackweb.runs.queue.ordering import MIN_GAP_US, PRIORITY_MAX, PRIORITY_MIN

NUDGE_US = 64
"""How far a permuted rank may be off its slot where ids alone would put it on the wrong side of an equal rank."""
GAPS_US = (*(MIN_GAP_US >> n for n in range(MIN_GAP_US.bit_length())), 0)
"""Room left to each side of a moved run, the widest first; with none, equal ranks stand by their ids."""
FAR = 1 << 80
"""Beyond every rank."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A waiting run as the order sees it."""

    id: int
    rank: int
    seniority_us: int
    priority: int

    @property
    def key(self) -> tuple[int, int]:
        """What the queue is sorted by."""
        return self.rank, self.id


@dataclass(frozen=True, slots=True)
class RankChange:
    """What a run becomes. Its rank follows with the queue's step."""

    id: int
    seniority_us: int
    priority: int


@dataclass(frozen=True, slots=True)
class MoveBounds:
    """What a queue allows: its step, and the oldest and the newest seniority (µs) that a move may give."""

    step_us: int
    oldest_us: int
    newest_us: int

    def window(self, priority: int) -> tuple[int, int]:
        """The first and the last rank that a run of this priority may take."""
        return self.oldest_us - priority * self.step_us, self.newest_us - priority * self.step_us

    def priority_for(self, rank: int, wanted: int, most: int = PRIORITY_MAX) -> int | None:
        """The priority nearest to `wanted`, and not over `most`, that can have this rank; None when there is none."""
        low, high = self.priorities(rank, rank)
        high = min(high, most)
        return min(max(wanted, low), high) if low <= high else None

    def priorities(self, first: int, last: int) -> tuple[int, int]:
        """The least and the highest priority that can have some rank from `first` to `last`."""
        return (
            max(PRIORITY_MIN, -((last - self.oldest_us) // self.step_us)),
            min(PRIORITY_MAX, (self.newest_us - first) // self.step_us),
        )

    def put(self, run: Slot, rank: int, priority: int) -> Slot:
        """`run` at `rank`, with `priority`."""
        return Slot(run.id, rank, rank + priority * self.step_us, priority)


class PriorityTooHigh(Exception):
    """Run `run_id` would need at least `priority` for its new place, and may not have it."""

    def __init__(self, run_id: int, priority: int) -> None:
        super().__init__(f"run {run_id} needs priority {priority}")
        self.run_id, self.priority = run_id, priority


def plan_move(
    moved: Sequence[Slot], before: Iterable[Slot], after: Iterable[Slot], terms: MoveBounds
) -> list[RankChange]:
    """Put `moved`, in this order, between two neighbours, and say what changes: nothing for runs that stand there.

    `before` are the other waiting runs in front of the gap, `after` those behind it, each nearest first; only as many
    are taken as are needed. Raises Conflict where every rank between the queue's oldest and now is taken.
    """
    front, back = _Neighbors(before), _Neighbors(after)
    left, right = front.at(0), back.at(0)
    standing = [run.key for run in (left, *moved, right) if run is not None]
    if all(one < other for one, other in itertools.pairwise(standing)):
        return []
    planned = _between(moved, left, right, terms) or _squeezed(moved, front, back, terms)
    return _changes(planned, (*moved, *front.fetched, *back.fetched))


def plan_alone(
    moved: Sequence[Slot],
    before: Iterable[Slot],
    after: Iterable[Slot],
    terms: MoveBounds,
    most: int,
) -> list[RankChange]:
    """As `plan_move`, where none but `moved` may change, and none of them to more than `most` unless it had that.

    Nothing where that can't be.
    """
    planned = _between(moved, next(iter(before), None), next(iter(after), None), terms) or []
    if any(place.priority > max(most, run.priority) for run, place in zip(moved, planned, strict=False)):
        return []
    return _changes(planned, moved)


def plan_permutation(
    own: Sequence[Slot],
    order: Sequence[Slot],
    others: Iterable[Slot],
    terms: MoveBounds,
    most: int,
) -> list[RankChange]:
    """Give a member's runs `own`, sorted, each other's ranks so that they stand in `order`; nobody else moves.

    `others` are the runs of others whose ranks are within NUDGE_US of one in `own`. A run's priority changes by the
    fewest points that its new rank allows, and exceeds `most` only where it did before. Raises AbovePriority where it
    would have to, Conflict where equal ranks leave no room.
    """
    planned: list[Slot] = []
    for slots, left, right in _blocks(own, others):
        runs = order[len(planned) : len(planned) + len(slots)]
        windows = [_slot(run, slot.rank, terms, most) for run, slot in zip(runs, slots, strict=True)]
        ranks = _fit(runs, windows, [slot.rank for slot in slots], left, right, gap=0)
        if ranks is None:
            raise _no_room()
        for run, rank in zip(runs, ranks, strict=True):
            priority = terms.priority_for(rank, run.priority, max(most, run.priority))
            assert priority is not None, "a rank in the window has a priority"
            planned.append(terms.put(run, rank, priority))
    return _changes(planned, own)


def _slot(run: Slot, rank: int, terms: MoveBounds, most: int) -> tuple[int, int]:
    """The ranks around that of a slot that `run` may have with the priority that it needs there."""
    priority = terms.priority_for(rank, run.priority, max(most, run.priority))
    if priority is None:
        least, highest = terms.priorities(rank, rank)
        raise PriorityTooHigh(run.id, least) if least <= highest else _no_room()
    low, high = terms.window(priority)
    return max(low, rank - NUDGE_US), min(high, rank + NUDGE_US)


def _no_room() -> Conflict:
    return Conflict("the runs there stand too close for another one between them; try again in a moment")


def _changes(planned: Iterable[Slot], was: Iterable[Slot]) -> list[RankChange]:
    before = {run.id: run for run in was}
    return [RankChange(run.id, run.seniority_us, run.priority) for run in planned if run != before[run.id]]


class _Neighbors:
    """Neighbours on one side, nearest first, fetched as they are looked at. `runs` has them as they are to become."""

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
    """The first rank that `run` may have behind `edge`, with this much room between them."""
    return -FAR if edge is None else edge.rank + (gap or int(run.id < edge.id))


def _ahead(edge: Slot | None, run: Slot, gap: int = 0) -> int:
    """The last rank that `run` may have ahead of `edge`, with this much room between them."""
    return FAR if edge is None else edge.rank - (gap or int(run.id > edge.id))


def _between(moved: Sequence[Slot], left: Slot | None, right: Slot | None, terms: MoveBounds) -> list[Slot] | None:
    """Places between two neighbours that keep theirs; None where there is no room."""
    first, last = max(_behind(left, run) for run in moved), min(_ahead(right, run) for run in moved)
    priorities = _fewest_points([run.priority for run in moved], first, last, terms)
    if priorities is None:
        return None
    windows = [terms.window(priority) for priority in priorities]
    wanted = [run.seniority_us - priority * terms.step_us for run, priority in zip(moved, priorities, strict=True)]
    for gap in GAPS_US:
        if ranks := _fit(moved, windows, wanted, left, right, gap):
            return [terms.put(*each) for each in zip(moved, ranks, priorities, strict=True)]
    return None


def _fewest_points(wanted: Sequence[int], first: int, last: int, terms: MoveBounds) -> list[int] | None:
    """Priorities for runs that shall stand in this order from rank `first` to `last`, with the fewest points changed.

    More priority only brings a run further ahead. So all that matters of the runs put so far is their least priority:
    the next one's may not be so high that it can't stand behind that. None when `first` to `last` is out of reach.
    """
    low, high = terms.priorities(first, last)
    if low > high or first > last:
        return None
    tops = {p: min(high, (terms.newest_us - max(first, terms.window(p)[0])) // terms.step_us) for p in _down(high, low)}
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


def _down(high: int, low: int) -> range:
    return range(high, low - 1, -1)


def _fit(
    runs: Sequence[Slot],
    windows: Sequence[tuple[int, int]],
    wanted: Sequence[int],
    left: Slot | None,
    right: Slot | None,
    gap: int,
) -> list[int] | None:
    """Ranks in this order between two neighbours, each in its window and as near to the one wanted as the order allows.

    None where `gap` µs to each side of each are too much.
    """
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
    for run, (low, _), last, want in zip(runs, windows, reversed(latest), wanted, strict=True):
        first = max(low, _behind(edge, run, gap))
        if first > last:
            return None
        ranks.append(min(max(want, first), last))
        edge = Slot(run.id, ranks[-1], 0, 0)
    return ranks


def _squeezed(moved: Sequence[Slot], front: _Neighbors, back: _Neighbors, terms: MoveBounds) -> list[Slot]:
    """The runs put one after the other, where the fewest neighbours give way for each that finds no room."""
    planned: dict[int, Slot] = {}
    for run in moved:
        places = _between([run], front.at(0), back.at(0), terms)
        if places is None:
            ways = (_pushed(run, front.at(0), back, terms, 1), _pushed(run, back.at(0), front, terms, -1))
            places = min((way for way in ways if way), key=len, default=None)
        if places is None:
            raise _no_room()
        given_way = {place.id: place for place in places[1:]}
        for line in (front, back):
            line.runs = [given_way.get(one.id, one) for one in line.runs]
        front.runs.insert(0, places[0])
        planned |= {place.id: place for place in places}
    return list(planned.values())


def _pushed(run: Slot, fixed: Slot | None, line: _Neighbors, terms: MoveBounds, sign: int) -> list[Slot] | None:
    """`run` as close to `fixed` as it may stand, then those of `line` that must give way for it, by the least they can.

    `sign` 1 pushes later runs back, -1 earlier ones forward. None where one would leave the queue's oldest to now.
    """
    edge_of = _behind if sign > 0 else _ahead
    edge = edge_of(fixed, run)
    reached = [
        rank
        for low, high in map(terms.window, range(PRIORITY_MIN, PRIORITY_MAX + 1))
        if low <= (rank := max(low, edge) if sign > 0 else min(high, edge)) <= high
    ]
    if not reached:
        return None
    rank = min(reached) if sign > 0 else max(reached)
    priority = terms.priority_for(rank, run.priority)
    assert priority is not None, "a rank that was reached has a priority"
    places = [terms.put(run, rank, priority)]
    while (next_one := line.at(len(places) - 1)) is not None:
        rank = edge_of(places[-1], next_one)
        if (next_one.rank - rank) * sign >= 0:
            break
        low, high = terms.window(next_one.priority)
        if not low <= rank <= high:
            return None
        places.append(terms.put(next_one, rank, next_one.priority))
    return places


def _blocks(own: Sequence[Slot], others: Iterable[Slot]) -> Iterator[tuple[list[Slot], Slot | None, Slot | None]]:
    """A member's runs in groups that stand together, each with the run of somebody else on either side."""
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
