"""When a run with a schedule enters its queue. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from croniter import croniter

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def next_time(crons: Sequence[str], after: dt.datetime) -> dt.datetime:
    """The earliest time strictly after `after` (UTC) at which one of the cron expressions comes round."""
    found: list[dt.datetime] = [croniter(cron, after).get_next(dt.datetime) for cron in crons]
    return min(found)


def seniority_us(at: dt.datetime) -> int:
    """The seniority (µs) of a run that enters its queue at its time: waiting for the hour is no waiting in line."""
    return (at - EPOCH) // dt.timedelta(microseconds=1)
