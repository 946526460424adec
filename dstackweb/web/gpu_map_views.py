"""The GPUs page, and the page of one GPU."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.http import HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.access import visible_projects
from dstackweb.backends.models import Gpu
from dstackweb.gpus.judging import to_moment, to_ms
from dstackweb.gpus.models import GpuSeries, HostSampling
from dstackweb.gpus.selectors import Columns, columns
from dstackweb.lib.errors import NotFound
from dstackweb.runs import selectors
from dstackweb.runs.models import Job, Run
from dstackweb.scheduler.host_list import listed
from dstackweb.web import gpu_map
from dstackweb.web.gpu_map import MEASURES, STATES, Asked, GpuLine
from dstackweb.web.gpu_panel import Cell, Row
from dstackweb.web.pages import PageRequest, polled, project_page

POLL_S = 5
POINTS = 360
"""Of a chart."""
ROWS = 120
"""Of the table that says the same."""
LATELY = 10
"""Jobs that had a GPU before."""
RANGES = {"1h": dt.timedelta(hours=1), "6h": dt.timedelta(hours=6), "24h": dt.timedelta(hours=24)}


class Head(NamedTuple):
    """A column's heading by which the list can be sorted: where it leads, and how it is sorted now."""

    query: str
    aria: str


def _head(asked: Asked, by: str) -> Head:
    if asked.sort.removeprefix("-") != by:
        return Head(asked.query(sort=by), "none")
    turned = asked.sort.startswith("-")
    from_least = turned if by in MEASURES else not turned  # measures have the most first
    return Head(asked.query(sort=by if turned else f"-{by}"), "ascending" if from_least else "descending")


@project_page()
def gpus_page(request: PageRequest) -> HttpResponse:
    """Every GPU; also what polls of the page get."""
    asked, now = Asked.of(request.GET), timezone.now()
    every = gpu_map.everything(request.project, request.user, now)
    troubles = list(_troubles())
    shown = [line.stamp for line in every.lines], [(look.pk, look.library, look.error) for look in troubles]
    version = hashlib.sha256(repr(shown).encode()).hexdigest()[:16]

    def context() -> dict[str, Any]:
        chosen = asked.chosen(every.lines)
        return {
            "asked": asked,
            "as_map": asked.query(**{"as": ""}),
            "as_list": asked.query(**{"as": "table"}),
            "all_states": asked.query(state=""),
            "every": every,
            "chosen": [asked.shown(line) for line in chosen],
            "groups": asked.groups(chosen),
            "counts": {state: every.count(state) for state in STATES},
            "held_utilization": every.mean("utilization", "held"),
            "memory": every.mean("memory"),
            "states": [(key, label, asked.query(state=key), every.count(key)) for key, label in STATES.items()],
            "colours": [(key, label, asked.query(colour=key), key == asked.colour) for key, label in MEASURES.items()],
            "sorts": [("place", _("Machine")), ("who", _("Held by")), *MEASURES.items()],
            "heads": {key: _head(asked, key) for key in ("place", "who", *MEASURES)},
            "troubles": troubles,
            "poll_s": POLL_S,
            "gpus_url": reverse("web:gpus", args=[request.project.name]),
            "shades": range(gpu_map.SHADES + 1),
            "waiting": selectors.counts(request.project)["submitted"],
        }

    return polled(request, "gpus/gpus.html", "gpus/gpus_body.html", version, context)


def _troubles() -> Any:
    """Hosts whose GPUs can't all be read. A machine without NVML's library has nothing that could fail."""
    return HostSampling.objects.exclude(error="").filter(host__left_at=None).select_related("host").order_by("host")


@dataclass(frozen=True)
class Held:
    """A job that had the GPU, or has it."""

    job: Job
    run: Run
    hidden: bool


@project_page()
def gpu_page(request: PageRequest, uuid: str) -> HttpResponse:
    """One GPU: what it does, who computes on it, its last hours and who had it; also what polls of the page get."""
    now = timezone.now()
    line = _found(request, uuid, now)
    back = request.GET.get("range", "")
    back = back if back in RANGES else "1h"
    as_table = request.GET.get("as") == "table"
    version = hashlib.sha256(repr((line.stamp, back, as_table)).encode()).hexdigest()[:16]

    def context() -> dict[str, Any]:
        merged = _past(request, line, now - RANGES[back], now, ROWS if as_table else POINTS)
        table = "&as=table" if as_table else ""
        return {
            "line": line,
            "lately": _lately(request, line),
            "chart": _chart(line, merged, now - RANGES[back], now),
            "rows": _rows(merged),
            "as_table": as_table,
            "here": f"?range={back}",
            "ranges": [(key, f"?range={key}{table}", key == back) for key in RANGES],
            "poll_s": POLL_S,
            "waiting": selectors.counts(request.project)["submitted"],
        }

    return polled(request, "gpus/gpu.html", "gpus/gpu_body.html", version, context)


def _found(request: PageRequest, uuid: str, now: dt.datetime) -> GpuLine:
    host = Gpu.objects.filter(uuid=uuid, host__left_at=None).values_list("host__name", flat=True).first()
    if host is None:
        lines = gpu_map.elsewhere(request.project, now)
    else:
        seen = {project.pk for project in visible_projects(request.user)}
        lines = gpu_map.of_hosts(listed(host), seen, now)
    found = next((line for line in lines if line.uuid == uuid), None)
    if found is None:
        raise NotFound(_("no GPU of a host, nor of a run that goes on, is called %s") % uuid)
    return found


def _series(request: PageRequest, line: GpuLine) -> list[GpuSeries]:
    """All of a host's GPU; of a GPU elsewhere what the project's jobs have seen."""
    rows = GpuSeries.objects.filter(uuid=line.uuid)
    if line.gpu is None:
        rows = rows.filter(job__run__project=request.project)
    return list(rows.select_related("job__run__project", "job__run__user").order_by("-id")[: 4 * LATELY])


def _lately(request: PageRequest, line: GpuLine) -> list[Held]:
    """Who had it, newest first."""
    seen = {project.pk for project in visible_projects(request.user)}
    jobs = [series.job for series in _series(request, line) if series.job]
    return [Held(job, job.run, job.run.project_id not in seen) for job in jobs[:LATELY]]


class Past(NamedTuple):
    """One GPU over time, whoever had it."""

    at_ms: list[int]
    utilization: list[float | None]
    memory_mib: list[float | None]


def _past(request: PageRequest, line: GpuLine, since: dt.datetime, until: dt.datetime, points: int) -> Past:
    parts = columns(_series(request, line), to_ms(since), to_ms(until) + 1, points)
    if not parts:
        return Past([], [], [])
    return Past(parts[0].at_ms, _one(parts, "utilization"), _one(parts, "memory_used_mib"))


def _one(parts: Sequence[Columns], name: str) -> list[float | None]:
    """At each moment the number of the series that has one: a GPU is under one job at a time."""
    rows = zip(*(getattr(part, name) for part in parts), strict=True)
    return [next((value for value in row if value is not None), None) for row in rows]


def _chart(line: GpuLine, past: Past, since: dt.datetime, until: dt.datetime) -> dict[str, Any]:
    """What gpu-charts.js draws: without a minimum, since policies are of runs."""
    pairs = enumerate(zip(past.utilization, past.memory_mib, strict=True), start=1)
    known = max((place for place, pair in pairs if Cell(*pair).known), default=0)
    gpu = {
        "uuid": line.uuid,
        "index": line.index,
        "memory_mib": line.memory_mib,
        "utilization": past.utilization[:known],
        "memory_used_mib": past.memory_mib[:known],
    }
    return {
        "since_ms": to_ms(since), "until_ms": to_ms(until), "minimum": None, "low_since_ms": None,
        "low_until_ms": None, "at_ms": past.at_ms[:known], "gpus": [gpu],
    }  # fmt: skip


def _rows(past: Past) -> list[Row]:
    cells = [Cell(*pair) for pair in zip(past.utilization, past.memory_mib, strict=True)]
    return [Row(to_moment(at_ms), [cell]) for at_ms, cell in zip(past.at_ms, cells, strict=True) if cell.known][::-1]
