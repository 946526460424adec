"""What the cache of offers has done: looks answered, calls made and calls saved, by the hour."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.http import HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.backends.models import Backend
from dstackweb.offers import figures
from dstackweb.offers.figures import Figures
from dstackweb.runs import selectors
from dstackweb.web.common.pages import PageRequest, polled, project_page

SPANS = (24, 168)
POLL_S = 10
TALL = 100.0
"""The height of the chart, in its own units; an hour is one wide."""
NOTHING = Figures()


@dataclass(frozen=True)
class Shown:
    """Figures, and what is made of them for people."""

    of: Figures

    @property
    def looks(self) -> int:
        """Questions in all."""
        return self.of.hits + self.of.misses

    @property
    def saved_percent(self) -> float | None:
        """Of the calls that the answers would have cost; None where that is none, or less than were made."""
        return 100 * self.of.saved / self.of.uncached if self.of.uncached and self.of.saved >= 0 else None


@dataclass(frozen=True)
class Bar:
    """One hour of the chart: heights, and where the bars begin from the top."""

    at: dt.datetime
    of: Figures
    x: int
    scale: float

    @property
    def would(self) -> float:
        """What the answers would have cost without the cache."""
        return self.of.uncached * self.scale

    @property
    def would_y(self) -> float:
        return TALL - self.would

    @property
    def calls(self) -> float:
        """What was called."""
        return self.of.calls * self.scale

    @property
    def calls_y(self) -> float:
        return TALL - self.calls


@dataclass(frozen=True)
class Chart:
    """One bar for each hour, those without any figures included; `most` is what the tallest stands for."""

    bars: list[Bar]
    most: int

    @classmethod
    def of(cls, hours: Mapping[dt.datetime, Figures], since: dt.datetime, width: int) -> Chart:
        """The bars of so many hours from then on."""
        most = max((max(told.uncached, told.calls) for told in hours.values()), default=0)
        times = [since + dt.timedelta(hours=x) for x in range(width)]
        return cls([Bar(at, hours.get(at, NOTHING), x, TALL / (most or 1)) for x, at in enumerate(times)], most)

    @property
    def middle(self) -> dt.datetime:
        """The hour in the middle."""
        return self.bars[len(self.bars) // 2].at


@project_page()
def cache_page(request: PageRequest) -> HttpResponse:
    """The figures of all backends together and of each; also what polls of the page get."""
    now = timezone.now()
    width = SPANS[1] if request.GET.get("hours") == str(SPANS[1]) else SPANS[0]
    version = f"{int(now.timestamp()) // POLL_S}"

    def context() -> dict[str, Any]:
        since = now.replace(minute=0, second=0, microsecond=0) - dt.timedelta(hours=width - 1)
        hours: defaultdict[dt.datetime, Figures] = defaultdict(Figures)
        backends: list[tuple[str, Shown]] = []
        for backend in Backend.objects.all():
            counted = figures.by_hour(backend, since)
            for hour, told in counted:
                hours[hour] += told
            if counted:
                backends.append((backend.name, Shown(sum((told for _hour, told in counted), NOTHING))))
        return {
            "tab": "cache",
            "width": width,
            "spans": [(SPANS[0], _("24 hours")), (SPANS[1], _("7 days"))],
            "as_table": request.GET.get("as") == "table",
            "since": since,
            "poll_s": POLL_S,
            "all": Shown(sum(hours.values(), NOTHING)),
            "chart": Chart.of(hours, since, width),
            "told": sorted(hours.items(), reverse=True),
            "backends": backends,
            "waiting": selectors.counts(request.project)["submitted"],
        }

    return polled(request, "cloud/cache.html", "cloud/cache_body.html", version, context)


def last_day(now: dt.datetime) -> Shown:
    """The sums of the last 24 hours, of all backends."""
    return Shown(sum(figures.totals(now - dt.timedelta(hours=24)).values(), NOTHING))
