"""What was, per queue, priority band and hour: how long runs waited and how many stood in line.

Rows are counted up as things happen and never computed from runs, so that a page about a month costs the same however
many runs there were.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from django.db import transaction
from django.db.models import BigIntegerField, Count, F, Q, Value
from django.db.models.functions import Greatest

from dstackweb.runs.history_math import BANDS, BUCKETS, band_of, bucket_of, hour_of
from dstackweb.runs.models import Queue, QueueHour, Run
from dstackweb.runs.states import RunStatus

KEPT_DAYS = 90
"""Hours older than that are removed."""


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


def sample_lengths(now: dt.datetime) -> None:
    """Keep how many runs wait in each queue and band; also that none does, which is not the same as not having looked.

    One walk over an index of the waiting runs, and two statements however many queues there are.
    """
    lengths: dict[tuple[int, int], int] = defaultdict(int)
    waiting = Run.objects.filter(status=RunStatus.SUBMITTED).order_by()
    for queue, priority, count in waiting.values_list("queue", "priority").annotate(n=Count("*")):
        lengths[queue, band_of(priority)] += count
    hour = hour_of(now)
    queues = Queue.objects.order_by("pk").values_list("pk", flat=True)
    with transaction.atomic():
        # In the order in which placements are counted; the second statement has its rows locked by the first.
        QueueHour.objects.bulk_create(
            [
                QueueHour(queue_id=queue, band=band, hour=hour, length=lengths[queue, band])
                for queue in queues
                for band in range(BANDS)
            ],
            update_conflicts=True,
            unique_fields=["queue", "band", "hour"],
            update_fields=["length"],
        )
        higher = Q(length_max=None) | Q(length__gt=F("length_max"))
        QueueHour.objects.filter(higher, hour=hour, length__isnull=False).update(length_max=F("length"))


def prune(now: dt.datetime) -> None:
    """Remove hours that are older than KEPT_DAYS."""
    QueueHour.objects.filter(hour__lt=hour_of(now) - dt.timedelta(days=KEPT_DAYS)).delete()
