"""Statistics of the cache of offers (docs/offers.md). A hit writes nothing: processes write sums every few seconds. A
killed process loses its last ones, and nothing else depends on them."""

from __future__ import annotations

import datetime as dt
import logging
import os
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, fields
from typing import Any

from django.db import DatabaseError, IntegrityError, transaction
from django.db.models import F, Sum
from django.utils import timezone

from dstackweb.backends.models import Backend
from dstackweb.lib import sql
from dstackweb.offers.models import CacheCount, Result

log = logging.getLogger(__name__)

FLUSH_S = 5.0
KEPT = dt.timedelta(days=90)


@dataclass(frozen=True)
class Figures:
    """Sums of CacheCount's columns."""

    hits: int = 0
    misses: int = 0
    coalesced: int = 0
    calls: int = 0
    failures: int = 0
    throttles: int = 0
    stale_served: int = 0
    uncached: int = 0

    @property
    def saved(self) -> int:
        """Calls that the cache saved; below zero where sources were kept fresh for few readers."""
        return self.uncached - self.calls

    @property
    def saved_percent(self) -> float | None:
        """Calls saved, in percent of `uncached`; None if nothing was looked up or more calls were made than saved."""
        return 100 * self.saved / self.uncached if self.uncached and self.saved >= 0 else None

    def __add__(self, other: Figures) -> Figures:
        return Figures(**{name: getattr(self, name) + getattr(other, name) for name in NAMES})


NAMES = tuple(field.name for field in fields(Figures))

_lock = threading.Lock()
_numbers: defaultdict[tuple[int, dt.datetime], Counter[str]] = defaultdict(Counter)
_used: dict[tuple[int, str], dt.datetime] = {}
_since = 0.0


def add(backend_id: int, **numbers: int) -> None:
    """Count for a backend: the names are columns of CacheCount."""
    global _since
    hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    with _lock:
        _since = _since or time.monotonic()
        _numbers[backend_id, hour].update(numbers)


def record_use(backend_id: int, digest: str, at: dt.datetime) -> None:
    global _since
    with _lock:
        _since = _since or time.monotonic()
        _used[backend_id, digest] = at


def flush(**_signal: Any) -> None:
    """Write the sums; after a task too, since its worker may end before the next one.

    What the database rejects is tried again next time.
    """
    global _since
    with _lock:
        numbers, results = dict(_numbers), dict(_used)
        _numbers.clear()
        _used.clear()
        _since = 0.0
    if not numbers and not results:
        return
    try:
        there = set(Backend.objects.filter(pk__in={pk for pk, _ in (*numbers, *results)}).values_list("pk", flat=True))
        for (pk, digest), at in sorted(results.items()):
            Result.objects.filter(backend=pk, digest=digest, used_at__lt=at).update(used_at=at)
        for key in sorted(numbers):
            if key[0] in there:
                _write(*key, numbers[key])
            del numbers[key]
    except DatabaseError as error:
        log.warning("counts of offers can't be written yet: %s", error)
        for (pk, hour), counter in numbers.items():
            with _lock:
                _since = _since or time.monotonic()
                _numbers[pk, hour] += counter


def flush_if_due(**_signal: Any) -> None:
    if _since and time.monotonic() - _since > FLUSH_S:
        flush()


def by_hour(backend: Backend, since: dt.datetime) -> list[tuple[dt.datetime, Figures]]:
    """Each hour with any counts, newest first."""
    rows = CacheCount.objects.filter(backend=backend, hour__gte=since).order_by("-hour")
    return [(row.hour, Figures(**{name: getattr(row, name) for name in NAMES})) for row in rows]


def totals(since: dt.datetime) -> dict[str, Figures]:
    """By backend name; backends without counts are left out."""
    hours = CacheCount.objects.filter(hour__gte=since, backend__deleted_at=None).order_by()
    sums = hours.values_list("backend__name").annotate(*(Sum(name) for name in NAMES))
    return {backend: Figures(*numbers) for backend, *numbers in sums}


def last_day(now: dt.datetime) -> dict[str, Figures]:
    return totals(now - dt.timedelta(hours=24))


def prune(now: dt.datetime) -> None:
    CacheCount.objects.filter(hour__lt=now - KEPT).delete()


def forget() -> None:
    """Drop unwritten counts: they are another process's, or of deleted rows."""
    global _lock, _since
    _lock = threading.Lock()
    _numbers.clear()
    _used.clear()
    _since = 0.0


def _write(backend_id: int, hour: dt.datetime, counter: Counter[str]) -> None:
    try:
        with transaction.atomic():
            shifts = {name: F(name) + number for name, number in counter.items()}
            sql.shift(CacheCount, {"backend_id": backend_id, "hour": hour}, shifts)
    except IntegrityError:
        log.info("the backend %s was deleted before its counts were written", backend_id)


os.register_at_fork(after_in_child=forget)
