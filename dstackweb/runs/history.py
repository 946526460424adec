"""What was, per queue, priority band and hour: how long runs waited and how many stood in line.

Rows are counted up as things happen and never computed from runs, so that a page about a month costs the same however
many runs there were.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from django.db.models import BigIntegerField, F, Value
from django.db.models.functions import Greatest

from dstackweb.runs.history_math import BUCKETS, band_of, bucket_of, hour_of
from dstackweb.runs.models import QueueHour, Run


def count_placed(runs: Sequence[Run], now: dt.datetime) -> None:
    """Count runs that leave their queue to start at `now`, with the time they waited in it.

    Call inside the transaction that moves them, behind the queue counters.
    """
    waits: dict[tuple[int, int], list[int]] = defaultdict(list)
    for run in runs:
        waited = int((now - run.queued_at).total_seconds())
        waits[run.queue_id, band_of(run.priority)].append(max(0, waited))
    hour = hour_of(now)
    for (queue, band), seconds in sorted(waits.items()):  # in one order, so that nobody waits for each other
        _add(QueueHour(queue_id=queue, band=band, hour=hour), seconds)


def _add(row: QueueHour, seconds: list[int]) -> None:
    changes: dict[str, Any] = {
        "placed": F("placed") + len(seconds),
        "wait_s": F("wait_s") + sum(seconds),
        "wait_max_s": Greatest(F("wait_max_s"), Value(max(seconds), BigIntegerField())),
    }
    for bucket in {bucket_of(waited) for waited in seconds}:
        name = BUCKETS[bucket]
        changes[name] = F(name) + sum(bucket_of(waited) == bucket for waited in seconds)
    mine = QueueHour.objects.filter(queue_id=row.queue_id, band=row.band, hour=row.hour)
    if not mine.update(**changes):
        QueueHour.objects.bulk_create([row], ignore_conflicts=True)  # whoever else makes it makes it empty too
        mine.update(**changes)
