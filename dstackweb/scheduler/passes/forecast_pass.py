"""Estimates of when waiting runs start: made by a periodic job, and written where they have changed.

Requests only read the rows.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import time
from collections.abc import Mapping, Sequence

from django.db import IntegrityError, transaction
from django.db.models import Min
from django.utils import timezone

from dstackweb.backends.hosts.fit import HostView
from dstackweb.backends.hosts.inventory import host_views
from dstackweb.lib import sql
from dstackweb.runs import start_estimates
from dstackweb.runs.models import Job, Queue, QueueCount, StartEstimate
from dstackweb.runs.queue.queues import LIMITS
from dstackweb.runs.shared_rows import touch
from dstackweb.runs.start_estimates import Records, ShownEstimate
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.models import ForecastState
from dstackweb.scheduler.passes.forecasts import Estimate, Forecast

AGAIN_S = 120.0
"""Estimates are made anew after this time even if nothing happened: what runs has lasted longer since."""
STEP = 0.05
"""An estimate is replaced when it has moved by this share of the time ahead, and by LEAST_STEP_S."""
LEAST_STEP_S = 60.0
AT_ONCE = 500
"""Rows that one transaction writes."""


def has_work() -> bool:
    """Whether a run waits, or an estimate of one that did is left."""
    return bool(sql.rows(_HAS_WORK, ()))


def refresh() -> int:
    """Compare past estimates with the starts, and make new ones if something has changed; returns how many changed."""
    settle()
    now, began = timezone.now(), time.monotonic()
    with sql.snapshot():
        versions = dict(QueueCount.objects.order_by("queue").values_list("queue", "version"))
        hosts = host_views()
        queues = list(Queue.objects.select_related("project").filter(count__submitted__gt=0).order_by("pk"))
        state = ForecastState.objects.filter(pk=1).first()
        if not queues or (state and not _is_due(state, _fingerprint(versions, hosts, queues), now)):
            return 0
        forecast = Forecast.load(queues, hosts, now)
        stored = {row.run_id: row for row in StartEstimate.objects.filter(run__queue__in=queues)}
        records = start_estimates.load_records()
    estimates = forecast.estimate()
    changed = [row for one in estimates if (row := new_row(one, stored.get(one.run_id), records, now)) is not None]
    _write(changed)
    queue_of = {one.run_id: one.queue_id for one in estimates}
    for queue_id in sorted({queue_of[row.run_id] for row in changed}):
        touch(queue_id)  # lists show it
        versions[queue_id] += 1
    ForecastState.objects.update_or_create(
        pk=1,
        defaults={
            "fingerprint": _fingerprint(versions, hosts, queues),
            "at": now,
            "duration_ms": (time.monotonic() - began) * 1000,
            "waiting": len(estimates),
        },
    )
    return len(changed)


def settle() -> None:
    """Compare the estimates of runs that have left their queues with the starts, and delete them."""
    left = StartEstimate.objects.exclude(run__status=RunStatus.SUBMITTED).order_by("run")
    while rows := list(left[:AT_ONCE]):
        ids = [row.run_id for row in rows]
        placed = Job.objects.filter(run__in=ids).order_by().values("run").annotate(at=Min("placed_at"))
        started = dict(placed.values_list("run", "at"))
        with transaction.atomic():
            # Only what no other worker has settled meanwhile.
            mine = set(StartEstimate.objects.select_for_update().filter(pk__in=ids).values_list("pk", flat=True))
            start_estimates.score(
                (shown, at.timestamp())
                for row in rows
                if row.run_id in mine and (at := started.get(row.run_id)) is not None
                for shown in first_shown(row)
                if at.timestamp() >= shown.at
            )
            StartEstimate.objects.filter(pk__in=mine).delete()


def first_shown(row: StartEstimate) -> list[ShownEstimate]:
    """The first estimate at each horizon."""
    return [ShownEstimate(*one) for one in row.first_shown]


def _is_due(state: ForecastState, fingerprint: str, now: dt.datetime) -> bool:
    is_recent = state.at is not None and 0 <= (now - state.at).total_seconds() < AGAIN_S
    return not is_recent or state.fingerprint != fingerprint


def _fingerprint(versions: Mapping[int, int], hosts: Sequence[HostView], queues: Sequence[Queue]) -> str:
    """Of what estimates depend on, but for the time."""
    settings = [
        (queue.pk, queue.paused, queue.project.weight, *(getattr(queue, name) for name in LIMITS)) for queue in queues
    ]
    return hashlib.sha256(repr((sorted(versions.items()), hosts, settings)).encode()).hexdigest()


def new_row(made: Estimate, row: StartEstimate | None, records: Records, now: dt.datetime) -> StartEstimate | None:
    """The row to write for an estimate; None if the one that is shown is still right."""
    shown, first = None, row.first_shown if row else []
    if made.raw50_s is not None:
        shown = start_estimates.corrected(now, made.raw50_s, made.raw90_s, records)
        if shown.horizon not in {ShownEstimate(*one).horizon for one in first}:
            first = [*first, shown]
    new = StartEstimate(
        run_id=made.run_id,
        p50=_moment(shown.p50) if shown else None,
        p90=_moment(shown.p90) if shown else None,
        basis=made.basis.value,
        data=made.data,
        first_shown=first,
    )
    # Not for another cause alone: far back, that changes with each end.
    is_same = row is not None and row.basis == new.basis and len(row.first_shown) == len(first)
    if is_same and row and _is_near(row.p50, new.p50, now) and _is_near(row.p90, new.p90, now):
        return None
    return new


def _moment(at: float | None) -> dt.datetime | None:
    return None if at is None else dt.datetime.fromtimestamp(at, dt.UTC)


def _is_near(before: dt.datetime | None, after: dt.datetime | None, now: dt.datetime) -> bool:
    """Whether a new time differs so little that it is not worth showing."""
    if before is None or after is None:
        return before == after
    ahead_s = abs((after - now).total_seconds())
    return abs((after - before).total_seconds()) <= max(LEAST_STEP_S, STEP * ahead_s)


def _write(rows: Sequence[StartEstimate]) -> None:
    fields = ["p50", "p90", "basis", "data", "first_shown"]
    for first in range(0, len(rows), AT_ONCE):
        try:
            with transaction.atomic():
                sql.write(rows[first : first + AT_ONCE], ["run"], fields)
        except IntegrityError:
            continue  # a run was deleted meanwhile: the next estimate leaves it out


_HAS_WORK = """
SELECT 1 FROM runs_queuecount WHERE submitted > 0
UNION ALL SELECT 1 FROM runs_startestimate
LIMIT 1
"""
