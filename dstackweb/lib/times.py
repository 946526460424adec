"""Moments as whole milliseconds since 1970, which both databases compare and group in the same way."""

from __future__ import annotations

import datetime as dt


def to_ms(moment: dt.datetime) -> int:
    """Milliseconds since 1970, rounded."""
    return round(moment.timestamp() * 1000)


def to_moment(at_ms: int) -> dt.datetime:
    """The inverse of `to_ms`, in UTC."""
    return dt.datetime.fromtimestamp(at_ms / 1000, dt.UTC)
