"""Bands, buckets and hours of the history: pure."""

from __future__ import annotations

import bisect
import datetime as dt

BANDS = 4
"""A band is a quarter of the priorities: 0–24, 25–49, 50–74, 75–100."""

BOUNDS_S = (60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400)
"""The longest wait (whole seconds) that each bucket but the last takes."""

BUCKETS = (
    "waited_1m",
    "waited_5m",
    "waited_15m",
    "waited_1h",
    "waited_4h",
    "waited_12h",
    "waited_1d",
    "waited_longer",
)
"""The columns of `QueueHour` that count waits up to each bound, above the one before."""


def band_of(priority: int) -> int:
    """The band of a priority from 0 to 100."""
    return min(priority // 25, BANDS - 1)


def bucket_of(waited_s: int) -> int:
    """Which bucket a wait belongs to, as an index into `BUCKETS`."""
    return bisect.bisect_left(BOUNDS_S, waited_s)


def hour_of(at: dt.datetime) -> dt.datetime:
    """The beginning of the UTC hour around an aware time."""
    return at.astimezone(dt.UTC).replace(minute=0, second=0, microsecond=0)
