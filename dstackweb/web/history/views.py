"""What was: how long runs waited and how many stood in line, of one queue or of all of a project."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.utils import timezone

from dstackweb.runs import history, selectors, services
from dstackweb.runs.history import History, HistoryRange
from dstackweb.runs.history_math import BANDS, WaitStats, band_limits, parse_zone
from dstackweb.runs.models import Queue, QueueCount
from dstackweb.web.common.pages import PageRequest, polled, project_page

DAYS = (7, 30)
POLL_S = 60
SPARK_HEIGHT = 20


@project_page()
def queue_history(request: PageRequest, queue: str) -> HttpResponse:
    """The past of one queue; also what polls of the page get."""
    default = queue == "default"  # which every project has, even before its first run
    found = services.ensure_queue(request.project) if default else selectors.find_queue(request.project, queue)

    def read(asked: Asked) -> dict[str, Any]:
        told = history.series(found, asked.view)
        return {"queue": found, **_told(told, asked), "waiting_now": QueueCount.objects.get(queue=found).submitted}

    return _page(request, read)


@project_page()
def project_history(request: PageRequest) -> HttpResponse:
    """The past of all queues of the project together, and of each."""

    def read(asked: Asked) -> dict[str, Any]:
        told, each = history.overview(request.project, asked.view)
        waiting = dict(QueueCount.objects.filter(queue__project=request.project).values_list("queue", "submitted"))
        lines = [QueueLine.of(queue, of_queue, waiting.get(queue.pk, 0)) for queue, of_queue in each]
        return {"lines": lines, **_told(told, asked), "waiting_now": sum(waiting.values())}

    return _page(request, read)


@dataclass(frozen=True)
class Asked:
    """What the reader asked for, and where they are."""

    view: HistoryRange
    as_table: bool

    @classmethod
    def of(cls, request: HttpRequest) -> Asked:
        """From the query string, and the zone that times.js keeps in a cookie."""
        month = request.GET.get("days") == "30"
        try:
            zone = parse_zone(request.COOKIES.get("zone", ""))
        except ValueError:
            zone = parse_zone("UTC")
        return cls(HistoryRange(timezone.now(), 30 if month else 7, not month, zone), request.GET.get("as") == "table")


def _page(request: PageRequest, read: Callable[[Asked], dict[str, Any]]) -> HttpResponse:
    asked = Asked.of(request)
    slot = int(asked.view.now.timestamp()) // POLL_S
    version = f"{selectors.list_version(request.project)}-{slot}-{asked.view.zone}"

    def context() -> dict[str, Any]:
        queues = list(Queue.objects.filter(project=request.project))
        values = {"view": asked.view, "as_table": asked.as_table, "days_offered": DAYS, "poll_s": POLL_S}
        return {"queues": queues, **values, **read(asked)}

    return polled(request, "history/history.html", "history/body.html", version, context)


def _told(told: History, asked: Asked) -> dict[str, Any]:
    return {
        "history": told,
        "empty": told.empty,
        "today": told.since(told.today),
        "week": told.since(asked.view.midnight(6)),
        "whole": told.since(told.times[0]),
        "bands": [BandLine.of(told, band) for band in reversed(range(BANDS))],
        "columns": told.columns(),
        "spans": _spans(told) if asked.as_table else [],
    }


def band_name(band: int) -> str:
    """A band by its priorities: `50–74`."""
    return "{}–{}".format(*band_limits(band))


@dataclass(frozen=True)
class BandLine:
    """One priority band: today, and over all that is shown."""

    band: int
    name: str
    today: WaitStats
    whole: WaitStats

    @classmethod
    def of(cls, told: History, band: int) -> BandLine:
        """The band's sums."""
        return cls(band, band_name(band), told.since(told.today, band), told.since(told.times[0], band))


@dataclass(frozen=True)
class QueueLine:
    """One queue of the project. `spark` has the points of its line's length over time."""

    queue: Queue
    waiting: int
    whole: WaitStats
    spark: list[str]
    width: int

    @classmethod
    def of(cls, queue: Queue, told: History, waiting: int) -> QueueLine:
        """The queue's sums."""
        return cls(queue, waiting, told.since(told.times[0]), _spark(told.all), len(told.all) - 1)


def _spark(tallies: list[WaitStats]) -> list[str]:
    """The polylines (SVG points) of a line's length: one for each stretch without a gap."""
    most = max((tally.length_max or 0 for tally in tallies), default=0) or 1
    lines: list[list[str]] = [[]]
    for index, tally in enumerate(tallies):
        if tally.length_max is None:
            lines.append([])
        else:
            lines[-1].append(f"{index},{SPARK_HEIGHT - SPARK_HEIGHT * tally.length_max / most:.1f}")
    return [" ".join(line) for line in lines if len(line) > 1]


@dataclass(frozen=True)
class Span:
    """One row of the table: a band in an hour or a day."""

    at: dt.datetime
    day: str
    band: str
    tally: WaitStats


def _spans(told: History) -> list[Span]:
    """Whatever happened, newest first."""
    return [
        Span(at, f"{at.astimezone(told.view.zone):%Y-%m-%d}", band_name(band), tally)
        for at, *bands in reversed(list(zip(told.times, *told.bands, strict=True)))
        for band, tally in reversed(list(enumerate(bands)))
        if tally.placed or tally.length_max
    ]
