"""Moves against brute force: the order afterwards, the fewest points, the fewest neighbours (R22–R25)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from dstackweb.lib.errors import Conflict
from dstackweb.runs.queue import ordering
from dstackweb.runs.queue.moves import (
    MoveBounds,
    PriorityTooHigh,
    Slot,
    plan_alone,
    plan_move,
    plan_permutation,
)

PRIORITIES = range(101)
CRAMPED_US = 12
"""So little time between the oldest run and now that there may be no place left."""
FAR = 10**9
"""Beyond every rank of a `Line`."""
Key = tuple[int, int]


@dataclass(frozen=True)
class Line:
    """A queue, small enough for brute force: its runs in order, and its bounds."""

    runs: list[Slot]
    bounds: MoveBounds

    def after(self, changes: Sequence[Slot]) -> list[Slot]:
        """The queue once the changes are made, sorted as the database sorts it."""
        changed = {change.id: change for change in changes}
        assert len(changed) == len(changes), "each run changes once"
        runs = [
            place(run.id, changed[run.id].seniority_us, changed[run.id].priority, self.bounds)
            if run.id in changed
            else run
            for run in self.runs
        ]
        return sorted(runs, key=lambda run: run.key)


def place(id: int, seniority: int, priority: int, bounds: MoveBounds) -> Slot:
    return Slot(id, ordering.rank(seniority, priority, bounds.step_us), seniority, priority)


@st.composite
def lines(draw: st.DrawFn, least: int = 1, most: int = 7) -> Line:
    """Crowded queues: few seniorities, few priorities, equal ranks."""
    width = draw(st.integers(0, CRAMPED_US) | st.just(200))
    bounds = MoveBounds(draw(st.sampled_from([1, 2, 3, 5, 20, 1000])), 100, 100 + width)
    seniorities = st.integers(100, 100 + width)
    level = st.integers(0, 3) | st.integers(97, 100) | st.integers(0, 100)
    runs = [place(id, draw(seniorities), draw(level), bounds) for id in range(draw(st.integers(least, most)))]
    return Line(sorted(runs, key=lambda run: run.key), bounds)


def moved_to(line: Line, moved: Sequence[Slot], gap: int) -> tuple[list[Slot], list[Slot], list[int]]:
    """The others in front of a gap and behind it, and the ids as they shall stand."""
    others = [run for run in line.runs if run not in moved]
    front, back = others[:gap], others[gap:]
    return front, back, [run.id for run in (*front, *moved, *back)]


def plan(line: Line, moved: Sequence[Slot], gap: int) -> list[Slot]:
    front, back, _ids = moved_to(line, moved, gap)
    return plan_move(moved, reversed(front), back, line.bounds)


@given(lines(), st.data())
def test_a_moved_run_gets_exactly_its_new_position_and_the_others_keep_their_order(
    line: Line, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, min(3, len(line.runs))))
    picked = data.draw(st.permutations(line.runs))[:count]
    moved = sorted(picked, key=lambda run: run.key)
    gap = data.draw(st.integers(0, len(line.runs) - count))
    try:
        changes = plan(line, moved, gap)
    except Conflict:
        assert line.bounds.newest_us - line.bounds.oldest_us <= CRAMPED_US
        return
    assert [run.id for run in line.after(changes)] == moved_to(line, moved, gap)[2]
    levels = {run.id: run.priority for run in line.runs}
    for change in changes:
        assert change.id in {run.id for run in moved} or change.priority == levels[change.id]
        assert 0 <= change.priority <= 100
        assert line.bounds.oldest_us <= change.seniority_us <= line.bounds.newest_us


def ranks_for(bounds: MoveBounds, priority: int) -> range:
    """Every rank within reach of a priority: one for each microsecond of seniority."""
    first, last = (
        ordering.rank(seniority, priority, bounds.step_us) for seniority in (bounds.oldest_us, bounds.newest_us)
    )
    return range(first, last + 1)


def first_rank(run: Slot, edge: Key) -> int:
    """The first rank with which a run stands behind `edge`."""
    return edge[0] + int(run.id <= edge[1])


@given(lines(), st.data())
def test_the_priority_changes_by_the_fewest_points_that_put_the_run_there(line: Line, data: st.DataObject) -> None:
    run = data.draw(st.sampled_from(line.runs))
    gap = data.draw(st.integers(0, len(line.runs) - 1))
    front, back, _ids = moved_to(line, [run], gap)
    after = first_rank(run, front[-1].key) if front else -FAR
    before = back[0].rank + int(run.id < back[0].id) if back else FAR
    reach = ((priority, ranks_for(line.bounds, priority)) for priority in PRIORITIES)
    fitting = [priority for priority, ranks in reach if max(ranks.start, after) < min(ranks.stop, before)]
    if not fitting:
        return
    changes = plan(line, [run], gap)
    now = changes[0].priority if changes else run.priority
    assert [change.id for change in changes] in ([], [run.id])
    assert abs(now - run.priority) == min(abs(priority - run.priority) for priority in fitting)


@given(lines(most=6), st.data())
def test_without_a_free_rank_the_fewest_neighbours_are_shifted(line: Line, data: st.DataObject) -> None:
    run = data.draw(st.sampled_from(line.runs))
    gap = data.draw(st.integers(0, len(line.runs) - 1))
    front, back, _ids = moved_to(line, [run], gap)

    def works(ahead: int, behind: int) -> bool:
        """Whether it fits once so many neighbours on either side may change their seniority."""
        held = [*front[len(front) - ahead :], run, *back[:behind]]
        edge: Key = front[len(front) - ahead - 1].key if ahead < len(front) else (-FAR, -1)
        for one in held:
            reach = [ranks_for(line.bounds, priority) for priority in (PRIORITIES if one is run else [one.priority])]
            least = first_rank(one, edge)
            possible = [max(ranks.start, least) for ranks in reach if max(ranks.start, least) in ranks]
            if not possible:
                return False
            edge = min(possible), one.id
        return behind == len(back) or edge < back[behind].key

    splits = [
        ahead + behind
        for ahead, behind in itertools.product(range(len(front) + 1), range(len(back) + 1))
        if works(ahead, behind)
    ]
    try:
        changes = plan(line, [run], gap)
    except Conflict:
        assert not splits
        return
    assert len([change for change in changes if change.id != run.id]) == min(splits)


@given(lines(least=2, most=5), st.data())
def test_moving_several_runs_changes_the_fewest_priority_points(line: Line, data: st.DataObject) -> None:
    """Where there is room: a wide range of seniorities, so that only the levels bind."""
    bounds = MoveBounds(line.bounds.step_us * 1000, 0, data.draw(st.sampled_from([500, 5000, 250_000])))
    runs = sorted(
        (place(run.id, 17 * (run.id + 1), run.priority % 5, bounds) for run in line.runs), key=lambda run: run.key
    )
    line = Line(runs, bounds)
    moved = sorted(data.draw(st.permutations(runs))[:2], key=lambda run: run.key)
    gap = data.draw(st.integers(0, len(runs) - 2))
    front, back, ids = moved_to(line, moved, gap)
    if [run.id for run in runs] == ids:
        return
    first = front[-1].rank + 1 if front else -(10**12)
    last = back[0].rank - 1 if back else 10**12
    best = 10**9
    for one, two in itertools.product(range(7), repeat=2):
        low, high = bounds.window(one)
        first_rank = max(low, first)
        other_low, other_high = bounds.window(two)
        second_rank = max(other_low, first_rank + 1)
        if first_rank <= min(high, last) and second_rank <= min(other_high, last):
            best = min(best, abs(one - moved[0].priority) + abs(two - moved[1].priority))
    changes = {change.id: change.priority for change in plan(line, moved, gap)}
    assert sum(abs(changes.get(run.id, run.priority) - run.priority) for run in moved) == best


@given(lines(least=2), st.data())
def test_a_members_move_keeps_the_positions_of_other_members_runs(line: Line, data: st.DataObject) -> None:
    mine = data.draw(st.lists(st.sampled_from(line.runs), min_size=1, unique=True))
    own = [run for run in line.runs if run in mine]
    others = [run for run in line.runs if run not in mine]
    order = data.draw(st.permutations(own))
    most = data.draw(st.sampled_from([0, 50, 80, 100]))
    try:
        changes = plan_permutation(own, order, others, line.bounds, most)
    except Conflict:
        return
    except PriorityTooHigh as above:
        refused = above
    else:
        refused = None
    levels = {run.id: run.priority for run in own}
    if refused:
        assert refused.priority > max(most, levels[refused.run_id])
        return
    now = line.after(changes)
    following = iter(order)
    assert [run.id for run in now] == [next(following).id if run in mine else run.id for run in line.runs]
    for change in changes:
        rank = ordering.rank(change.seniority_us, change.priority, line.bounds.step_us)
        fitting = [
            priority
            for priority in range(max(most, levels[change.id]) + 1)
            if line.bounds.oldest_us <= rank + priority * line.bounds.step_us <= line.bounds.newest_us
        ]
        assert change.priority in fitting
        wanted = levels[change.id]
        assert abs(change.priority - wanted) == min(abs(priority - wanted) for priority in fitting)


@given(lines(), st.data(), st.sampled_from([0, 50, 98, 100]))
def test_a_move_that_may_change_only_the_moved_runs_is_exact_or_not_made(
    line: Line, data: st.DataObject, most: int
) -> None:
    run = data.draw(st.sampled_from(line.runs))
    gap = data.draw(st.integers(0, len(line.runs) - 1))
    front, back, ids = moved_to(line, [run], gap)
    changes = plan_alone([run], reversed(front), back, line.bounds, most)
    if changes:
        assert [one.id for one in line.after(changes)] == ids
        assert [change.id for change in changes] == [run.id]
        assert changes[0].priority <= max(most, run.priority)
    elif [one.id for one in line.runs] != ids:
        alike = [
            rank
            for rank in ranks_for(line.bounds, run.priority)
            if (not front or front[-1].key < (rank, run.id)) and (not back or (rank, run.id) < back[0].key)
        ]
        assert not alike, "there was room without a change of priority"


@given(st.lists(st.integers(0, 100), min_size=2, max_size=30), st.sampled_from([None, 1, 30]), st.data())
def test_a_members_ranks_are_permuted_and_no_new_one_is_made(
    levels: list[int], ageing: int | None, data: st.DataObject
) -> None:
    start = 1_760_000_000_000_000
    bounds = MoveBounds(ordering.step_us(ageing), start, start + 1000 * len(levels))
    runs = sorted(
        (place(id, start + 1000 * id, level, bounds) for id, level in enumerate(levels)), key=lambda run: run.key
    )
    line = Line(runs, bounds)
    order = data.draw(st.permutations(runs))
    now = line.after(plan_permutation(runs, order, [], bounds, 100))
    assert [run.rank for run in now] == [run.rank for run in runs] or len({run.rank for run in runs}) < len(runs)
    assert [run.id for run in now] == [run.id for run in order]


@pytest.mark.parametrize("ageing", [None, 1, 30, 60 * 24 * 365])
def test_ten_thousand_runs_of_one_millisecond_are_moved_among_each_other(ageing: int | None) -> None:
    """Each move is small however crowded the queue; ranks of a strict queue are far beyond 2^53."""
    start, count = 1_760_000_000_000_000, 10_000
    bounds = MoveBounds(ordering.step_us(ageing), start, start + count * ordering.MIN_GAP_US)
    line = Line([place(id, start + id * 1000, 100, bounds) for id in range(count)], bounds)
    assert ageing is not None or abs(line.runs[0].rank) > 2**53
    ids = [run.id for run in line.runs]
    for number in range(30):
        old, new = (number * 7919) % count, 5000
        run = line.runs[old]
        ids.insert(new, ids.pop(old))
        changes = plan(line, [run], new)
        assert len(changes) < 20
        line = Line(line.after(changes), bounds)
        assert [run.id for run in line.runs] == ids
    assert {run.priority for run in line.runs} == {100}


def test_the_top_of_a_queue_whose_head_is_its_oldest_costs_one_point() -> None:
    bounds = MoveBounds(ordering.step_us(30), 10**15, 10**15 + 10**9)
    line = Line([place(id, 10**15 + id * 10**6, 50, bounds) for id in range(4)], bounds)
    assert plan(line, [line.runs[3]], 0) == [place(3, 10**15 + 3 * 10**6, 51, bounds)]


def test_a_move_to_the_top_at_priority_100_shifts_the_head_by_a_microsecond() -> None:
    bounds = MoveBounds(ordering.step_us(30), 10**15, 10**15 + 10**9)
    line = Line([place(id, 10**15 + id * 10**6, 100, bounds) for id in range(4)], bounds)
    assert sorted(plan(line, [line.runs[3]], 0), key=lambda change: change.id) == [
        place(0, 10**15 + 1, 100, bounds),
        place(3, 10**15, 100, bounds),
    ]


@pytest.mark.parametrize(
    ("front", "back", "shifted"),
    [([(1, 105)], [(2, 105), (0, 106)], 1), ([(1, 105), (4, 104)], [(2, 105), (5, 107)], 2)],
)
def test_neighbors_shift_on_the_side_where_fewer_must(
    front: list[tuple[int, int]], back: list[tuple[int, int]], shifted: int
) -> None:
    """Ids order equal ranks: none is left for run 3 between runs 1 and 2."""
    bounds = MoveBounds(1000, 100, 110)
    ahead, behind = ([place(id, seniority, 50, bounds) for id, seniority in side] for side in (front, back))
    changes = plan_move([place(3, 108, 50, bounds)], ahead, behind, bounds)
    assert {change.id for change in changes} == {3, shifted}


def test_a_run_moved_between_two_of_its_own_priority_keeps_it() -> None:
    bounds = MoveBounds(ordering.step_us(None), 10**15, 10**15 + 10**9)
    line = Line([place(id, 10**15 + id * 10**6, 50, bounds) for id in range(4)], bounds)
    assert [change.priority for change in plan(line, [line.runs[3]], 1)] == [50]


def test_moving_runs_to_their_own_position_changes_nothing() -> None:
    bounds = MoveBounds(ordering.step_us(30), 10**15, 10**15 + 10**9)
    line = Line([place(id, 10**15 + id * 10**6, 50, bounds) for id in range(4)], bounds)
    assert plan(line, [line.runs[1], line.runs[2]], 1) == []


@given(
    st.integers(0, 100),
    st.integers(1, 60 * 24),
    st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 100)), max_size=20),
)
def test_a_waiting_run_is_overtaken_only_by_runs_that_arrive_within_the_ageing_bound(
    level: int, ageing: int, arrivals: list[tuple[int, int]]
) -> None:
    """R23, no starvation: whoever comes (100 - p) steps later or more stands behind, whatever its priority."""
    step, start = ordering.step_us(ageing), 1_760_000_000_000_000
    mine = ordering.rank(start, level, step)
    for wait, priority in arrivals:
        passes = ordering.rank(start + wait, priority, step) < mine
        assert passes == (wait < (priority - level) * step)
        assert not passes or wait < (100 - level) * step


@given(st.integers(0, 99), st.integers(0, 10**14), st.integers(0, 10**14))
def test_in_a_strict_queue_no_wait_outweighs_priority_and_equals_are_first_come_first_served(
    level: int, one: int, other: int
) -> None:
    step, start = ordering.step_us(None), 1_760_000_000_000_000
    assert ordering.rank(start + one, level + 1, step) < ordering.rank(start + other, level, step)
    assert (ordering.rank(start + one, level, step) < ordering.rank(start + other, level, step)) == (one < other)


def test_a_run_moved_to_its_own_position_is_not_spread_from_its_neighbors() -> None:
    bounds = MoveBounds(ordering.step_us(30), 10**15, 10**15 + 10**9)
    left, run, right = (
        Slot(n, 10**15 + us - 50 * bounds.step_us, 10**15 + us, 50) for n, us in enumerate((1, 11, 3001))
    )
    assert plan_move([run], [left], [right], bounds) == []
