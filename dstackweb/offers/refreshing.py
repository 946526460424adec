"""A refresh by hand of what backends offer, for pages and API: each backend at most once in a while."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable

from dstackweb.backends.models import Backend
from dstackweb.lib.errors import TooMany
from dstackweb.lib.models import Bucket, Busy
from dstackweb.offers import sources

EVERY_S = 10.0
"""So that nobody who keeps pressing has a cloud asked without end."""


def refresh(backends: Iterable[Backend], now: dt.datetime) -> list[Backend]:
    """Have all of these asked anew, but for those that were just now; returns the others.

    Raises TooMany where that is none of them, though there are some. Own hosts are always as they are: none is asked.
    """
    refreshed: list[Backend] = []
    waits: list[float] = []
    for backend in backends:
        try:
            Bucket.reserve(f"refresh:{backend.pk}", 1 / EVERY_S, 1, 0.0, round(now.timestamp() * 1e6))
        except Busy as busy:
            waits.append(busy.wait_s)
            continue
        sources.refresh_now(backend)
        refreshed.append(backend)
    if waits and not refreshed:
        raise TooMany("they were asked anew just now", retry_after=min(waits))
    return refreshed
