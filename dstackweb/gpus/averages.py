"""What samples add up to: five-minute averages, kept for a month, and how much of the time GPUs of jobs are idle. In
small transactions, each with the rows of a few series locked: after an interruption the next call continues."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterator, Mapping, Sequence

from django.conf import settings
from django.db import transaction
from django.db.models import Avg, Count, Exists, F, Max, OuterRef, Q, QuerySet, Subquery

from dstackweb.gpus.models import GpuAverage, GpuSample, GpuSeries
from dstackweb.gpus.window import MAX_GAP
from dstackweb.lib import sql
from dstackweb.lib.times import to_ms
from dstackweb.runs import usage

BUCKET_MS = 5 * 60_000
KEPT_MS = settings.DSTACKWEB_SAMPLES_DAYS * 24 * 3_600_000
"""How long samples are kept."""
AVERAGES_KEPT = dt.timedelta(days=settings.DSTACKWEB_AVERAGES_DAYS)
SETTLED_MS = 60_000
"""Five minutes are averaged this long after their end; later samples have them averaged again."""
SERIES_AT_ONCE = 100
AT_ONCE_MS = 3_600_000
"""The most of each series that one step averages or prunes: whole five minutes."""
ROWS_AT_ONCE = 2_000
MOST_STEPS = 100
"""Steps of one kind in one call, so that it ends within the time limit of a background task."""

AVERAGED = [
    "samples", "utilization", "utilization_max", "memory_used_mib", "memory_max_mib", "power_w", "temperature_max_c",
]  # fmt: skip

IDLE_BELOW = 5
"""Percent."""
COUNTED_AT_ONCE = 200
OF_RUN = ("job__run__project_id", "job__run__user_id", "job__run__queue_id")

Uncounted = Mapping[str, Sequence[int]]
"""By day (its number since 1970), milliseconds that samples cover, and those of them in which the GPU was idle."""


def bucket_of(at_ms: int) -> int:
    """The start of the five minutes that contain a moment."""
    return at_ms - at_ms % BUCKET_MS


def has_samples() -> bool:
    """Whether there is anything to average or to prune."""
    return GpuSeries.objects.filter(first_ms__isnull=False).exists()


def roll(now: dt.datetime) -> None:
    """Average the five minutes that have passed, and prune samples that are old and averaged."""
    until_ms = bucket_of(to_ms(now) - SETTLED_MS)
    for _step in range(MOST_STEPS):
        if not _average_some(until_ms):
            break
    for _step in range(MOST_STEPS):
        if not _prune_some(bucket_of(to_ms(now) - KEPT_MS)):
            break


def _average_some(until_ms: int) -> bool:
    """Average samples of a few series up to a moment; returns whether there were any."""
    due = GpuSeries.objects.filter(first_ms__isnull=False, averaged_ms__lt=until_ms, last_ms__gte=F("averaged_ms"))
    with transaction.atomic():
        series = _lock(due.filter(first_ms__lt=until_ms))
        if not series:
            return False
        since_ms = min(max(one.averaged_ms, bucket_of(one.first_ms or 0)) for one in series)
        until_ms = min(until_ms, since_ms + AT_ONCE_MS)
        ids = [one.pk for one in series]
        sql.write(_averages(ids, since_ms, until_ms), ["series", "at_ms"], AVERAGED)
        GpuSeries.objects.filter(pk__in=ids, averaged_ms__lt=until_ms).update(averaged_ms=until_ms)
    return True


def _prune_some(before_ms: int) -> bool:
    """Prune samples of a few series, oldest first, where they are averaged; returns whether there were any."""
    averaged = Q(averaged_ms__gte=before_ms) | Q(averaged_ms__gt=F("last_ms"))
    with transaction.atomic():
        series = _lock(GpuSeries.objects.filter(averaged, first_ms__lt=before_ms))
        if not series:
            return False
        ids = [one.pk for one in series]
        until_ms = min(bucket_of(one.first_ms or 0) for one in series) + AT_ONCE_MS
        GpuSample.objects.filter(series__in=ids, at_ms__lt=min(before_ms, until_ms)).delete()
        left = GpuSample.objects.filter(series=OuterRef("pk")).order_by("at_ms").values("at_ms")[:1]
        GpuSeries.objects.filter(pk__in=ids).update(first_ms=Subquery(left))
    return True


def _lock(due: QuerySet[GpuSeries]) -> list[GpuSeries]:
    """Lock a few series, the oldest samples first, so that no sample is added meanwhile."""
    chosen = list(due.order_by("first_ms").values_list("pk", flat=True)[:SERIES_AT_ONCE])
    locked = due.filter(pk__in=chosen).select_for_update(no_key=True).order_by("pk")
    return list(locked.only("first_ms", "averaged_ms"))


def _averages(series: Collection[int], since_ms: int, until_ms: int) -> Iterator[GpuAverage]:
    """Averages of some series between two moments, from samples that are not averaged yet."""
    samples = GpuSample.objects.filter(series__in=series, at_ms__gte=since_ms, at_ms__lt=until_ms)
    fresh = samples.filter(at_ms__gte=F("series__averaged_ms"))
    buckets = fresh.values("series_id", begins_ms=F("at_ms") - F("at_ms") % BUCKET_MS).order_by()
    for row in buckets.annotate(
        number=Count("pk"),
        used=Avg("utilization"),
        most_used=Max("utilization"),
        memory=Avg("memory_used_mib"),
        most_memory=Max("memory_used_mib"),
        power=Avg("power_w"),
        hottest=Max("temperature_c"),
    ):
        yield GpuAverage(
            series_id=row["series_id"],
            at_ms=row["begins_ms"],
            samples=row["number"],
            utilization=None if row["used"] is None else round(float(row["used"]), 2),
            utilization_max=row["most_used"],
            memory_used_mib=_whole(row["memory"]),
            memory_max_mib=row["most_memory"],
            power_w=_whole(row["power"]),
            temperature_max_c=row["hottest"],
        )


def _whole(average: float | None) -> int | None:
    return None if average is None else round(average)


def forget(now: dt.datetime) -> int:
    """Prune a few averages that are old, or series without samples and averages; returns how many."""
    chosen = list(_old(now).order_by("at_ms").values_list("pk", flat=True)[:ROWS_AT_ONCE])
    if chosen:
        return GpuAverage.objects.filter(pk__in=chosen).delete()[0]
    # A host's GPU keeps the series that it has while no job holds it.
    over = GpuSeries.objects.filter(Q(job__isnull=False) | Q(gpu=None), first_ms=None, last_ms__lt=_before_ms(now))
    empty = over.filter(~Exists(GpuAverage.objects.filter(series=OuterRef("pk")))).order_by("pk")
    return GpuSeries.objects.filter(pk__in=list(empty.values_list("pk", flat=True)[:SERIES_AT_ONCE])).delete()[0]


def waiting(now: dt.datetime, most: int) -> int:
    """How many averages are to be pruned; at most `most`."""
    return _old(now)[:most].count()


def _old(now: dt.datetime) -> QuerySet[GpuAverage]:
    return GpuAverage.objects.filter(at_ms__lt=_before_ms(now))


def _before_ms(now: dt.datetime) -> int:
    return to_ms(now - AVERAGES_KEPT)


def with_sample(
    uncounted: Uncounted | None, before_ms: int | None, at_ms: int, utilization: int | None, step_ms: int
) -> Uncounted | None:
    """With the time that a sample stands for: since the one at `before_ms`, unless a verdict would call that a gap. All
    other time is unknown, as on machines without samples."""
    if before_ms is None or utilization is None or not 0 < at_ms - before_ms <= MAX_GAP * step_ms:
        return uncounted
    found = dict(uncounted or {})
    for _day, since_ms, until_ms in usage.split_days(before_ms, at_ms):
        covered_ms = until_ms - since_ms
        measured_ms, idle_ms = found.get(day := str(since_ms // usage.DAY_MS), (0, 0))
        found[day] = [measured_ms + covered_ms, idle_ms + covered_ms * (utilization < IDLE_BELOW)]
    return found


def has_uncounted() -> bool:
    return GpuSeries.objects.filter(uncounted__isnull=False).exists()


def count_idle() -> int:
    """Move what samples have noted into usage; returns of how many series."""
    counted = 0
    while some := _count_some():
        counted += some
    return counted


def _count_some() -> int:
    deltas = usage.UsageDeltas()
    with transaction.atomic():
        due = GpuSeries.objects.filter(uncounted__isnull=False)
        locked = due.select_for_update(of=("self",), no_key=True).select_related("job__run").order_by("pk")
        series = list(locked.only("uncounted", *OF_RUN)[:COUNTED_AT_ONCE])
        for one in series:
            if one.job is None:  # removed: nothing says whose time that was
                continue
            for number, (measured_ms, idle_ms) in one.uncounted.items():
                deltas.add_measured(one.job.run, usage.EPOCH + dt.timedelta(days=int(number)), measured_ms, idle_ms)
        GpuSeries.objects.filter(pk__in=[one.pk for one in series]).update(uncounted=None)
        deltas.write()
    return len(series)
