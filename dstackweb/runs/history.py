"""How long runs waited and how many were waiting, per queue, priority band and hour, and of late per five minutes.

Counted up as things happen, so that a page about a month costs the same however many runs there were.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zoneinfo import ZoneInfo

from django.conf import settings
from django.db import transaction
from django.db.models import BigIntegerField, Count, F, Min, Q, QuerySet, Sum, Value
from django.db.models.functions import Greatest
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.models import Project
from dstackweb.lib import sql
from dstackweb.runs.models import Queue, QueueHour, QueueSlot, QueueSpan, Run
from dstackweb.runs.states import RunStatus
from dstackweb.runs.wait_stats import (
    BANDS,
    BUCKETS,
    WaitStats,
    add_up,
    band_limits,
    band_of,
    bucket_of,
    columns,
    join_spans,
)

HOUR = dt.timedelta(hours=1)
SLOT = dt.timedelta(minutes=5)
SLOTS_KEPT = 2 * HOUR


def hour_of(at: dt.datetime) -> dt.datetime:
    """The beginning of the UTC hour around an aware time."""
    return at.astimezone(dt.UTC).replace(minute=0, second=0, microsecond=0)


def slot_of(at: dt.datetime) -> dt.datetime:
    """The beginning of the five minutes around an aware time."""
    return at.astimezone(dt.UTC).replace(minute=at.minute // 5 * 5, second=0, microsecond=0)


SPANS: tuple[tuple[type[QueueSpan], Callable[[dt.datetime], dt.datetime]], ...] = (
    (QueueHour, hour_of),
    (QueueSlot, slot_of),
)
"""What is counted, and where the span of a moment begins. All transactions lock the rows in this order."""

KEPT_DAYS: int = settings.DSTACKWEB_HISTORY_DAYS
"""Hours older than that are removed."""


def count_placed(runs: Sequence[Run], now: dt.datetime, sign: int = 1) -> None:
    """Count the waits of runs that start, or with the sign -1 take them back. Call in the transaction that moves them,
    behind the queue counters."""
    waits: dict[tuple[int, int], list[int]] = defaultdict(list)
    for run in runs:
        waited = int((now - run.queued_at).total_seconds())
        waits[run.queue_id, band_of(run.priority)].append(max(0, waited))
    for (model, begin), ((queue, band), seconds) in itertools.product(SPANS, sorted(waits.items())):
        changes: dict[str, Any] = {
            "placed": F("placed") + sign * len(seconds),
            "wait_s": F("wait_s") + sign * sum(seconds),
            "wait_max_s": Greatest(F("wait_max_s"), Value(max(seconds), BigIntegerField())),
        }
        for bucket, count in Counter(map(bucket_of, seconds)).items():
            changes[BUCKETS[bucket]] = F(BUCKETS[bucket]) + sign * count
        key = {"queue_id": queue, "band": band, model.TIME: begin(now)}
        sql.shift(model, key, changes)


Placed = tuple[int, int, dt.datetime]
"""A placement of a run: its queue, priority and time."""


def count_removed(placed: Iterable[Placed]) -> None:
    """Count placements of removed runs, whose events go. Call where they are removed, behind the queue counters."""
    numbers = Counter((queue, band_of(priority), hour_of(at)) for queue, priority, at in placed)
    oldest = hour_of(timezone.now()) - dt.timedelta(days=KEPT_DAYS)
    for (queue, band, hour), number in sorted(numbers.items()):
        if hour < oldest:
            continue
        # The run may have changed its queue or priority since: there may be no row.
        key = {"queue_id": queue, "band": band, "hour": hour}
        sql.shift(QueueHour, key, {"placed_removed": F("placed_removed") + number})


def sample_lengths(now: dt.datetime) -> None:
    """Store how many runs wait in each queue and band; also 0, since null means not sampled."""
    queues = list(Queue.objects.order_by("pk").values_list("pk", "count__submitted"))
    lengths: dict[tuple[int, int], int] = defaultdict(int)
    for queue in [queue for queue, submitted in queues if submitted]:
        # One queue at a time: only so does SQLite, too, count in the index alone.
        waiting = Run.objects.filter(queue=queue, status=RunStatus.SUBMITTED).order_by()
        for priority, count in waiting.values_list("priority").annotate(n=Count("*")):
            lengths[queue, band_of(priority)] += count
    higher = Q(length_max=None) | Q(length__gt=F("length_max"))
    with transaction.atomic():
        for model, begin in SPANS:
            # In the order in which placements are counted; the second statement has its rows locked by the first.
            at = {model.TIME: begin(now)}
            found = itertools.product([queue for queue, _ in queues], range(BANDS))
            rows = [model(queue_id=queue, band=band, length=lengths[queue, band], **at) for queue, band in found]
            sql.write(rows, ["queue", "band", model.TIME], ["length"])
            model._default_manager.filter(higher, length__isnull=False, **at).update(length_max=F("length"))
        QueueSlot.objects.filter(at__lt=now - SLOTS_KEPT).delete()


def old_hours(now: dt.datetime) -> QuerySet[QueueHour]:
    return QueueHour.objects.filter(hour__lt=hour_of(now) - dt.timedelta(days=KEPT_DAYS))


def span_starts(days: int, now: dt.datetime, zone: dt.tzinfo, *, hourly: bool) -> list[dt.datetime]:
    """The beginnings (UTC) of the hours or days that show the last `days` days of `zone`; the last one holds `now`."""
    today = now.astimezone(zone).date()
    dates = [today - dt.timedelta(days=back) for back in reversed(range(days))]
    if not hourly:
        return [_midnight(date, zone) for date in dates]
    begins, last = _midnight(dates[0], zone), hour_of(now)
    hours = ((last - hour_of(begins)) // HOUR) + 1
    return [at for back in reversed(range(hours)) if (at := last - back * HOUR) >= begins] or [last]


def _midnight(date: dt.date, zone: dt.tzinfo) -> dt.datetime:
    """When a day begins in a zone, in UTC."""
    return dt.datetime.combine(date, dt.time(), zone).astimezone(dt.UTC)


def parse_zone(name: str) -> dt.tzinfo:
    """The time zone of this IANA name; "" is UTC. ValueError for a name that this machine doesn't know."""
    try:
        return ZoneInfo(name or "UTC")
    except (KeyError, OSError, ValueError) as error:  # an unknown name, a folder, a path out of the folder
        raise ValueError(_("no time zone is called %(name)s") % {"name": repr(name[:60])}) from error


LEAST_SPANS = 12
HOURLY_UP_TO = dt.timedelta(days=7)


@dataclass(frozen=True)
class HistoryRange:
    """The last `days` days of `zone` up to `now`, by the hour or by the day; `hours`: the last so many hours instead;
    `in_slots`: the last hour in spans of five minutes.

    Spans before `since` are left out, but for the last LEAST_SPANS.
    """

    now: dt.datetime
    days: int
    hourly: bool
    zone: dt.tzinfo = dt.UTC
    hours: int = 0
    in_slots: bool = False
    since: dt.datetime | None = None

    @property
    def model(self) -> type[QueueSpan]:
        """The rows that it is read from."""
        return QueueSlot if self.in_slots else QueueHour

    @property
    def step(self) -> str:
        return "minutes" if self.in_slots else "hour" if self.hourly else "day"

    @functools.cached_property
    def times(self) -> list[dt.datetime]:
        if self.in_slots:
            found = [slot_of(self.now) - back * SLOT for back in reversed(range(HOUR // SLOT + 1))]
        elif self.hours:
            found = [hour_of(self.now) - back * HOUR for back in reversed(range(self.hours + 1))]
        else:
            found = span_starts(self.days, self.now, self.zone, hourly=self.hourly)
        first = max(0, bisect_right(found, self.since) - 1) if self.since else 0
        return found[min(first, max(0, len(found) - LEAST_SPANS)) :]

    def fitted(self, first: dt.datetime | None) -> HistoryRange:
        """The same without what was before the data begins, `first`; by the hour if that is a week at most."""
        hourly = self.hourly or (first is not None and self.now - first <= HOURLY_UP_TO)
        return replace(self, since=first, hourly=hourly)


@dataclass(frozen=True)
class History:
    """The history of a queue, or of all queues of a project, in spans that begin at `times` (UTC).

    `bands[b][i]` is band b in span i, `all[i]` all bands; the last span has not ended.
    """

    view: HistoryRange
    times: list[dt.datetime]
    bands: list[list[WaitStats]]
    all: list[WaitStats]

    @property
    def today(self) -> dt.datetime:
        """When today began in the zone, in UTC."""
        return _midnight(self.view.now.astimezone(self.view.zone).date(), self.view.zone)

    @property
    def empty(self) -> bool:
        """Whether no run was placed or seen waiting."""
        return not any(tally.placed or tally.lengths for tally in self.all)

    def since(self, at: dt.datetime, band: int | None = None) -> WaitStats:
        """The spans that begin at `at` or later as one, of one band or of all."""
        return join_spans((self.all if band is None else self.bands[band])[bisect_left(self.times, at) :])

    def columns(self) -> dict[str, Any]:
        """As the API and the charts have it: one list per number, null where it is unknown."""
        return {
            "days": self.view.days,
            "step": self.view.step,
            "zone": str(self.view.zone),
            "times": [at.isoformat().replace("+00:00", "Z") for at in self.times],
            "bands": [
                dict(zip(("low", "high"), band_limits(band), strict=True)) | columns(tallies)
                for band, tallies in enumerate(self.bands)
            ],
        }


def first_span(rows: QuerySet[Any], since: dt.datetime) -> dt.datetime | None:
    """The first span with data from `since` on; None without any."""
    time: str = rows.model.TIME
    found: dt.datetime | None = rows.filter(**{f"{time}__gte": since}).aggregate(first=Min(time))["first"]
    return found


def waiting_by_hour(since: dt.datetime) -> list[int | None]:
    """Runs of the deployment that waited at the end of each hour from `since` on; None where none was sampled."""
    return list(lengths(QueueHour.objects.all(), since, timezone.now()).values())


def lengths(rows: QuerySet[QueueHour], first: dt.datetime, last: dt.datetime) -> dict[dt.datetime, int | None]:
    """Runs that waited at the end of each hour from that around `first` to that around `last`; None where unknown."""
    begin, end = hour_of(first), hour_of(last)
    sampled = rows.filter(hour__gte=begin, hour__lte=end, length__isnull=False)
    found = dict(sampled.order_by().values_list("hour").annotate(n=Sum("length")))
    return {at: found.get(at) for at in (begin + back * HOUR for back in range((end - begin) // HOUR + 1))}


def series(queue: Queue, view: HistoryRange) -> History:
    return _history(_read(view, queue=queue)[queue.pk], view)


def overview(project: Project, view: HistoryRange) -> tuple[History, list[tuple[Queue, History]]]:
    """The history of all queues of a project together, and of each by name."""
    of_queue = _read(view, queue__project=project)
    same_hour: dict[dt.datetime, list[list[WaitStats]]] = defaultdict(list)
    for hours in of_queue.values():
        for hour, bands in hours.items():
            same_hour[hour].append(bands)
    whole = {hour: [add_up(band) for band in zip(*each, strict=True)] for hour, each in same_hour.items()}
    queues = Queue.objects.filter(project=project).select_related("project").order_by("name")
    return _history(whole, view), [(queue, _history(of_queue[queue.pk], view)) for queue in queues]


_Spans = dict[dt.datetime, list[WaitStats]]
"""By their beginning, one entry per band."""
_COLUMNS = ("queue_id", "band", "placed", "wait_s", "wait_max_s", "length", "length_max", *BUCKETS)


def _read(view: HistoryRange, **of: Any) -> dict[int, _Spans]:
    read: dict[int, _Spans] = defaultdict(lambda: defaultdict(lambda: [WaitStats()] * BANDS))
    time = view.model.TIME
    rows = view.model._default_manager.filter(**of, **{f"{time}__gte": view.times[0], f"{time}__lte": view.now})
    for at, queue, band, placed, wait_s, longest_s, length, length_max, *counts in rows.values_list(time, *_COLUMNS):
        read[queue][at][band] = WaitStats(
            placed, wait_s, longest_s, tuple(counts), length or 0, int(length is not None), length_max
        )
    return read


def _history(found: _Spans, view: HistoryRange) -> History:
    times = view.times
    spans: list[list[list[WaitStats]]] = [[[] for _ in times] for _ in range(BANDS + 1)]
    for at, bands in found.items():
        index = bisect_right(times, at) - 1
        for line, tally in zip(spans, [*bands, add_up(bands)], strict=True):
            line[index].append(tally)
    *of_bands, of_all = [[join_spans(parts) for parts in line] for line in spans]
    return History(view=view, times=times, bands=of_bands, all=of_all)
