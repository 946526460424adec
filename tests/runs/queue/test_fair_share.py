"""The penalty of fair share, beside plain sums over all members, hours and submissions."""

from __future__ import annotations

import datetime as dt
from fractions import Fraction

from hypothesis import given, strategies as st

from dstackweb.runs.queue import ordering
from dstackweb.runs.queue.ordering import HOUR_MS, Load, decayed_ms, penalty

NOW = dt.datetime(2026, 11, 20, 15, 30, tzinfo=dt.UTC)
DAY_MS = 24 * HOUR_MS
loads = st.builds(Load, st.integers(0, 10**10), st.integers(0, 64), st.integers(0, 500))
members = st.lists(loads, min_size=1, max_size=9)
bounds = st.integers(60, 30 * 86_400)


def by_hand(own: Load, everybody: list[Load], bound_s: int, gpus: int) -> int:
    """Bound × (1 − median ÷ load), with a newcomer among the members who hold or wait for GPUs.

    The median: as many loads lie above as below, or the middle between two such.
    """
    present = [one for one in everybody if one.held_gpus + one.queued_gpus > 0]
    weights = [Fraction(one.used_ms) + one.held_gpus * HOUR_MS + one.queued_gpus * HOUR_MS for one in present]
    there = [Fraction(max(gpus, 1) * HOUR_MS), *weights]
    middle = [
        one
        for one in there
        if sum(other < one for other in there) * 2 <= len(there)
        and sum(other > one for other in there) * 2 <= len(there)
    ]
    weight = Fraction(own.used_ms) + (own.held_gpus + own.queued_gpus) * HOUR_MS
    median = (min(middle) + max(middle)) / 2 if middle else Fraction(0)
    return int(bound_s * (1 - median / weight)) if weight > median else 0


@given(members, bounds, st.integers(0, 64))
def test_penalties_are_those_of_the_formula(everybody: list[Load], bound_s: int, gpus: int) -> None:
    for own in everybody:
        assert penalty(own, everybody, bound_s, gpus).seconds == by_hand(own, everybody, bound_s, gpus)


@given(members, bounds)
def test_no_penalty_exceeds_the_bound_and_the_lower_half_of_those_who_use_the_queue_now_has_none(
    everybody: list[Load], bound_s: int
) -> None:
    there = sorted((one for one in everybody if one.held_gpus or one.queued_gpus), key=lambda one: one.total_ms)
    seconds = [penalty(one, everybody, bound_s).seconds for one in there]
    assert all(0 <= one < bound_s for one in seconds)
    assert seconds == sorted(seconds), "more load is never a smaller penalty"
    assert not any(seconds[: len(there) // 2])


@given(st.integers(1, 500), bounds)
def test_a_burst_in_an_empty_queue_leaves_room_for_those_who_come_next(runs: int, bound_s: int) -> None:
    first, last = Load(queued_gpus=1), Load(queued_gpus=runs)
    assert penalty(first, [first], bound_s).seconds == 0, "the first run comes first"
    assert penalty(last, [last, Load()], bound_s).seconds == bound_s * (runs - 1) // (2 * runs)
    assert penalty(first, [last, first], bound_s).seconds == 0, "another member's run passes the rest of it"


def test_twice_the_median_is_half_the_bound_and_four_times_is_three_quarters() -> None:
    median, twice, four = Load(held_gpus=10), Load(queued_gpus=20), Load(used_ms=40 * HOUR_MS)
    everybody = [median, median, median, twice, four, *[Load(used_ms=1)] * 9]
    assert [penalty(one, everybody, 3600).seconds for one in (median, twice, four)] == [0, 1800, 2700]
    assert penalty(four, everybody, 3600).basis == {
        "used_gpu_hours": 40.0, "held_gpus": 0, "queued_gpus": 0, "median_gpu_hours": 10.0
    }  # fmt: skip
    assert penalty(median, everybody, 3600).basis == {}


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 64 * DAY_MS)), max_size=6),
    st.integers(1, 90),
    st.integers(0, 48 * 60),
)
def test_decay_is_nearly_that_of_each_minute_by_itself(
    days: list[tuple[int, int]], half_life: int, minutes: int
) -> None:
    """A day at once instead of its minutes: 2 % off at most, with the shortest half-life."""
    now = NOW + dt.timedelta(minutes=minutes)
    used = [(now.date() - dt.timedelta(days=ago), gpu_ms) for ago, gpu_ms in days]
    exact = 0.0
    for day, gpu_ms in used:
        begin = dt.datetime.combine(day, dt.time(), dt.UTC)
        passed = min(1440, max(1, int((now - begin).total_seconds() // 60)))
        for minute in range(0, passed, 10):
            age = (now - begin - dt.timedelta(minutes=minute + min(10, passed - minute) / 2)).total_seconds() / 86_400
            exact += gpu_ms * min(10, passed - minute) / passed * 0.5 ** (max(age, 0) / half_life)
    assert abs(decayed_ms(used, now, half_life) - exact) <= 0.022 * exact + 1


@given(st.integers(1, 30), st.integers(1, 90), st.integers(10**6, 10**12))
def test_usage_counts_half_after_each_half_life(ago: int, half_life: int, gpu_ms: int) -> None:
    used = [(NOW.date() - dt.timedelta(days=ago), gpu_ms)]
    later = decayed_ms(used, NOW + dt.timedelta(days=half_life), half_life)
    assert abs(decayed_ms(used, NOW, half_life) - 2 * later) <= 2


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 100), st.integers(0, 7200)), max_size=30),
    st.integers(60, 6 * 3600),
)
def test_nobody_starves(submissions: list[tuple[int, int, int, int]], bound_s: int) -> None:
    """A run is passed only by runs that come within the bound and the steps up to the highest priority."""
    step, at, submitted = 30 * 60, 0, list[tuple[int, int, int]]()
    queued: dict[int, Load] = {}
    for member, gpus, priority, gap in submissions:
        at += gap
        queued[member] = Load(queued_gpus=queued.get(member, Load()).queued_gpus + gpus)
        behind = penalty(queued[member], list(queued.values()), bound_s).seconds
        submitted.append((at, priority, ordering.rank(at * 10**6, priority, step * 10**6, behind)))
    for index, (came, priority, rank) in enumerate(submitted):
        for later, _priority, other in submitted[index + 1 :]:
            if later - came > bound_s + (ordering.PRIORITY_MAX - priority) * step:
                assert other > rank
