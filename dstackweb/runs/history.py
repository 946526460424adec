"""What was, per queue, priority band and hour: how long runs waited and how many stood in line.

Rows are counted up as things happen and never computed from runs, so that a page about a month costs the same however
many runs there were.
"""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.db.models import BigIntegerField, Count, F, Q, QuerySet, Value
from django.db.models.functions import Greatest

from dstackweb.accounts.models import Project
from dstackweb.runs.history_math import (
    BANDS,
    BUCKETS,
    WaitStats,
    add_up,
    band_limits,
    band_of,
    bucket_of,
    hour_of,
    join_spans,
    midnight,
    span_starts,
)
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

    One walk over an index of each line, and two statements more however many queues there are.
    """
    queues = list(Queue.objects.order_by("pk").values_list("pk", "count__submitted"))
    lengths: dict[tuple[int, int], int] = defaultdict(int)
    for queue in (queue for queue, submitted in queues if submitted):
        # One queue at a time: only so does SQLite, too, count in the index alone.
        waiting = Run.objects.filter(queue=queue, status=RunStatus.SUBMITTED).order_by()
        for priority, count in waiting.values_list("priority").annotate(n=Count("*")):
            lengths[queue, band_of(priority)] += count
    hour = hour_of(now)
    with transaction.atomic():
        # In the order in which placements are counted; the second statement has its rows locked by the first.
        QueueHour.objects.bulk_create(
            [
                QueueHour(queue_id=queue, band=band, hour=hour, length=lengths[queue, band])
                for queue, _ in queues
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


@dataclass(frozen=True)
class HistoryRange:
    """What is asked for: the last `days` days of `zone` up to `now`, by the hour or by the day."""

    now: dt.datetime
    days: int
    hourly: bool
    zone: dt.tzinfo = dt.UTC

    @property
    def times(self) -> list[dt.datetime]:
        """The beginnings (UTC) of the spans."""
        return span_starts(self.days, self.now, self.zone, hourly=self.hourly)

    def midnight(self, days_ago: int = 0) -> dt.datetime:
        """When today began, or the day so many before it, in UTC."""
        return midnight(self.now.astimezone(self.zone).date() - dt.timedelta(days=days_ago), self.zone)


@dataclass(frozen=True)
class History:
    """The past of a queue, or of all queues of a project, in spans that begin at `times` (UTC).

    `bands[b][i]` is what happened in band b within span i, `all[i]` in all bands; the last span is not over yet.
    `today` is when the day of the zone began that the last span is in.
    """

    view: HistoryRange
    today: dt.datetime
    times: list[dt.datetime]
    bands: list[list[WaitStats]]
    all: list[WaitStats]

    @property
    def empty(self) -> bool:
        """Whether nothing was placed and nobody was seen waiting."""
        return not any(tally.placed or tally.lengths for tally in self.all)

    def since(self, at: dt.datetime, band: int | None = None) -> WaitStats:
        """What happened in the spans that begin at `at` or later, in one band or in all."""
        return join_spans((self.all if band is None else self.bands[band])[bisect_left(self.times, at) :])

    def columns(self) -> dict[str, Any]:
        """As the API and the charts have it: one list per number, with null where there is none to tell."""
        return {
            "days": self.view.days,
            "step": "hour" if self.view.hourly else "day",
            "zone": str(self.view.zone),
            "times": [at.isoformat().replace("+00:00", "Z") for at in self.times],
            "bands": [
                dict(zip(("low", "high"), band_limits(band), strict=True)) | columns(tallies)
                for band, tallies in enumerate(self.bands)
            ],
        }


def columns(tallies: list[WaitStats]) -> dict[str, list[Any]]:
    """One list per number of `numbers`."""
    told = [numbers(tally) for tally in tallies]
    return {name: [each[name] for each in told] for name in told[0]}


def numbers(tally: WaitStats) -> dict[str, Any]:
    """What is told of a span: waits in seconds and lengths in runs, None where there is nothing to tell."""
    return {
        "placed": tally.placed,
        "wait_median_s": None if tally.median_s is None else round(tally.median_s),
        "wait_p90_s": None if tally.p90_s is None else round(tally.p90_s),
        "wait_max_s": tally.longest_s if tally.placed else None,
        "length": None if tally.length is None else round(tally.length, 1),
        "length_max": tally.length_max,
    }


def series(queue: Queue, view: HistoryRange) -> History:
    """The past of a queue."""
    return _history(_read(queue.hours.all(), view)[queue.pk], view)


def overview(project: Project, view: HistoryRange) -> tuple[History, list[tuple[Queue, History]]]:
    """The past of all queues of a project together, and of each by name."""
    of_queue = _read(QueueHour.objects.filter(queue__project=project), view)
    whole: _Hours = defaultdict(lambda: [[] for _ in range(BANDS)])
    for hours in of_queue.values():
        for hour, bands in hours.items():
            for band, tallies in enumerate(bands):
                whole[hour][band] += tallies
    queues = Queue.objects.filter(project=project).select_related("project").order_by("name")
    return _history(whole, view), [(queue, _history(of_queue[queue.pk], view)) for queue in queues]


_Hours = dict[dt.datetime, list[list[WaitStats]]]
"""By hour and band, the tallies of one queue or several."""
_COLUMNS = ("queue_id", "hour", "band", "placed", "wait_s", "wait_max_s", "length", "length_max", *BUCKETS)


def _read(rows: QuerySet[QueueHour], view: HistoryRange) -> dict[int, _Hours]:
    """By queue."""
    read: dict[int, _Hours] = defaultdict(lambda: defaultdict(lambda: [[] for _ in range(BANDS)]))
    told = rows.filter(hour__gte=view.times[0], hour__lte=view.now).values_list(*_COLUMNS)
    for queue, hour, band, placed, wait_s, longest_s, length, length_max, *counts in told:
        tally = WaitStats(placed, wait_s, longest_s, tuple(counts), length or 0, int(length is not None), length_max)
        read[queue][hour][band].append(tally)
    return read


def _history(hours: _Hours, view: HistoryRange) -> History:
    times = view.times
    spans: list[list[list[WaitStats]]] = [[[] for _ in times] for _ in range(BANDS + 1)]
    for hour, bands in hours.items():
        index = bisect_right(times, hour) - 1
        queues_together = [add_up(tallies) for tallies in bands]
        for line, tally in zip(spans, [*queues_together, add_up(queues_together)], strict=True):
            line[index].append(tally)
    *of_bands, of_all = [[join_spans(parts) for parts in line] for line in spans]
    return History(view=view, today=view.midnight(), times=times, bands=of_bands, all=of_all)
