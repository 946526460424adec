"""When a run with a schedule enters its queue. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from croniter import croniter

from dstackweb.runs.states import Reason

BY_PEOPLE = (Reason.STOPPED_BY_USER, Reason.ABORTED_BY_USER)
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def next_time(crons: Sequence[str], after: dt.datetime) -> dt.datetime:
    """The earliest time strictly after `after` (UTC) at which one of the cron expressions comes round."""
    found: list[dt.datetime] = [croniter(cron, after).get_next(dt.datetime) for cron in crons]
    return min(found)


def next_after_end(crons: Sequence[str], stop_reason: str, now: dt.datetime) -> dt.datetime | None:
    """When a scheduled run that ended at `now` is due again; None without a schedule.

    Whoever stops the run ends its schedule. The times that passed while it ran are left out, not caught up.
    """
    return next_time(crons, now) if crons and stop_reason not in BY_PEOPLE else None


def occurrence_time(at: dt.datetime, crons: Sequence[str], now: dt.datetime) -> dt.datetime:
    """The time of an occurrence that was due at `at` and is made at `now`: a missed time is left out.

    Cron knows minutes: what is less than one late is not missed.
    """
    return at if now - at < dt.timedelta(minutes=1) else next_time(crons, now)


def seniority_us(at: dt.datetime) -> int:
    """The seniority (µs) of a run that enters its queue at its time: waiting for the hour is no waiting in line."""
    return (at - EPOCH) // dt.timedelta(microseconds=1)
