"""Requests to APIs of clouds and clusters, counted where they are sent: by API and region, in periods of ten minutes.

Processes add up their own, and write sums every few seconds, so that no caller waits for another. A killed process
loses its last ones, and nothing else depends on them.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.db import DatabaseError
from django.db.models import F, Sum
from django.db.models.functions import TruncHour
from django.utils import timezone

from dstackweb.backends.contract import SourceFailed, SourceFailure
from dstackweb.backends.models import ApiCount
from dstackweb.lib import sql

log = logging.getLogger(__name__)

FLUSH_S = 5.0
PERIOD_S = 600
LATELY = dt.timedelta(seconds=PERIOD_S)
"""The current period and the one before it."""
STRAINED_FROM = 10
"""Fewer requests are no strain."""
KEPT = dt.timedelta(days=30)
NUMBERS = ("requests", "retries", "throttles", "failures", "tight")
HOURS = 24


class Api(NamedTuple):
    """An API of a kind of backend, such as `ec2.RunInstances`, in a region or at an address."""

    kind: str
    api: str
    region: str = ""


@dataclass
class Figures:
    """Sums of ApiCount's columns for one API; `by_hour`: its requests, the current hour last."""

    requests: int = 0
    retries: int = 0
    throttles: int = 0
    failures: int = 0
    tight: int = 0
    by_hour: list[int] = field(default_factory=lambda: [0] * HOURS)

    def add(self, numbers: dict[str, int]) -> None:
        for name in NUMBERS:
            setattr(self, name, getattr(self, name) + numbers[name])


_lock = threading.Lock()
_numbers: defaultdict[tuple[Api, dt.datetime], Counter[str]] = defaultdict(Counter)
_since = 0.0


def add(api: Api, **numbers: int) -> None:
    """Count for an API: the names are columns of ApiCount. Call it outside transactions."""
    global _since
    at = period(timezone.now())
    with _lock:
        _since = _since or time.monotonic()
        _numbers[api, at].update(numbers)
    flush_if_due()


@contextmanager
def request(api: Api) -> Iterator[None]:
    """Count one request, which fails if this raises."""
    try:
        yield
    except Exception as error:
        is_throttle = isinstance(error, SourceFailed) and error.code == SourceFailure.THROTTLED
        add(api, requests=1, throttles=int(is_throttle), failures=int(not is_throttle))
        raise
    add(api, requests=1)


def flush(**_signal: Any) -> None:
    """Write the sums; after a task too, since its worker may end before the next one.

    What the database rejects is tried again next time.
    """
    global _since
    with _lock:
        numbers = dict(_numbers)
        _numbers.clear()
        _since = 0.0
    try:
        for api, at in sorted(numbers):
            shifts = {name: F(name) + number for name, number in numbers[api, at].items() if number}
            sql.shift(ApiCount, {**api._asdict(), "at": at}, shifts)
            del numbers[api, at]
    except DatabaseError as error:
        log.warning("counts of API calls can't be written yet: %s", error)
        with _lock:
            _since = _since or time.monotonic()
            for key, counter in numbers.items():
                _numbers[key] += counter


def flush_if_due(**_signal: Any) -> None:
    if _since and time.monotonic() - _since > FLUSH_S:
        flush()


def period(at: dt.datetime) -> dt.datetime:
    """The start of the period with this time."""
    return dt.datetime.fromtimestamp(at.timestamp() // PERIOD_S * PERIOD_S, dt.UTC)


def totals(since: dt.datetime) -> dict[Api, Figures]:
    """Sums of the periods that begin from `since` on."""
    rows = ApiCount.objects.filter(at__gte=since).order_by().values(*Api._fields)
    sums: defaultdict[Api, Figures] = defaultdict(Figures)
    for row in rows.annotate(**{f"sum_{name}": Sum(name) for name in NUMBERS}):
        sums[_api(row)].add({name: row[f"sum_{name}"] for name in NUMBERS})
    return dict(sums)


def lately(now: dt.datetime) -> dict[Api, Figures]:
    """Sums of the last ten to twenty minutes."""
    return totals(period(now - LATELY))


def strained(now: dt.datetime) -> dict[Api, Figures]:
    """APIs of whose requests lately a fifth or more were throttled, or left little of the burst."""
    return {
        api: figures
        for api, figures in lately(now).items()
        if figures.requests >= STRAINED_FROM and 5 * max(figures.throttles, figures.tight) >= figures.requests
    }


def last_day(now: dt.datetime) -> dict[Api, Figures]:
    """Sums of the last 24 hours that began, each hour apart too."""
    first = now.astimezone(dt.UTC).replace(minute=0, second=0, microsecond=0) - dt.timedelta(hours=HOURS - 1)
    rows = ApiCount.objects.filter(at__gte=first).order_by().annotate(hour=TruncHour("at", tzinfo=dt.UTC))
    sums: defaultdict[Api, Figures] = defaultdict(Figures)
    for row in rows.values(*Api._fields, "hour").annotate(**{f"sum_{name}": Sum(name) for name in NUMBERS}):
        figures = sums[_api(row)]
        figures.add({name: row[f"sum_{name}"] for name in NUMBERS})
        hour = round((row["hour"] - first).total_seconds() / 3600)
        if hour < HOURS:  # a clock was set back
            figures.by_hour[hour] += row["sum_requests"]
    return dict(sums)


def _api(row: dict[str, Any]) -> Api:
    return Api(row["kind"], row["api"], row["region"])


def prune(now: dt.datetime) -> None:
    ApiCount.objects.filter(at__lt=now - KEPT).delete()


def forget() -> None:
    """Drop unwritten counts: they are another process's, or of deleted rows."""
    global _lock, _since
    _lock = threading.Lock()
    _numbers.clear()
    _since = 0.0


os.register_at_fork(after_in_child=forget)
