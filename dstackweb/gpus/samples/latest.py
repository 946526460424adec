"""The newest sample of each GPU, and why its clocks are throttled."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from django.db.models import OuterRef, Q, Subquery

from dstackweb.backends.models import Gpu
from dstackweb.gpus.clock import interval_ms
from dstackweb.gpus.models import GpuSeries
from dstackweb.gpus.policy.window import MAX_GAP
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE


class ThrottleReason(StrEnum):
    """Why a GPU's clocks are throttled."""

    POWER_CAP = "power_cap"
    POWER_BRAKE = "power_brake"
    HEAT = "heat"
    HARDWARE = "hardware"


THROTTLE_REASONS = {
    0x04: ThrottleReason.POWER_CAP,
    0x08: ThrottleReason.HARDWARE,
    0x20: ThrottleReason.HEAT,
    0x40: ThrottleReason.HEAT,
    0x80: ThrottleReason.POWER_BRAKE,
}
"""NVML's bits (nvmlClocksEventReasons) that mean slower than possible: not an idle GPU, nor clocks set by a user."""


def throttle_reasons(bits: int | None) -> list[ThrottleReason]:
    """Why a GPU's clocks are throttled, from NVML's bits."""
    return list(dict.fromkeys(code for bit, code in THROTTLE_REASONS.items() if (bits or 0) & bit))


def is_fresh(series: GpuSeries, now_ms: int) -> bool:
    """Whether its newest sample is current: no older than the gap beyond which a verdict is unknown."""
    return series.last_ms is not None and now_ms - series.last_ms <= MAX_GAP * interval_ms()


def newest(gpus: Collection[Gpu]) -> dict[str, GpuSeries]:
    """By UUID, the series with the newest sample of each of these GPUs: its last job's, or the host's own."""
    of_jobs = GpuSeries.objects.filter(uuid=OuterRef("uuid"), job__isnull=False).order_by("-id").values("pk")[:1]
    ids = Gpu.objects.filter(pk__in=[gpu.pk for gpu in gpus]).order_by().values(newest=Subquery(of_jobs))
    found: dict[str, GpuSeries] = {}
    for series in GpuSeries.objects.filter(Q(pk__in=ids) | Q(job=None, gpu__in=gpus)).exclude(last_ms=None):
        before = found.get(series.uuid)
        if before is None or (series.last_ms or 0) > (before.last_ms or 0):
            found[series.uuid] = series
    return found


def elsewhere(project_id: int) -> list[GpuSeries]:
    """GPUs of cloud instances, under the project's active jobs; by run, node and index."""
    jobs = Job.objects.filter(run__project=project_id, status__in=JOB_ACTIVE, host=None)
    rows = GpuSeries.objects.filter(job__in=jobs).exclude(last_ms=None)
    related = rows.select_related("job__run__user", "job__run__project", "job__instance", "job__backend")
    return list(related.order_by("job__run", "job__node", "index", "uuid"))
