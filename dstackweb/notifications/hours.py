"""When a channel's notifications are sent: at once, after quiet hours, or once a day together. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import NamedTuple

DAY = dt.timedelta(days=1)


class Hours(NamedTuple):
    """Times of day in a time zone. None: no quiet hours, no daily message."""

    zone: dt.tzinfo
    quiet_from: dt.time | None = None
    quiet_until: dt.time | None = None
    digest_at: dt.time | None = None


def send_at(now: dt.datetime, hours: Hours) -> dt.datetime:
    """When to send what is written now. The daily message comes at its time, also within quiet hours."""
    if hours.digest_at is not None:
        return next_time(now, hours.digest_at, hours.zone)
    return after_quiet(now, hours)


def after_quiet(now: dt.datetime, hours: Hours) -> dt.datetime:
    """`now`, or the end of the quiet hours that it is in."""
    if hours.quiet_from is None or hours.quiet_until is None:
        return now
    time, begin, end = now.astimezone(hours.zone).time(), hours.quiet_from, hours.quiet_until
    is_quiet = begin <= time < end if begin < end else time >= begin or time < end
    return next_time(now, end, hours.zone) if is_quiet else now


def next_time(now: dt.datetime, time: dt.time, zone: dt.tzinfo) -> dt.datetime:
    """When a clock there next shows `time`, in UTC; one that it skips comes as much later as it skips."""
    return min(at for at in _around(now, time, zone) if at >= now)


def _around(now: dt.datetime, time: dt.time, zone: dt.tzinfo) -> Iterator[dt.datetime]:
    today = now.astimezone(zone).date()
    for day in (today - DAY, today, today + DAY, today + 2 * DAY):
        first, second = (dt.datetime.combine(day, time.replace(fold=fold), zone).astimezone(dt.UTC) for fold in (0, 1))
        yield first
        if second > first:  # shown twice, since the clock is put back between the two
            yield second
