"""Quiet hours and daily messages, by the clock on the wall, also when it is changed."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, strategies as st

from dstackweb.notifications.hours import Hours, after_quiet, next_time, send_at

BERLIN = ZoneInfo("Europe/Berlin")
ZONES = [ZoneInfo(name) for name in ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe")]
MOMENTS = st.datetimes(dt.datetime(2026, 1, 1), dt.datetime(2027, 12, 31), timezones=st.just(dt.UTC))
TIMES = st.times().map(lambda time: time.replace(second=0, microsecond=0, fold=0))


def at(day: int, time: str, month: int = 11, fold: int = 0) -> dt.datetime:
    """A moment in Berlin."""
    hour, minute = map(int, time.split(":"))
    return dt.datetime(2026, month, day, hour, minute, tzinfo=BERLIN, fold=fold).astimezone(dt.UTC)


def clock(text: str) -> dt.time:
    return dt.time.fromisoformat(text)


NIGHT = Hours(BERLIN, clock("22:00"), clock("07:30"))
LUNCH = Hours(BERLIN, clock("12:00"), clock("13:00"))


@pytest.mark.parametrize(
    ("hours", "now", "expected"),
    [
        (NIGHT, at(26, "21:59"), at(26, "21:59")),
        (NIGHT, at(26, "22:00"), at(27, "07:30")),
        (NIGHT, at(27, "03:00"), at(27, "07:30")),
        (NIGHT, at(27, "07:30"), at(27, "07:30")),
        (LUNCH, at(26, "12:30"), at(26, "13:00")),
        (LUNCH, at(26, "13:00"), at(26, "13:00")),
        (Hours(BERLIN), at(26, "03:00"), at(26, "03:00")),
        (NIGHT._replace(digest_at=clock("08:00")), at(26, "09:00"), at(27, "08:00")),
        (NIGHT._replace(digest_at=clock("23:00")), at(26, "22:30"), at(26, "23:00")),
    ],
)
def test_what_happens_is_sent_when_quiet_hours_end_or_with_the_daily_message(
    hours: Hours, now: dt.datetime, expected: dt.datetime
) -> None:
    assert send_at(now, hours) == expected


def test_clocks_that_change_change_the_moment_and_not_the_time_of_day() -> None:
    # Put back at 03:00 on 25 October, and on at 02:00 on 29 March.
    assert send_at(at(24, "23:00", month=10), NIGHT) == at(25, "07:30", month=10)
    half_past_two = Hours(BERLIN, clock("00:00"), clock("02:30"))
    assert send_at(at(25, "02:15", month=10), half_past_two) == at(25, "02:30", month=10)
    assert send_at(at(25, "02:15", month=10, fold=1), half_past_two) == at(25, "02:30", month=10, fold=1)
    assert send_at(at(29, "01:00", month=3), half_past_two) == at(29, "03:30", month=3)


@given(MOMENTS, TIMES, TIMES, st.sampled_from(ZONES))
def test_nothing_is_sent_in_quiet_hours_and_nothing_waits_longer_than_a_day(
    now: dt.datetime, begin: dt.time, end: dt.time, zone: ZoneInfo
) -> None:
    hours = Hours(zone, begin, end if end != begin else dt.time((end.hour + 1) % 24))
    sent = after_quiet(now, hours)
    assert now <= sent <= now + dt.timedelta(hours=25)
    assert after_quiet(sent, hours) == sent


@given(MOMENTS, TIMES, st.sampled_from(ZONES))
def test_a_daily_message_comes_each_day_at_its_time(now: dt.datetime, time: dt.time, zone: ZoneInfo) -> None:
    found = next_time(now, time, zone)
    assert now <= found <= now + dt.timedelta(hours=25)
    shown = found.astimezone(zone).time()
    skipped = dt.datetime.combine(found.astimezone(zone).date(), time, zone).astimezone(dt.UTC).astimezone(zone)
    assert shown in (time, skipped.time())
