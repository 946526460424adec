"""A queue as it was at a moment: read-only, with ways to earlier and later moments."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.http import HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.accounts.models import Project
from dstackweb.lib.errors import Invalid
from dstackweb.lib.forms import whole_number
from dstackweb.runs import selectors, services
from dstackweb.runs.models import Job, Queue, Run
from dstackweb.runs.queue import past
from dstackweb.runs.queue.past import PastQueue, PastQueueRow
from dstackweb.web.common.pages import PageRequest, project_page, reader_zone, sentence
from dstackweb.wording import queue as queue_words, units, waiting
from dstackweb.wording.units import needs

PER_PAGE = 25
HOURS = 6
"""Shown on each side of the moment."""
STEPS = (
    (dt.timedelta(days=-1), gettext_lazy("−1 d")),
    (dt.timedelta(hours=-1), gettext_lazy("−1 h")),
    (dt.timedelta(minutes=-1), gettext_lazy("−1 min")),
    (dt.timedelta(minutes=1), gettext_lazy("+1 min")),
    (dt.timedelta(hours=1), gettext_lazy("+1 h")),
    (dt.timedelta(days=1), gettext_lazy("+1 d")),
)
BAR = 40


class Hour(NamedTuple):
    """An hour beside the moment: its time of day, runs waiting at its end (None: unknown), a bar from 0 to BAR."""

    hour: str
    minute: str
    length: int | None
    bar: int
    address: str
    is_shown: bool


@project_page()
def past_page(request: PageRequest, queue: str) -> HttpResponse:
    """The queue at `t`, by default now; with `run`, the page of the list on which that run was."""
    found = services.find_queue(request.project, queue)
    run = selectors.find_run(request.project, name) if (name := request.GET.get("run", "")) else None
    now, zone, text = timezone.now(), reader_zone(request), request.GET.get("t", "")
    values: dict[str, Any] = {"queue": found, "zone": zone, "chosen": run, "now": now}
    at = now
    try:
        at = past.parse_moment(text, zone, now) if text else now
    except Invalid as error:
        values["problem"] = sentence(error.errors[0]["msg"])
    else:
        page = whole_number(request.GET.get("page"), least=1)
        offset = (page - 1) * PER_PAGE
        # A page that is asked for is shown, whether the run is on it or not.
        values |= _shown(past.queue_at(found, at, PER_PAGE, offset, run if "page" not in request.GET else None), zone)
    values |= _ways(found, at, now, zone, run)
    return render(request, "queue/past.html", values)


def address(project: Project, queue: str, at: dt.datetime, run: Run | None = None, **more: int) -> str:
    """The page of a queue at a moment."""
    of_run = {"run": str(run.uid)} if run is not None else {}
    query = {"t": at.astimezone(dt.UTC).isoformat().replace("+00:00", "Z"), **of_run, **more}
    return f"{reverse('web:past', args=[project.name, queue])}?{urlencode(query)}"


def address_of(run: Run, jobs: Collection[Job], now: dt.datetime) -> str:
    """The page of the queue in which a run waits or waited last, as it was then; empty where that is not kept."""
    at = past.moment_of(run, jobs)
    return address(run.project, run.queue.name, at, run) if at is not None and at > now - past.KEPT else ""


def _ways(queue: Queue, at: dt.datetime, now: dt.datetime, zone: dt.tzinfo, run: Run | None) -> dict[str, Any]:
    """The ways to other moments. What is not kept, or to come, has no address."""
    first = now - past.KEPT + dt.timedelta(minutes=1)
    steps = [
        (label, address(queue.project, queue.name, at + step, run) if first <= at + step <= now else "")
        for step, label in STEPS
    ]
    hour = dt.timedelta(hours=1)
    lengths = past.lengths(queue, at - HOURS * hour, at + HOURS * hour)
    most = max((length or 0 for length in lengths.values()), default=0) or 1
    hours = [
        Hour(
            hour=f"{begin.astimezone(zone):%H}",
            minute=f"{begin.astimezone(zone):%M}",
            length=length,
            bar=BAR * (length or 0) // most,
            address=address(queue.project, queue.name, max(begin, first), run)
            if begin <= now and begin + hour > first
            else "",
            is_shown=begin <= at < begin + hour,
        )
        for begin, length in lengths.items()
    ]
    return {
        "at": at,
        "steps": steps,
        "hours": hours,
        "local": f"{at.astimezone(zone):%Y-%m-%dT%H:%M}",
        "first": f"{first.astimezone(zone):%Y-%m-%dT%H:%M}",
        "last": f"{now.astimezone(zone):%Y-%m-%dT%H:%M}",
        "kept_days": past.KEPT.days,
        "queues": list(Queue.objects.filter(project=queue.project_id)),
        "moment": at.astimezone(dt.UTC).isoformat().replace("+00:00", "Z"),
    }


def _shown(found: PastQueue, zone: dt.tzinfo) -> dict[str, Any]:
    page = (found.rows[0].position - 1) // PER_PAGE + 1 if found.rows else 1
    pages = max(1, -(-found.waiting // PER_PAGE))
    pause = past.pause_at(found.queue, found.at) if found.settings["paused"] else None
    day = found.at.astimezone(zone).date()
    return {
        "past": found,
        "settings": found.settings,
        "pause": pause,
        "rows": [_cell(row, found, day, zone) for row in found.rows],
        "not_shown": found.placed_total - len(found.placed),
        "gpus": units.gpus(sum(row.gpus for row in found.placed)),
        "page": page,
        "pages": pages,
        "total": found.waiting,
        "first_shown": (page - 1) * PER_PAGE + 1,
        "last_shown": (page - 1) * PER_PAGE + len(found.rows),
        "previous_page": address(found.queue.project, found.queue.name, found.at, page=page - 1),
        "next_page": address(found.queue.project, found.queue.name, found.at, page=page + 1),
        "deleted": _("deleted run"),
    }


def _cell(row: PastQueueRow, found: PastQueue, day: dt.date, zone: dt.tzinfo) -> dict[str, Any]:
    why = waiting.reason(row.reason, row.reason_data) if row.reason else None
    same_day = row.then_at is not None and row.then_at.astimezone(zone).date() == day
    return row.values() | {
        "needs": needs(row.spec) if row.spec else "",
        "why": why,
        "waited": units.duration((found.at - row.queued_at).total_seconds()),
        "left": queue_words.left(row.then),
        "style": "hour" if same_day else "moment",
        "chosen": row.position == found.position,
    }
