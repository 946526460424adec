"""How much of the time for which jobs hold GPUs these are idle, as far as samples say.

A sample stands for the time since the one before it, unless a verdict would call that a gap, and the GPU was idle in it
if its utilization was below IDLE_BELOW. All other time is unknown: before the first sample, in gaps, where the
utilization could not be read, and on machines without samples. Samples note the time in their series; once a minute it
is moved into usage.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence

from django.db import transaction

from dstackweb.gpus.models import GpuSeries
from dstackweb.gpus.policy.window import MAX_GAP
from dstackweb.runs import usage
from dstackweb.runs.usage import DAY_MS, EPOCH

IDLE_BELOW = 5
"""Percent."""
SERIES_AT_ONCE = 200
OF_RUN = ("job__run__project_id", "job__run__user_id", "job__run__queue_id")

Uncounted = Mapping[str, Sequence[int]]
"""By day (its number since 1970), milliseconds that samples cover, and those of them in which the GPU was idle."""


def with_sample(
    uncounted: Uncounted | None, before_ms: int | None, at_ms: int, utilization: int | None, step_ms: int
) -> Uncounted | None:
    """With the time that a sample stands for, which follows the one at `before_ms`."""
    if before_ms is None or utilization is None or not 0 < at_ms - before_ms <= MAX_GAP * step_ms:
        return uncounted
    found = dict(uncounted or {})
    for _day, since_ms, until_ms in usage.split_days(before_ms, at_ms):
        covered_ms = until_ms - since_ms
        measured_ms, idle_ms = found.get(day := str(since_ms // DAY_MS), (0, 0))
        found[day] = [measured_ms + covered_ms, idle_ms + covered_ms * (utilization < IDLE_BELOW)]
    return found


def has_uncounted() -> bool:
    return GpuSeries.objects.filter(uncounted__isnull=False).exists()


def count() -> int:
    """Move what samples have noted into usage; returns of how many series. In small transactions."""
    counted = 0
    while some := _count_some():
        counted += some
    return counted


def _count_some() -> int:
    deltas = usage.UsageDeltas()
    with transaction.atomic():
        due = GpuSeries.objects.filter(uncounted__isnull=False)
        locked = due.select_for_update(of=("self",), no_key=True).select_related("job__run").order_by("pk")
        series = list(locked.only("uncounted", *OF_RUN)[:SERIES_AT_ONCE])
        for one in series:
            if one.job is None:  # removed: nothing says whose time that was
                continue
            for number, (measured_ms, idle_ms) in one.uncounted.items():
                deltas.add_measured(one.job.run, EPOCH + dt.timedelta(days=int(number)), measured_ms, idle_ms)
        GpuSeries.objects.filter(pk__in=[one.pk for one in series]).update(uncounted=None)
        deltas.write()
    return len(series)
