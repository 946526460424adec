"""Rates: right for steady work, quick to follow changes, honest about what they rest on."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from dstackweb.progress import estimate
from dstackweb.progress.estimate import MINUTE_S, TEN_MINUTES_S, Rate, RateSample, decayed


@dataclass
class Row:
    first_ms: int = 0
    finished_1m: float = 0
    finished_10m: float = 0
    rated_ms: int = 0


def rate(row: Row, now_ms: int) -> Rate | None:
    return estimate.rate(RateSample(row.first_ms, row.finished_1m, row.finished_10m, row.rated_ms, now_ms))


def row_of(finishes_s: Iterable[float]) -> Row:
    """What is kept of tasks that finish at these seconds, in order, the first being heard of at 0."""
    row = Row()
    for at_ms in (round(at_s * 1000) for at_s in finishes_s):
        age_ms = at_ms - row.rated_ms
        row.finished_1m = decayed(row.finished_1m, age_ms, MINUTE_S) + 1
        row.finished_10m = decayed(row.finished_10m, age_ms, TEN_MINUTES_S) + 1
        row.rated_ms = at_ms
    return row


def steadily(per_s: float, from_s: float, until_s: float) -> list[float]:
    return [from_s + number / per_s for number in range(1, int((until_s - from_s) * per_s) + 1)]


def at_random(per_s: float, until_s: float, seed: int) -> list[float]:
    chance, times = random.Random(seed), [0.0]
    while times[-1] < until_s:
        times.append(times[-1] + chance.expovariate(per_s))
    return times[1:-1]


@pytest.mark.parametrize("seen_s", [10, 60, 300, 3000])
@pytest.mark.parametrize("per_s", [1, 20])
def test_steady_work_has_its_rate_however_long_it_was_seen(per_s: int, seen_s: int) -> None:
    found = rate(row_of(steadily(per_s, 0, seen_s)), seen_s * 1000)
    assert found is not None
    assert found.per_s == pytest.approx(per_s, rel=0.12)
    assert found.low < found.per_s < found.high


def test_of_estimates_from_work_at_random_four_of_five_hold_the_truth() -> None:
    found = [rate(row_of(at_random(0.5, 400, seed)), 400_000) for seed in range(150)]
    right = sum(1 for one in found if one is not None and one.low <= 0.5 <= one.high)
    assert 0.75 * 150 <= right <= 0.95 * 150


def test_the_more_has_finished_the_narrower_it_is() -> None:
    def width(per_s: float) -> float:
        found = rate(row_of(steadily(per_s, 0, 1200)), 1_200_000)
        assert found is not None
        return (found.high - found.low) / found.per_s

    assert width(100) < 0.1 < width(1) < 0.6 < width(0.01)


def test_work_that_has_become_faster_is_followed_within_two_minutes_and_both_rates_are_in_the_range() -> None:
    found = rate(row_of([*steadily(1, 0, 1800), *steadily(10, 1800, 1920)]), 1_920_000)
    assert found is not None
    assert found.per_s == pytest.approx(8.6, rel=0.1)
    assert found.low < 3
    assert found.high > 8.6


def test_the_rate_of_stalled_work_falls_and_is_finally_unknown() -> None:
    row = row_of(steadily(2, 0, 600))
    rates = [rate(row, (600 + minutes * 60) * 1000) for minutes in (0, 5, 20, 120)]
    assert [one is not None for one in rates] == [True, True, True, False]
    values = [one.per_s for one in rates if one is not None]
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.3


def test_where_nothing_has_finished_there_is_no_rate() -> None:
    assert rate(Row(), 1000) is None
    assert rate(Row(first_ms=500, rated_ms=500), 10**15) is None


def test_a_clock_that_was_set_back_raises_nothing() -> None:
    row = row_of(steadily(1, 0, 600))
    assert rate(row, 0) is not None
    assert rate(row, -(10**12)) is not None


@given(st.lists(st.floats(0, 3000), min_size=1, max_size=40).map(sorted), st.floats(0, 2000))
def test_ranges_hold_their_estimate(finishes_s: list[float], later_s: float) -> None:
    found = rate(row_of(finishes_s), round((finishes_s[-1] + later_s) * 1000))
    if found is None:
        return
    assert 0 <= found.low <= found.per_s <= found.high < math.inf
