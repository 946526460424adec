"""What the cache of offers has done, as sums: by the hour, or since some time. docs/offers.md says what each counts."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, fields

from django.db.models import Sum

from dstackweb.backends.models import Backend
from dstackweb.offers.models import CacheCount


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
        """Calls that the cache has saved; below zero where sources were kept fresh for hardly anybody."""
        return self.uncached - self.calls

    @property
    def saved_percent(self) -> float | None:
        """Calls saved, in percent of `uncached`; None where nothing was looked up, or more was called than saved."""
        return 100 * self.saved / self.uncached if self.uncached and self.saved >= 0 else None

    def __add__(self, other: Figures) -> Figures:
        return Figures(**{name: getattr(self, name) + getattr(other, name) for name in NAMES})


NAMES = tuple(field.name for field in fields(Figures))


def by_hour(backend: Backend, since: dt.datetime) -> list[tuple[dt.datetime, Figures]]:
    """Each hour since then in which something was counted, the newest first."""
    rows = CacheCount.objects.filter(backend=backend, hour__gte=since).order_by("-hour")
    return [(row.hour, Figures(**{name: getattr(row, name) for name in NAMES})) for row in rows]


def totals(since: dt.datetime) -> dict[str, Figures]:
    """Of each backend by its name, since then; those of which nothing was counted are left out."""
    found: dict[str, Figures] = {}
    hours = CacheCount.objects.filter(hour__gte=since, backend__deleted_at=None)
    sums = hours.order_by().values_list("backend__name").annotate(*(Sum(name) for name in NAMES))
    for backend, *numbers in sums:
        found[backend] = Figures(*numbers)
    return found


def last_day(now: dt.datetime) -> dict[str, Figures]:
    """Of each backend by its name, over the last 24 hours."""
    return totals(now - dt.timedelta(hours=24))
