"""The GPUs page, and the page of one GPU."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from django.http import HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.access import visible_projects
from dstackweb.backends.models import Gpu
from dstackweb.gpus.models import GpuSeries, HostSampling
from dstackweb.gpus.selectors import MEASURED, Columns, columns
from dstackweb.lib.errors import NotFound
from dstackweb.lib.times import to_ms
from dstackweb.scheduler.team_hosts import list_hosts
from dstackweb.web.common.pages import PageRequest, SortHeader, fingerprint, polled, project_page
from dstackweb.web.gpus import chart as gpu_chart, gpu_rows
from dstackweb.web.gpus.gpu_rows import MEASURES, STATES, GpuFilters, GpuRow
from dstackweb.wording import units

POLL_S = 5
RECENT_JOBS = 10
SERIES = 40
"""Series of one GPU in its chart."""
RANGES = {"1h": dt.timedelta(hours=1), "6h": dt.timedelta(hours=6), "24h": dt.timedelta(hours=24)}


@project_page()
def gpus_page(request: PageRequest) -> HttpResponse:
    """All GPUs; also the polled part of the page."""
    filters, now = GpuFilters.of(request.GET), timezone.now()
    gpus = gpu_rows.of_hosts(list_hosts(), _seen(request), now) + gpu_rows.elsewhere(request.project, now)
    # A machine without the NVML library has no sampling errors.
    failing = HostSampling.objects.exclude(error="").filter(host__left_at=None)
    sampling_errors = list(failing.select_related("host").order_by("host"))
    counts = Counter(row.state for row in gpus)
    errors = [(one.pk, one.library, one.error) for one in sampling_errors]
    version = fingerprint([row.stamp for row in gpus], errors)

    def context() -> dict[str, Any]:
        selected = filters.select(gpus)
        return {
            "filters": filters,
            "as_map": filters.query(**{"as": ""}),
            "as_list": filters.query(**{"as": "table"}),
            "all_states": filters.query(state=""),
            "gpus": gpus,
            "selected": selected,
            "groups": gpu_rows.groups(selected, filters),
            "counts": counts,
            "present": len(gpus) - counts["gone"],
            "held_utilization": gpu_rows.mean("utilization", [row for row in gpus if row.state == "held"]),
            "memory": gpu_rows.mean("memory", gpus),
            "states": [(key, label, filters.query(state=key), counts[key]) for key, label in STATES.items()],
            "colours": [
                (key, label, filters.query(colour=key), key == filters.colour) for key, label in MEASURES.items()
            ],
            "sorts": [("place", _("Machine")), ("who", _("Run")), *MEASURES.items()],
            "heads": {
                key: SortHeader.of(key, filters.sort, filters.query, most_first=key in MEASURES)
                for key in ("place", "who", *MEASURES)
            },
            "sampling_errors": sampling_errors,
            "poll_s": POLL_S,
            "gpus_url": reverse("web:gpus", args=[request.project.name]),
            "shades": range(gpu_rows.SHADES + 1),
        }

    return polled(request, "gpus/gpus.html", "gpus/gpus_body.html", version, context)


@project_page()
def gpu_page(request: PageRequest, uuid: str) -> HttpResponse:
    """One GPU: current values, processes, recent history and jobs; also the polled part of the page."""
    now = timezone.now()
    gpu = _found(request, uuid, now)
    span = request.GET.get("range", "")
    span = span if span in RANGES else "1h"
    as_table = request.GET.get("as") == "table"
    version = fingerprint(gpu.stamp, span, as_table)

    def context() -> dict[str, Any]:
        series, since = _series(request, gpu), now - RANGES[span]
        points = gpu_chart.ROWS if as_table else gpu_chart.POINTS
        past = _merged(columns(series, to_ms(since), to_ms(now) + 1, points))
        table = "&as=table" if as_table else ""
        return {
            "gpu": gpu,
            "recent_jobs": [one.job for one in series if one.job][:RECENT_JOBS],
            "seen": _seen(request),
            "chart": gpu_chart.chart_data(past, since, now),
            "rows": gpu_chart.table_rows(past),
            "as_table": as_table,
            "here": f"?range={span}",
            "ranges": [(units.chart_range(long), f"?range={key}{table}", key == span) for key, long in RANGES.items()],
            "poll_s": POLL_S,
        }

    return polled(request, "gpus/gpu.html", "gpus/gpu_body.html", version, context)


def _found(request: PageRequest, uuid: str, now: dt.datetime) -> GpuRow:
    host = Gpu.objects.filter(uuid=uuid, host__left_at=None).values_list("host__name", flat=True).first()
    if host is None:
        rows = gpu_rows.elsewhere(request.project, now)
    else:
        rows = gpu_rows.of_hosts(list_hosts(host), _seen(request), now)
    found = next((row for row in rows if row.uuid == uuid), None)
    if found is None:
        raise NotFound(_("no host and no running job has a GPU %s") % uuid)
    return found


def _seen(request: PageRequest) -> set[int]:
    return {project.pk for project in visible_projects(request.user)}


def _series(request: PageRequest, gpu: GpuRow) -> list[GpuSeries]:
    """All series of a host's GPU; for a cloud GPU those of the project's jobs. Newest samples first."""
    rows = GpuSeries.objects.filter(uuid=gpu.uuid, last_ms__isnull=False)
    if gpu.gpu is None:
        rows = rows.filter(job__run__project=request.project)
    return list(rows.select_related("job__run__project", "job__run__user").order_by("-last_ms", "-id")[:SERIES])


def _merged(parts: Sequence[Columns]) -> list[Columns]:
    """One GPU's columns across its jobs: at each moment those of the series that has a sample."""
    if not parts:
        return []
    measured: dict[str, Any] = {name: _one([getattr(part, name) for part in parts]) for name in MEASURED}
    return [replace(parts[0], **measured)]


def _one(columns: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The known value at each moment: only one job holds a GPU at a time."""
    return [next((value for value in row if value is not None), None) for row in zip(*columns, strict=True)]
