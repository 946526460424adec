"""The pace of work: exact for steady work however it is reported, and quick to forget."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given, strategies as st

from dstackweb.progress.pace import LIFE_MAX_S, Pace, Step

STEPS = st.lists(
    st.builds(
        Step,
        seconds=st.integers(0, 10**9).map(lambda ms: ms / 1000),
        finished=st.integers(0, 10**6),
        running=st.floats(0, 1e5),
        timed=st.integers(0, 10**6),
        timed_s=st.floats(0, 1e9),
        added=st.integers(0, 10**6),
    ),
    max_size=30,
)


def pace_of(steps: Iterable[Step]) -> Pace:
    pace = Pace()
    for step in steps:
        pace = pace.after(step)
    return pace


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=40))
def test_steady_work_has_its_rate_however_it_is_reported(seconds: list[int]) -> None:
    pace = pace_of(Step(each, 3 * each, 12, 3 * each, 12.0 * each) for each in seconds)
    assert pace.rate == pytest.approx(3)
    assert (pace.mean_running, pace.running_now) == pytest.approx((12, 12))
    assert pace.duration_s == pytest.approx(4)
    assert pace.trend == pytest.approx(0, abs=1e-6)
    assert pace.variance == pytest.approx(0, abs=1e-6)
    assert pace.spread == pytest.approx(0.3 if len(seconds) == 1 else 0, abs=1e-6)


@pytest.mark.parametrize("scale", [1, 60, 3600])
def test_a_new_rate_is_known_after_as_much_time_again_on_every_scale(scale: int) -> None:
    pace = pace_of([Step(scale, 1, 2)] * 100 + [Step(scale, 8, 2)] * 100)
    assert pace.rate * scale == pytest.approx(8, rel=0.06)


def test_a_burst_at_the_beginning_is_soon_forgotten() -> None:
    pace = pace_of([Step(1, 5000, 8), *[Step(1, 2, 8)] * 100])
    assert pace.rate == pytest.approx(2, rel=0.03)


def test_durations_are_worked_out_where_none_was_timed() -> None:
    assert pace_of([Step(10, 5, 4)] * 10).duration_s == pytest.approx(8)
    assert pace_of([Step(10, 5, 0)] * 10).duration_s is None
    assert Pace().duration_s is None


def test_the_spread_of_durations_is_seen_in_reports_of_one_task_as_of_many() -> None:
    steps = [Step(1, 1, 4, 1, 2.0), Step(1, 1, 4, 1, 6.0)] * 50
    assert pace_of(steps).spread == pytest.approx(math.sqrt(math.log1p(0.25)), rel=0.1)


def test_of_years_the_clock_keeps_a_constant_span() -> None:
    pace = pace_of([Step(86_400, 10, 1)] * 400)
    assert pace.seconds == LIFE_MAX_S
    assert pace.rate * 86_400 == pytest.approx(10, rel=0.03)


@given(STEPS)
def test_what_is_stored_is_read_back(steps: list[Step]) -> None:
    pace = pace_of(steps)
    assert list(Pace.of(str(pace))) == pytest.approx(list(pace), rel=1e-6)
    assert all(number >= 0 and math.isfinite(number) for number in pace)
