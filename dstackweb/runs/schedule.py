"""When scheduled runs enter their queue. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from croniter import croniter

from dstackweb.runs.states import Reason

BY_PEOPLE = (Reason.STOPPED_BY_USER, Reason.ABORTED_BY_USER)
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def next_time(crons: Sequence[str], after: dt.datetime) -> dt.datetime:
    """The first time after `after` (UTC) that matches one of the cron expressions."""
    found: list[dt.datetime] = [croniter(cron, after).get_next(dt.datetime) for cron in crons]
    return min(found)


def next_after_end(crons: Sequence[str], stop_reason: str, now: dt.datetime) -> dt.datetime | None:
    """When a scheduled run that ended at `now` is due again; None without a schedule.

    Stopping the run ends its schedule. Times that passed while it ran are skipped.
    """
    return next_time(crons, now) if crons and stop_reason not in BY_PEOPLE else None


def occurrence_time(at: dt.datetime, crons: Sequence[str], now: dt.datetime) -> dt.datetime:
    """The time of an occurrence due at `at` and created at `now`: a missed time is skipped.

    Cron counts minutes: less than one minute late is not missed.
    """
    return at if now - at < dt.timedelta(minutes=1) else next_time(crons, now)


def seniority_us(at: dt.datetime) -> int:
    """The seniority (µs) of a run that enters its queue at `at`: time before its schedule is no waiting."""
    return (at - EPOCH) // dt.timedelta(microseconds=1)
