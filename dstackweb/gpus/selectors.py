"""Samples for charts (columns on one grid of moments) and lists (the newest sample of each GPU)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from django.db.models import Avg, Count, F, FloatField, Max, Min, OuterRef, Q, QuerySet, Subquery, Sum
from django.db.models.expressions import Combinable
from django.db.models.functions import Cast

from dstackweb.backends.models import Gpu
from dstackweb.gpus.averages import BUCKET_MS
from dstackweb.gpus.models import GpuAverage, GpuSample, GpuSeries, interval_ms
from dstackweb.gpus.window import MAX_GAP
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE

MEASURED = ("utilization", "memory_used_mib", "power_w", "temperature_c")


@dataclass(frozen=True)
class Columns:
    """Averages of a series over the `step_ms` after each moment of `at_ms`, which all series of a chart share; of the
    temperature the maximum. None where no sample is known."""

    series: GpuSeries
    step_ms: int
    at_ms: list[int]
    utilization: list[float | None]
    memory_used_mib: list[float | None]
    power_w: list[float | None]
    temperature_c: list[float | None]


def samples_of(jobs: Iterable[Job], since_ms: int, until_ms: int, points: int) -> list[Columns]:
    """The columns of all GPUs of jobs, by node and by NVML's index; at most `points` moments."""
    series = GpuSeries.objects.filter(job__in=[job.pk for job in jobs]).select_related("job")
    return columns(series.order_by("job__attempt", "job__node", "index", "uuid"), since_ms, until_ms, points)


def columns(series: Iterable[GpuSeries], since_ms: int, until_ms: int, points: int) -> list[Columns]:
    """The columns of these series, in their order; at most `points` (two or more) moments from one to the other.

    Samples of the last day are shown as they are where there is room, and else as averages.
    """
    chosen = list(series)
    step_ms = _step_ms(until_ms - since_ms, points)
    grid = list(range(since_ms - since_ms % step_ms, until_ms, step_ms))
    slots: dict[int, defaultdict[int, list[_Part]]] = {one.pk: defaultdict(list) for one in chosen}
    if grid:
        for part in _parts(list(slots), grid[0], until_ms, step_ms):
            for slot_ms in range(max(part.at_ms, grid[0]), part.at_ms + part.width_ms, step_ms):
                slots[part.series_id][slot_ms - slot_ms % step_ms].append(part)
    return [Columns(one, step_ms, grid, *_filled(slots[one.pk], grid)) for one in chosen]


def _step_ms(span_ms: int, points: int) -> int:
    """Between two moments: whole intervals, or whole five minutes where that is near: these are averaged already."""
    least_ms = span_ms / max(1, points - 1)
    unit_ms = interval_ms()
    if least_ms > BUCKET_MS // 2:
        unit_ms = BUCKET_MS
    return unit_ms * max(1, int(-(-least_ms // unit_ms)))


class _Part(NamedTuple):
    """A series' samples in `width_ms` from `at_ms` on: its first and last moment, and by MEASURED the averages (of the
    temperature the maximum)."""

    series_id: int
    at_ms: int
    width_ms: int
    first_ms: int
    last_ms: int
    samples: int
    values: tuple[float | None, ...]


def _parts(series: Sequence[int], since_ms: int, until_ms: int, step_ms: int) -> Iterator[_Part]:
    """Samples where they are needed and stored, averages for the rest."""
    averages = GpuAverage.objects.filter(series__in=series, at_ms__gt=since_ms - BUCKET_MS, at_ms__lt=until_ms)
    samples = GpuSample.objects.filter(series__in=series, at_ms__gte=since_ms, at_ms__lt=until_ms)
    if step_ms % BUCKET_MS == 0:
        averages = averages.filter(at_ms__lt=F("series__averaged_ms"))
        samples = samples.filter(at_ms__gte=F("series__averaged_ms"))
        width_ms = step_ms
    else:
        averages = averages.filter(Q(series__first_ms=None) | Q(at_ms__lte=F("series__first_ms") - BUCKET_MS))
        width_ms = BUCKET_MS
    yield from _grouped(
        averages, width_ms, BUCKET_MS - interval_ms(), Sum("samples"),
        [_weighted("utilization"), _weighted("memory_used_mib"), _weighted("power_w"), Max("temperature_max_c")],
    )  # fmt: skip
    yield from _grouped(
        samples, step_ms, 0, Count("pk"),
        [Avg("utilization"), Avg("memory_used_mib"), Avg("power_w"), Max("temperature_c")],
    )  # fmt: skip


def _grouped(
    rows: QuerySet[Any], width_ms: int, length_ms: int, number: Combinable, measured: Sequence[Combinable]
) -> Iterator[_Part]:
    """Rows by series and `width_ms`; each stands for `length_ms` after its own moment."""
    grouped = rows.values("series_id", slot=F("at_ms") - F("at_ms") % width_ms).order_by()
    values = {f"values_{place}": expression for place, expression in enumerate(measured)}
    for row in grouped.annotate(n=number, first=Min("at_ms"), last=Max("at_ms"), **values):
        # PostgreSQL's averages of whole numbers are decimals.
        found = tuple(None if row[name] is None else float(row[name]) for name in values)
        yield _Part(row["series_id"], row["slot"], width_ms, row["first"], row["last"] + length_ms, row["n"], found)


def _weighted(name: str) -> Combinable:
    """The average of a column of averages, by how many samples each is of."""
    total = Sum(Cast(F(name), FloatField()) * F("samples"), output_field=FloatField())
    return total / Cast(Sum("samples", filter=Q(**{f"{name}__isnull": False})), FloatField())


def _merged(parts: Sequence[_Part]) -> tuple[float | None, ...]:
    """By MEASURED."""
    columns = [
        [(value, part.samples) for part in parts if (value := part.values[place]) is not None]
        for place in range(len(MEASURED))
    ]
    averages = (
        round(sum(value * number for value, number in known) / sum(number for _value, number in known), 2)
        if known
        else None
        for known in columns[:-1]
    )
    return *averages, max((value for value, _number in columns[-1]), default=None)


def _filled(slots: Mapping[int, list[_Part]], grid: Sequence[int]) -> Iterator[list[float | None]]:
    """A series' columns. Between samples that are as close as a verdict requires there is no gap: a sample stands for
    the time before it."""
    rows: list[tuple[float | None, ...]] = [(None,) * len(MEASURED)] * len(grid)
    before: tuple[int, int] | None = None
    for place, at_ms in enumerate(grid):
        parts = slots.get(at_ms)
        if parts is None:
            continue
        rows[place] = _merged(parts)
        if before is not None and min(part.first_ms for part in parts) - before[1] <= MAX_GAP * interval_ms():
            rows[before[0] + 1 : place] = [rows[place]] * (place - before[0] - 1)
        before = place, max(part.last_ms for part in parts)
    for column in range(len(MEASURED)):
        yield [row[column] for row in rows]


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
