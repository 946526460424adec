"""Samples for charts (columns on one grid of moments) and lists (the newest sample of each GPU)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from django.db.models import Avg, Count, F, FloatField, Max, Min, OuterRef, Q, Subquery, Sum
from django.db.models.expressions import Combinable
from django.db.models.functions import Cast

from dstackweb.backends.models import Gpu
from dstackweb.gpus.models import GpuAverage, GpuSample, GpuSeries, interval_ms
from dstackweb.gpus.policy.window import MAX_GAP
from dstackweb.gpus.samples.averages import BUCKET_MS
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE

MEASURED = ("utilization", "memory_used_mib", "power_w", "temperature_c")


@dataclass(frozen=True)
class Columns:
    """What one series did: for each moment of `at_ms` (the same for all series of an answer), over the `step_ms` that
    begin there, its average; the temperature is the highest. None is where nothing is known."""

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
    slots: dict[int, dict[int, _Slot]] = {one.pk: {} for one in chosen}
    if grid:
        for part in _parts(list(slots), grid[0], until_ms, step_ms):
            for slot_ms in range(max(part.at_ms, grid[0]), part.at_ms + part.width_ms, step_ms):
                slot = slots[part.series_id].setdefault(slot_ms - slot_ms % step_ms, _Slot())
                slot.add(part)
    return [Columns(one, step_ms, grid, *_filled(slots[one.pk], grid)) for one in chosen]


def _step_ms(span_ms: int, points: int) -> int:
    """Between two moments: whole intervals, or whole five minutes where that is near: these are averaged already."""
    least_ms = span_ms / max(1, points - 1)
    unit_ms = interval_ms()
    if least_ms > BUCKET_MS // 2:
        unit_ms = BUCKET_MS
    return unit_ms * max(1, int(-(-least_ms // unit_ms)))


@dataclass(frozen=True, slots=True)
class _Part:
    """What is known of a series from `at_ms` on, for `width_ms`; `first_ms` and `last_ms` are its own samples' moments.

    `weights` and `values` go by MEASURED.
    """

    series_id: int
    at_ms: int
    width_ms: int
    first_ms: int
    last_ms: int
    weight: int
    values: tuple[float | None, ...]


@dataclass(slots=True)
class _Slot:
    """One moment of the grid."""

    first_ms: int | None = None
    last_ms: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0] * len(MEASURED))
    weights: list[int] = field(default_factory=lambda: [0] * len(MEASURED))
    hottest: float | None = None

    def add(self, part: _Part) -> None:
        self.first_ms = part.first_ms if self.first_ms is None else min(self.first_ms, part.first_ms)
        self.last_ms = max(self.last_ms, part.last_ms)
        for place, value in enumerate(part.values[:-1]):
            if value is not None:
                self.sums[place] += value * part.weight
                self.weights[place] += part.weight
        hot = part.values[-1]
        if hot is not None:
            self.hottest = hot if self.hottest is None else max(self.hottest, hot)

    def values(self) -> tuple[float | None, ...]:
        """By MEASURED."""
        averages = (
            round(total / weight, 2) if weight else None
            for total, weight in zip(self.sums[:-1], self.weights[:-1], strict=True)
        )
        return *averages, self.hottest


def _parts(series: Sequence[int], since_ms: int, until_ms: int, step_ms: int) -> Iterator[_Part]:
    """All that is known of these series: samples where they are needed and there, averages for the rest."""
    if step_ms % BUCKET_MS == 0:
        averaged = Q(at_ms__lt=F("series__averaged_ms"))
        sampled = Q(at_ms__gte=F("series__averaged_ms"))
        yield from _of_averages(series, averaged, since_ms, until_ms, step_ms)
    else:
        averaged = Q(series__first_ms=None) | Q(at_ms__lte=F("series__first_ms") - BUCKET_MS)
        sampled = Q()
        yield from _of_averages(series, averaged, since_ms, until_ms, BUCKET_MS)
    yield from _of_samples(series, sampled, since_ms, until_ms, step_ms)


def _of_samples(series: Sequence[int], which: Q, since_ms: int, until_ms: int, step_ms: int) -> Iterator[_Part]:
    rows = GpuSample.objects.filter(which, series__in=series, at_ms__gte=since_ms, at_ms__lt=until_ms)
    grouped = rows.values("series_id", slot=F("at_ms") - F("at_ms") % step_ms).order_by()
    measured = grouped.annotate(
        n=Count("pk"), first=Min("at_ms"), last=Max("at_ms"),
        values_0=Avg("utilization"), values_1=Avg("memory_used_mib"), values_2=Avg("power_w"),
        values_3=Max("temperature_c"),
    )  # fmt: skip
    for row in measured:
        yield _Part(row["series_id"], row["slot"], step_ms, row["first"], row["last"], row["n"], _values(row))


def _of_averages(series: Sequence[int], which: Q, since_ms: int, until_ms: int, step_ms: int) -> Iterator[_Part]:
    rows = GpuAverage.objects.filter(which, series__in=series, at_ms__gt=since_ms - BUCKET_MS, at_ms__lt=until_ms)
    grouped = rows.values("series_id", slot=F("at_ms") - F("at_ms") % step_ms).order_by()
    measured = grouped.annotate(
        n=Sum("samples"), first=Min("at_ms"), last=Max("at_ms"),
        values_0=_weighted("utilization"), values_1=_weighted("memory_used_mib"), values_2=_weighted("power_w"),
        values_3=Max("temperature_max_c"),
    )  # fmt: skip
    for row in measured:
        last_ms = row["last"] + BUCKET_MS - interval_ms()
        yield _Part(row["series_id"], row["slot"], step_ms, row["first"], last_ms, row["n"], _values(row))


def _weighted(name: str) -> Combinable:
    """The average of a column of averages, by how many samples each is of."""
    total = Sum(Cast(F(name), FloatField()) * F("samples"), output_field=FloatField())
    return total / Cast(Sum("samples", filter=Q(**{f"{name}__isnull": False})), FloatField())


def _values(row: Mapping[str, Any]) -> tuple[float | None, ...]:
    """By MEASURED; PostgreSQL's averages of whole numbers are decimals."""
    found = (row[f"values_{place}"] for place in range(len(MEASURED)))
    return tuple(None if value is None else float(value) for value in found)


def _filled(slots: Mapping[int, _Slot], grid: Sequence[int]) -> Iterator[list[float | None]]:
    """A series' columns. Where samples are as near to each other as the verdict wants them, no gap is between them: a
    sample stands for the time before it."""
    nothing = (None,) * len(MEASURED)
    rows: list[tuple[float | None, ...]] = [nothing] * len(grid)
    before: tuple[int, int] | None = None
    for place, at_ms in enumerate(grid):
        slot = slots.get(at_ms)
        if slot is None or slot.first_ms is None:
            continue
        rows[place] = slot.values()
        if before is not None and slot.first_ms - before[1] <= MAX_GAP * interval_ms():
            rows[before[0] + 1 : place] = [rows[place]] * (place - before[0] - 1)
        before = place, slot.last_ms
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
