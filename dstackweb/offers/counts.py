"""What the cache has done, added up in memory and written every few seconds: a hit writes nothing itself.

A process that is killed loses the last seconds of its counts, and nothing else depends on them.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import threading
import time
from collections import Counter, defaultdict
from typing import Any

from django.db import DatabaseError, IntegrityError, transaction
from django.db.models import F
from django.utils import timezone

from dstackweb.backends.models import Backend
from dstackweb.offers.models import CacheCount, Result

log = logging.getLogger(__name__)

FLUSH_S = 5.0
KEPT = dt.timedelta(days=90)

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
        counter = _numbers[backend_id, hour]
        for name, number in numbers.items():
            counter[name] += number


def used(backend_id: int, digest: str, at: dt.datetime) -> None:
    """Remember that a kept result was used."""
    global _since
    with _lock:
        _since = _since or time.monotonic()
        _used[backend_id, digest] = at


def flush() -> None:
    """Write what has added up. What the database does not take now is tried again next time."""
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
    """After a request: write, unless that was done just now."""
    if _since and time.monotonic() - _since > FLUSH_S:
        flush()


def flush_after_task(**_signal: Any) -> None:
    """After a task, whose worker may be gone before the next one."""
    flush()


def prune(now: dt.datetime) -> None:
    """Drop the hours that nobody looks at any more."""
    CacheCount.objects.filter(hour__lt=now - KEPT).delete()


def forget() -> None:
    """Drop what is not written: it is another process's, or of rows that are gone."""
    global _lock, _since
    _lock = threading.Lock()
    _numbers.clear()
    _used.clear()
    _since = 0.0


def _write(backend_id: int, hour: dt.datetime, counter: Counter[str]) -> None:
    try:
        with transaction.atomic():
            CacheCount.objects.bulk_create([CacheCount(backend_id=backend_id, hour=hour)], ignore_conflicts=True)
            shifts = {name: F(name) + number for name, number in counter.items()}
            CacheCount.objects.filter(backend=backend_id, hour=hour).update(**shifts)
    except IntegrityError:
        log.info("the backend %s was deleted before its counts were written", backend_id)


os.register_at_fork(after_in_child=forget)
