"""What samples are counted and judged in: whole milliseconds since 1970."""

from __future__ import annotations

import datetime as dt

from django.conf import settings


def to_ms(moment: dt.datetime) -> int:
    """Whole milliseconds since 1970."""
    return round(moment.timestamp() * 1000)


def to_moment(at_ms: int) -> dt.datetime:
    """A moment of whole milliseconds, in UTC."""
    return dt.datetime.fromtimestamp(at_ms / 1000, dt.UTC)


def interval_ms() -> int:
    """Between two samples."""
    return round(settings.DSTACKWEB_SAMPLE_EVERY_S * 1000)
