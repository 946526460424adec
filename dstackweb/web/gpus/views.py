"""The GPUs page, and the page of one GPU."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from django.http import HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.access import visible_projects
from dstackweb.backends.models import Gpu
from dstackweb.gpus.clock import to_ms
from dstackweb.gpus.models import GpuSeries, HostSampling
from dstackweb.gpus.samples.selectors import MEASURED, Columns, columns
from dstackweb.lib.errors import NotFound
from dstackweb.runs import selectors
from dstackweb.runs.models import Job, Run
from dstackweb.scheduler.hosts.selectors import list_hosts
from dstackweb.web.common.pages import PageRequest, polled, project_page
from dstackweb.web.gpus import chart as gpu_chart
from dstackweb.web.gpus import gpu_rows
from dstackweb.web.gpus.gpu_rows import MEASURES, STATES, Asked, GpuLine

POLL_S = 5
LATELY = 10
"""Jobs that had a GPU before."""
SERIES = 40
"""Of one GPU, for its chart."""
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
    every = gpu_rows.everything(request.project, request.user, now)
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
            "shades": range(gpu_rows.SHADES + 1),
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
        series, since = _series(request, line), now - RANGES[back]
        points = gpu_chart.ROWS if as_table else gpu_chart.POINTS
        past = _merged(columns(series, to_ms(since), to_ms(now) + 1, points))
        table = "&as=table" if as_table else ""
        return {
            "line": line,
            "lately": _lately(request, series),
            "chart": gpu_chart.drawn(past, since, now),
            "rows": gpu_chart.rows(past),
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
        lines = gpu_rows.elsewhere(request.project, now)
    else:
        seen = {project.pk for project in visible_projects(request.user)}
        lines = gpu_rows.of_hosts(list_hosts(host), seen, now)
    found = next((line for line in lines if line.uuid == uuid), None)
    if found is None:
        raise NotFound(_("no GPU of a host, nor of a run that goes on, is called %s") % uuid)
    return found


def _series(request: PageRequest, line: GpuLine) -> list[GpuSeries]:
    """All of a host's GPU; of a GPU elsewhere what the project's jobs have seen. The newest samples come first."""
    rows = GpuSeries.objects.filter(uuid=line.uuid, last_ms__isnull=False)
    if line.gpu is None:
        rows = rows.filter(job__run__project=request.project)
    return list(rows.select_related("job__run__project", "job__run__user").order_by("-last_ms", "-id")[:SERIES])


def _lately(request: PageRequest, of_gpu: Sequence[GpuSeries]) -> list[Held]:
    """Who had it, newest first."""
    seen = {project.pk for project in visible_projects(request.user)}
    jobs = [series.job for series in of_gpu if series.job]
    return [Held(job, job.run, job.run.project_id not in seen) for job in jobs[:LATELY]]


def _merged(parts: Sequence[Columns]) -> list[Columns]:
    """One GPU's columns, whoever had it: at each moment those of the series that has any. None without a series."""
    if not parts:
        return []
    measured: dict[str, Any] = {name: _one([getattr(part, name) for part in parts]) for name in MEASURED}
    return [replace(parts[0], **measured)]


def _one(columns: Sequence[Sequence[float | None]]) -> list[float | None]:
    """A GPU is under one job at a time."""
    return [next((value for value in row if value is not None), None) for row in zip(*columns, strict=True)]
