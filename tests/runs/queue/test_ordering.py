from __future__ import annotations

import heapq
import itertools

import pytest
from hypothesis import example, given, strategies as st

from dstackweb.runs.queue import ordering

priorities = st.integers(0, 100)
minutes = st.none() | st.integers(1, 60 * 24 * 365)
TEN_YEARS_US = 10 * 365 * 24 * 3600 * 1_000_000
instants = st.integers(1_600_000_000_000_000, 4_000_000_000_000_000)


@given(priorities, priorities, instants, st.integers(1, TEN_YEARS_US - 1))
@example(50, 51, 1_700_000_000_000_000, TEN_YEARS_US - 1)
def test_strict_order_is_by_priority_then_first_come_first_served(one: int, other: int, at: int, later: int) -> None:
    """R23, for runs submitted within ten years of each other."""
    step = ordering.step_us(None)
    runs = [(one, at), (other, at + later)]
    expected = sorted(runs, key=lambda run: (-run[0], run[1]))
    assert sorted(runs, key=lambda run: ordering.rank(run[1], run[0], step)) == expected


@given(st.integers(1, 10_000), instants)
def test_a_run_that_waited_a_step_per_point_is_ahead_of_a_later_one_of_higher_priority(step_min: int, now: int) -> None:
    """R23: low priorities never starve."""
    step = ordering.step_us(step_min)
    waited = ordering.rank(now - 50 * step - 1, 0, step)
    assert waited < ordering.rank(now, 50, step)
    assert ordering.rank(now - 50 * step + 1, 0, step) > ordering.rank(now, 50, step)


@given(instants, priorities, minutes)
def test_a_rank_fits_64_bits(seniority: int, priority: int, ageing: int | None) -> None:
    assert -(2**63) <= ordering.rank(seniority, priority, ordering.step_us(ageing)) < 2**63


@given(st.lists(instants, min_size=1, max_size=50))
def test_seniorities_of_one_queue_rise_whatever_the_clock_does(clock: list[int]) -> None:
    last, given_out = 0, []
    for now in clock:
        last = ordering.next_seniority(now, last)
        given_out.append(last)
    assert all(b - a >= ordering.MIN_GAP_US for a, b in itertools.pairwise(given_out))


def test_the_documented_example_has_its_order() -> None:
    """R27: hot-fix 90, A/B test 70, regular 50, development 30."""
    step = ordering.step_us(30)
    at = {"development": (30, 1), "regular": (50, 2), "ab-test": (70, 3), "hot-fix": (90, 4)}
    order = sorted(at, key=lambda name: ordering.rank(at[name][1], at[name][0], step))
    assert order == ["hot-fix", "ab-test", "regular", "development"]


HOUR_US = 3_600_000_000


def hours_until_it_starts(priority: int, ageing_minutes: int | None, per_hour: int = 1) -> int | None:
    """Simulate a place that is free once an hour, under so many new runs of priority 100 an hour.

    Returns when a run starts that was submitted with the first of them; None if not within a year.
    """
    step, numbers = ordering.step_us(ageing_minutes), itertools.count()
    waiting = [(ordering.rank(0, priority, step), next(numbers), "ours")]
    for hour in range(365 * 24):
        for _run in range(per_hour):
            heapq.heappush(waiting, (ordering.rank(hour * HOUR_US, 100, step), next(numbers), "urgent"))
        if heapq.heappop(waiting)[2] == "ours":
            return hour
    return None


@pytest.mark.parametrize(
    ("priority", "ageing_minutes", "per_hour", "hours"),
    [
        (0, 30, 1, 50), (30, 30, 1, 35), (50, 30, 1, 25), (90, 30, 1, 5), (0, 60, 1, 100), (0, 5, 1, 9),
        (0, 30, 2, 100), (0, None, 1, None), (99, None, 1, None),
    ],
)  # fmt: skip
def test_a_run_starts_under_endless_runs_of_priority_100_after_its_steps_unless_the_queue_is_strict(
    priority: int, ageing_minutes: int | None, per_hour: int, hours: int | None
) -> None:
    """R23: the figures of docs/decisions/0040-levels-and-ageing.md."""
    assert hours_until_it_starts(priority, ageing_minutes, per_hour) == hours
