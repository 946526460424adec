"""The time left: exact for steady work, in order, and never a jump."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from dstackweb.progress import time_left
from dstackweb.progress.pace import Pace, Step
from dstackweb.progress.time_left import Left, Part, Shown, aged, followed, of_all, of_part
from tests.progress.test_pace import STEPS, pace_of


def steady(per_s: float, running: int, seconds: int = 600, timed: bool = True) -> Pace:
    """Tasks that took turns on so many workers."""
    duration_s = running / per_s
    finished = round(60 * per_s)
    step = Step(60, finished, running, finished if timed else 0, finished * duration_s if timed else 0)
    return pace_of([step] * (seconds // 60))


def part(pace: Pace, unfinished: int, running: int, total: int = 10_000) -> Part:
    return Part(pace, total, unfinished, running)


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("running", [1, 50])
def test_steady_work_ends_when_its_tasks_have_had_their_turn(running: int, timed: bool) -> None:
    left = of_part(part(steady(2, running, timed=timed), 1200, running))
    assert left is not None
    assert left.seconds == pytest.approx(600, rel=0.06)
    assert left.low < 600 < left.high < 1.5 * left.low


def test_tasks_that_are_only_said_to_be_done_have_a_time_left_too() -> None:
    pace = pace_of([Step(10, 20, 0)] * 60)
    left, whole = of_part(part(pace, 100, 0)), of_all([part(pace, 100, 0)], part(pace, 100, 0))
    assert left is not None
    assert whole is not None
    assert left.seconds == pytest.approx(50, rel=0.2)
    assert whole.seconds == pytest.approx(50, rel=0.2)


def test_nothing_is_said_before_a_task_has_finished_nor_when_none_is_left() -> None:
    begun, gone = part(pace_of([Step(60, 0, 8)]), 100, 8), part(steady(2, 8), 0, 0)
    assert of_part(begun) is None
    assert of_part(gone) is None
    assert of_all([begun], begun) is None
    assert of_all([gone], gone) is None
    assert of_all([], part(Pace(), 0, 0, 0)) is None


def test_of_prefixes_with_workers_of_their_own_the_slowest_counts() -> None:
    fast, slow = part(steady(10, 20), 1000, 20), part(steady(1, 5), 900, 5)
    both = part(steady(11, 25), 1900, 25)
    left = of_all([fast, slow], both)
    assert left is not None
    assert left.seconds == pytest.approx(900, rel=0.1)


def test_stages_that_wait_for_each_other_take_the_sum_of_their_work() -> None:
    pace = steady(2, 8)
    left = of_all([part(pace, 600, 8, 1000), part(Pace(), 1000, 0, 1000)], part(pace, 1600, 8, 2000))
    assert left is not None
    assert left.seconds == pytest.approx(800, rel=0.1)  # tasks of the second stage may take as long as the first's
    assert left.low < 500
    assert left.high > 3000


def test_a_stage_that_has_not_begun_is_longer_than_its_tasks_are_many() -> None:
    pace = steady(10, 8)
    left = of_all([part(pace, 0, 0, 10_000), part(Pace(), 4, 4, 4)], part(pace, 4, 4, 10_004))
    assert left is not None
    assert left.seconds > 10 * 8 / 10


def test_prefixes_that_take_turns_on_the_same_workers_end_together() -> None:
    """Each of them seems slow alone."""
    one = pace_of([Step(10, 60, 12, 60, 120.0), Step(10, 20, 4, 20, 40.0)] * 30)
    other = pace_of([Step(10, 2, 4, 2, 40.0), Step(10, 6, 12, 6, 120.0)] * 30)
    all_of = pace_of([Step(10, 62, 16, 62, 160.0), Step(10, 26, 16, 26, 160.0)] * 30)
    left = of_all([part(one, 8000, 8), part(other, 40, 8)], part(all_of, 8040, 16))
    assert left is not None
    assert left.seconds == pytest.approx((8000 * 2 + 40 * 20) / 16, rel=0.1)
    alone = of_part(part(one, 8000, 8))
    assert alone is not None
    assert left.seconds < 0.6 * alone.seconds


def test_tasks_of_prefixes_that_are_not_looked_at_count_too() -> None:
    pace = steady(2, 8)
    some, every = (
        of_all([part(pace, 10, 8)], part(pace, 10, 8)),
        of_all([part(pace, 10, 8)], part(pace, 1000, 8, 20_000)),
    )
    assert some is not None
    assert every is not None
    assert every.seconds > 10 * some.seconds


def test_tasks_that_are_assigned_to_workers_do_not_count_as_so_many_workers() -> None:
    pace = pace_of([Step(10, 20, 900 - 20 * number, 20, 80.0) for number in range(20)])
    left = of_part(part(pace, 500, 500))
    assert left is not None
    assert left.seconds == pytest.approx(250, rel=0.1)


def test_more_tasks_are_expected_while_some_are_added() -> None:
    steps = [Step(10, 20, 8, 20, 80.0, added=20)] * 60
    with_new, fixed = pace_of(steps), pace_of(step._replace(added=0) for step in steps)
    estimates = [of_all([part(pace, 400, 8)], part(pace, 400, 8)) for pace in (with_new, fixed)]
    growing, same = [left for left in estimates if left]
    assert growing.seconds > 1.5 * same.seconds
    assert growing.high > same.high
    known = of_all([part(with_new, 400, 8)], part(with_new, 400, 8), finds_more=False)
    assert known == same


PARTS = st.builds(
    lambda steps, total, unfinished, running: Part(
        pace_of(steps), total, min(total, unfinished), min(total, unfinished, running)
    ),
    STEPS, st.integers(1, 10**9), st.integers(0, 10**9), st.integers(0, 10**6),
)  # fmt: skip


@given(st.lists(PARTS, max_size=4), PARTS)
def test_estimates_are_in_order_and_never_negative(parts: list[Part], whole: Part) -> None:
    for left in (of_all(parts, whole), *map(of_part, parts)):
        if left is not None:
            assert 0 <= left.low <= left.seconds <= left.high
            assert left.seconds <= time_left.FAR_S
            assert not math.isnan(left.high)


@given(st.floats(0.001, 1e12), st.floats(0.001, 1e6), st.floats(-4, 4))
def test_a_trend_changes_any_time_without_an_overflow(seconds: float, worked_s: float, trend: float) -> None:
    stretched = time_left._extended(seconds, Pace(seconds=worked_s), trend)
    assert stretched >= 0
    assert trend >= 0 or stretched >= seconds * 0.999 or stretched >= worked_s * math.expm1(50) * 0.999


@given(PARTS, st.integers(1, 10**6))
def test_more_tasks_take_no_less_time(few: Part, more: int) -> None:
    many = Part(few.pace, few.total + more, few.unfinished + more, few.running)
    if few.has_waiting and (before := of_part(few)) is not None:
        after = of_part(many)
        assert after is not None
        assert after.seconds >= before.seconds * (1 - 1e-9)


LEFTS = st.tuples(*[st.floats(0, 1e7)] * 3).map(lambda numbers: Left(*(sorted(numbers)[at] for at in (1, 0, 2))))


@given(LEFTS, LEFTS, st.floats(0.1, 60))
def test_what_is_shown_changes_by_a_tenth_at_most(shown: Left, new: Left, seconds: float) -> None:
    after = followed(shown, new, worked_s=3600, seconds=seconds)
    assert 0 <= after.low <= after.seconds <= after.high
    limit = math.exp(time_left.STEP_MAX * seconds / time_left.STEP_S)
    floor = time_left.FLOOR_S
    assert after.seconds + floor <= (shown.seconds + floor) * limit * 1.001
    assert after.seconds + floor >= (max(0.0, shown.seconds - seconds) + floor) / limit / 1.001


def test_what_is_shown_reaches_a_new_estimate_and_goes_down_with_it() -> None:
    shown = Left(100, 80, 120)
    for second in range(400):
        shown = followed(shown, Left(1000 - second, 900 - second, 1100 - second), 3600 + second, 1)
    assert shown == pytest.approx(Left(600, 500, 700), rel=0.02)


def test_a_steady_estimate_is_shown_as_it_is() -> None:
    shown = Left(100, 80, 120)
    assert followed(shown, Left(90, 70, 110), 3600, 10) == pytest.approx(Left(90, 70, 110))
    assert followed(shown, Left(500, 500, 500), 3600, 0) == shown


def test_without_news_time_goes_on_and_what_is_overdue_takes_longer() -> None:
    assert aged(Left(100, 80, 120), 30) == Left(70, 50, 90)
    overdue = aged(Left(100, 80, 120), 1000)
    assert overdue.low < overdue.seconds < overdue.high
    assert overdue.seconds > 500


def test_what_is_left_of_a_pause_stays() -> None:
    shown = Shown(1_000, 60.0, Left(100, 80, 120))
    assert Shown.of(str(shown)) == shown
    assert Shown.of("[]") is None
    is_open = Shown(1_000, 60.0, Left(100, 80, math.inf))
    assert "Infinity" not in str(is_open)  # PostgreSQL's JSON has none
    assert Shown.of(str(is_open)) == is_open
    unknown = Shown(1_000, 60.0, None)
    assert Shown.of(str(unknown)) == unknown.after(shown) == unknown
    assert unknown.at(31_000, running=2) is None
    assert shown.at(31_000, running=0) == Left(100, 80, 120)
    assert shown.at(31_000, running=2) == Left(70, 50, 90)
