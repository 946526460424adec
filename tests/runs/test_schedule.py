"""When scheduled runs recur."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given, strategies as st

from dstackweb.runs.recurrence import next_after_end, next_time, occurrence_time, seniority_us

NIGHTLY = ["0 2 * * *"]


def at(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC)


MOMENTS = st.datetimes(dt.datetime(2000, 1, 1), dt.datetime(2200, 1, 1), timezones=st.just(dt.UTC))


@given(MOMENTS, st.lists(st.sampled_from(["0 2 * * *", "*/7 * * * *", "30 4 1 * *", "0 0 * * 1"]), min_size=1))
def test_the_next_time_is_the_earliest_of_all_expressions_and_lies_ahead(moment: dt.datetime, crons: list[str]) -> None:
    found = next_time(crons, moment)
    assert found > moment
    assert found == min(next_time([cron], moment) for cron in crons)


@pytest.mark.parametrize("stopped", ["stopped_by_user", "aborted_by_user"])
def test_stopping_a_run_ends_its_schedule(stopped: str) -> None:
    assert next_after_end(NIGHTLY, stopped, at("2026-11-03T02:10")) is None


def test_times_that_passed_during_a_run_are_left_out() -> None:
    assert next_after_end(NIGHTLY, "", at("2026-11-06T03:00")) == at("2026-11-07T02:00")
    assert next_after_end([], "", at("2026-11-06T03:00")) is None


def test_a_time_missed_by_less_than_a_minute_still_counts() -> None:
    due = at("2026-11-06T02:00")
    assert occurrence_time(due, NIGHTLY, at("2026-11-05T12:00")) == due
    assert occurrence_time(due, NIGHTLY, at("2026-11-06T02:00:59")) == due
    assert occurrence_time(due, NIGHTLY, at("2026-11-09T12:00")) == at("2026-11-10T02:00")


@given(MOMENTS)
def test_the_seniority_is_the_exact_microsecond(moment: dt.datetime) -> None:
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    assert epoch + dt.timedelta(microseconds=seniority_us(moment)) == moment
