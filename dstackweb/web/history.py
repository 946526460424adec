"""History pages: wait times and queue lengths, of one queue or all of a project."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils import timezone
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_safe

from dstackweb.lib import exports
from dstackweb.runs import history, selectors, services, start_estimates
from dstackweb.runs.history import History, HistoryRange
from dstackweb.runs.models import Queue, QueueCount
from dstackweb.runs.start_estimates import Calibration
from dstackweb.runs.wait_stats import BANDS, WaitStats, band_limits
from dstackweb.web.common.pages import PageRequest, polled, project_page, reader_zone
from dstackweb.wording import tables

RANGES = {
    "hours=1": gettext_lazy("1 h"),
    "days=1": gettext_lazy("24 h"),
    "days=7": gettext_lazy("7 d"),
    "days=30": gettext_lazy("30 d"),
}
"""What is offered, by the query that selects it."""
POLL_S = 60
SPARK_HEIGHT = 20


@project_page()
def queue_history(request: PageRequest, queue: str) -> HttpResponse:
    found = services.find_queue(request.project, queue)

    def read(filters: HistoryFilters) -> dict[str, Any]:
        past = history.series(found, filters.view(queue=found))
        today = history.series(found, filters.today) if filters.range.in_slots else past
        return {
            "queue": found,
            **_totals(past, today, filters),
            "waiting_now": QueueCount.objects.get(queue=found).submitted,
        }

    return _page(request, read)


@project_page()
def project_history(request: PageRequest) -> HttpResponse:

    def read(filters: HistoryFilters) -> dict[str, Any]:
        total, each = history.overview(request.project, filters.view(queue__project=request.project))
        today = history.overview(request.project, filters.today)[0] if filters.range.in_slots else total
        waiting = dict(QueueCount.objects.filter(queue__project=request.project).values_list("queue", "submitted"))
        rows = [
            {
                "queue": queue,
                "waiting": waiting.get(queue.pk, 0),
                "whole": past.since(past.times[0]),
                "spark": polylines([tally.length_max for tally in past.all]),
                "width": len(past.all) - 1,
            }
            for queue, past in each
        ]
        return {
            "queue_rows": rows,
            **_totals(total, today, filters),
            **_estimates(),
            "waiting_now": sum(waiting.values()),
        }

    return _page(request, read)


@require_safe
@project_page()
def export(request: PageRequest, form: str) -> HttpResponseBase:
    """Waits and lengths of all queues of the project, or of the one called `queue`, by hour, day or 5 minutes."""
    name = request.GET.get("queue", "")
    one = services.find_queue(request.project, name) if name else None
    of = {"queue": one} if one else {"queue__project": request.project}
    found = tables.history_table(request.project, HistoryFilters.of(request).view(**of), one)
    return exports.response(f"history-{name or request.project.name}", form, tables.HISTORY_COLUMNS, found)


@dataclass(frozen=True)
class HistoryFilters:
    """The days and the view that the query string selects, in the user's time zone."""

    range: HistoryRange
    as_table: bool

    def view(self, **of: Any) -> HistoryRange:
        """The range, fitted to the data there is of these rows."""
        rows = self.range.model._default_manager.filter(**of)
        return self.range.fitted(history.first_span(rows, self.range.times[0]))

    @property
    def today(self) -> HistoryRange:
        """The last 24 hours, which hold today."""
        return HistoryRange(self.range.now, 1, hourly=True, zone=self.range.zone, hours=24)

    @property
    def query(self) -> str:
        return "hours=1" if self.range.in_slots else f"days={self.range.days}"

    @classmethod
    def of(cls, request: HttpRequest) -> HistoryFilters:
        """From the query string, in the reader's zone."""
        asked = request.GET.get("days", "")
        in_slots = request.GET.get("hours") == "1"
        days = int(asked) if f"days={asked}" in RANGES else 1 if in_slots else 7
        zone = reader_zone(request)
        hours = 24 if days == 1 else 0
        view = HistoryRange(timezone.now(), days, days <= 7, zone, hours, in_slots=in_slots)
        return cls(view, request.GET.get("as") == "table")


def _page(request: PageRequest, read: Callable[[HistoryFilters], dict[str, Any]]) -> HttpResponse:
    filters = HistoryFilters.of(request)
    slot = int(filters.range.now.timestamp()) // POLL_S
    version = f"{selectors.list_version(request.project)}-{slot}-{filters.range.zone}"

    def context() -> dict[str, Any]:
        queues = list(Queue.objects.filter(project=request.project))
        values = {"view": filters.range, "as_table": filters.as_table, "poll_s": POLL_S}
        return {"queues": queues, "ranges": RANGES, "range_query": filters.query, **values, **read(filters)}

    return polled(request, "history/history.html", "history/body.html", version, context)


class EstimateLine(NamedTuple):
    """Starts that were expected so far ahead (seconds; None for longer, and for all), and how many were in time, in %.

    `factors` correct later estimates; None where nothing is corrected.
    """

    ahead_s: int | None
    starts: int
    by_p50: float
    by_p90: float | None
    factors: tuple[float, float] | None


def _estimates() -> dict[str, Any]:
    lines = [_estimate_line(one) for one in start_estimates.calibration()]
    return {"estimates": lines[:-1], "estimates_whole": lines[-1] if lines else None}


def _estimate_line(one: Calibration) -> EstimateLine:
    factors = one.factors if one.factors != (1.0, 1.0) else None
    by_p90 = None if one.p90.share is None else 100 * one.p90.share
    return EstimateLine(one.ahead_s, one.p50.starts, 100 * (one.p50.share or 0), by_p90, factors)


def _totals(past: History, day: History, filters: HistoryFilters) -> dict[str, Any]:
    return {
        "history": past,
        "empty": past.empty,
        "view": past.view,
        "data_since": past.times[0] if past.times[0] > filters.range.times[0] else None,
        "today": day.since(day.today),
        "whole": past.since(past.times[0]),
        "bands": [
            (band, band_name(band), day.since(day.today, band), past.since(past.times[0], band))
            for band in reversed(range(BANDS))
        ],
        "columns": past.columns(),
        "spans": _spans(past) if filters.as_table else [],
    }


def band_name(band: int) -> str:
    """The priorities of a band: `50–74`."""
    return "{}–{}".format(*band_limits(band))


def polylines(numbers: Sequence[int | None]) -> list[str]:
    """Numbers as SVG polylines, SPARK_HEIGHT high: one for each stretch without a gap."""
    most = max((number or 0 for number in numbers), default=0) or 1
    lines: list[list[str]] = [[]]
    for index, number in enumerate(numbers):
        if number is None:
            lines.append([])
        else:
            lines[-1].append(f"{index},{SPARK_HEIGHT - SPARK_HEIGHT * number / most:.1f}")
    return [" ".join(line) for line in lines if len(line) > 1]


def _spans(past: History) -> list[tuple[dt.datetime, str, str, WaitStats]]:
    """The rows of the table that have data, newest first: start, day, band and its numbers."""
    return [
        (at, f"{at.astimezone(past.view.zone):%Y-%m-%d}", band_name(band), tally)
        for at, *bands in reversed(list(zip(past.times, *past.bands, strict=True)))
        for band, tally in reversed(list(enumerate(bands)))
        if tally.placed or tally.length_max
    ]
