"""A queue as it was at a moment of the last KEPT: its settings, its runs in their order and why they waited.

Nothing is replayed: the places (`PastPlace`, or the run's own row) and reasons (`PastVerdict`, `Verdict`) that hold at
the moment are read, and ranks follow from the ageing step of then.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from dstackweb.accounts.models import User
from dstackweb.lib import sql
from dstackweb.lib.errors import Invalid
from dstackweb.runs import history
from dstackweb.runs.codes import PlaceEnd
from dstackweb.runs.models import Job, PastPlace, PastVerdict, Queue, QueueEvent, QueueHour, Run, Verdict
from dstackweb.runs.queue import ordering
from dstackweb.runs.queue.queues import SETTINGS
from dstackweb.runs.row_fields import Hidden, Row
from dstackweb.runs.run_places import placement_summary
from dstackweb.runs.selectors import TEXTS, WaitingFor, most_permanent
from dstackweb.runs.states import JOB_ACTIVE, RunStatus

KEPT = dt.timedelta(days=30)
PLACED_SHOWN = 100
HARDLY = dt.timedelta(seconds=10)
"""A run that waited no longer has nothing to explain."""


@dataclass(slots=True)
class PastQueueRow(Row):
    """A run that waited; its name, id, user and reason are null if it has been deleted since.

    `then` is what ended its waiting at `then_at`: the status that it left for, or `queue` for another queue; null while
    it still waits.
    """

    position: int
    name: str | None
    id: str | None
    user: str | None
    priority: int
    penalty_s: int
    queued_at: dt.datetime
    reason: str | None
    then: str | None
    then_at: dt.datetime | None
    reason_data: Hidden[dict[str, Any]]
    spec: Hidden[dict[str, Any]]


@dataclass(slots=True)
class PastPlacedRow(Row):
    """A run that was placed: where, and until when that attempt was there; null if it still is."""

    name: str
    id: str
    user: str
    where: str
    gpus: int
    placed_at: dt.datetime
    until: dt.datetime | None


@dataclass(frozen=True)
class PastQueue:
    """A queue at a moment: `rows` are a page of the `waiting` runs, of which `deleted` have been deleted since.

    `settings` are those of then. `position` is that of the run that was asked about; None if it did not wait here.
    """

    queue: Queue
    at: dt.datetime
    settings: dict[str, Any]
    waiting: int
    deleted: int
    rows: list[PastQueueRow]
    placed: list[PastPlacedRow]
    placed_total: int
    position: int | None = None


def parse_moment(text: str, zone: dt.tzinfo, now: dt.datetime) -> dt.datetime:
    """A moment in ISO 8601, in `zone` where it has no offset. Raises Invalid if it is none, older than KEPT or to come.

    A minute to come is taken as now: clocks differ.
    """
    try:
        at = dt.datetime.fromisoformat(text.strip())
        at = (at if at.tzinfo else at.replace(tzinfo=zone)).astimezone(dt.UTC)
    except (ValueError, OverflowError):
        raise Invalid.at("t", msg=_("give a date and a time, such as 2026-11-26T14:00")) from None
    if at < now - KEPT:
        raise Invalid.at("t", msg=_("the past of queues is kept for %(days)s days") % {"days": KEPT.days})
    if at > now + dt.timedelta(minutes=1):
        raise Invalid.at("t", msg=_("this time is still to come"))
    return min(at, now)


Change = tuple[dt.datetime, Mapping[str, list[Any]]]
"""When settings were changed, and `[old, new]` of each."""


def settings_at(present: Mapping[str, Any], changes: Iterable[Change], at: dt.datetime) -> dict[str, Any]:
    """The settings at a moment, from the present ones and the changes since, in any order. Pure."""
    found = dict(present)
    for changed_at, data in sorted(changes, key=lambda change: change[0], reverse=True):
        if changed_at > at:
            found |= {name: old for name, (old, _new) in data.items() if name in found}
    return found


_WAITING = """
    SELECT 0 AS is_past, id, id AS run_id,
        seniority_us + penalty_s * 1000000 - priority * CAST(%s AS bigint) AS place
    FROM runs_run WHERE queue_id = %s AND status = 'submitted' AND place_since <= %s
    UNION ALL
    SELECT 1, id, run_id, seniority_us + penalty_s * 1000000 - priority * CAST(%s AS bigint)
    FROM runs_pastplace WHERE queue_id = %s AND until > %s AND since <= %s
"""
"""The places that hold at a moment, with the rank that follows from the step then."""
_PAGE = f"SELECT is_past, id FROM ({_WAITING}) AS waiting ORDER BY place, run_id LIMIT %s OFFSET %s"
_COUNT = f"SELECT COUNT(*) FROM ({_WAITING}) AS waiting"
_DELETED = """
    SELECT COUNT(*) FROM runs_pastplace place WHERE queue_id = %s AND until > %s AND since <= %s
    AND NOT EXISTS (SELECT 1 FROM runs_run run WHERE run.id = place.run_id)
"""
_OF_RUN = f"SELECT is_past, id, place FROM ({_WAITING}) AS waiting WHERE run_id = %s"
_AHEAD = f"SELECT COUNT(*) FROM ({_WAITING}) AS waiting WHERE (place, run_id) < (%s, %s)"


def queue_at(
    queue: Queue, at: dt.datetime, limit: int = 50, offset: int = 0, run: Run | None = None, *, alone: bool = False
) -> PastQueue:
    """The queue at a moment, with a page of its waiting runs; with `run`, the page that it is on, or its row `alone`.

    In a dozen statements. They look at each place that has ended since, in an index, and sort those that held.
    """
    with sql.snapshot():
        present = Queue.objects.values(*SETTINGS).get(pk=queue.pk)
        events = QueueEvent.objects.filter(queue=queue, at__gt=at).values_list("at", "data")
        settings = settings_at(present, events, at)
        step = ordering.step_us(settings["ageing_minutes"])
        those: list[Any] = [step, queue.pk, at, step, queue.pk, at, at]
        position = None if run is None else _position(those, run)
        if alone:
            limit, offset = int(position is not None), (position or 1) - 1
        elif position is not None:
            offset = (position - 1) // limit * limit
        [[waiting]], [[deleted]] = sql.rows(_COUNT, those), sql.rows(_DELETED, [queue.pk, at, at])
        shown = [(bool(is_past), pk) for is_past, pk in sql.rows(_PAGE, [*those, limit, offset])]
        rows = _rows(queue, at, shown, offset, is_paused=settings["paused"])
        return PastQueue(queue, at, settings, waiting, deleted, rows, *_placed(queue, at), position)


def _position(those: list[Any], run: Run) -> int | None:
    found = sql.rows(_OF_RUN, [*those, run.pk])
    if not found:
        return None
    [[ahead]] = sql.rows(_AHEAD, [*those, found[0][2], run.pk])
    return int(ahead) + 1


def _rows(
    queue: Queue, at: dt.datetime, shown: list[tuple[bool, int]], offset: int, *, is_paused: bool
) -> list[PastQueueRow]:
    """The rows of these places, each of PastPlace or a run's own."""
    past = PastPlace.objects.in_bulk([pk for is_past, pk in shown if is_past])
    ids = [past[pk].run_id if is_past else pk for is_past, pk in shown]
    found = Run.objects.select_related("user").defer(*TEXTS).in_bulk(ids)
    runs = [found.get(run_id) for run_id in ids]
    places = [past[pk] if is_past else found[pk] for is_past, pk in shown]
    ends = _ends(place.run_id for place in past.values() if place.ended_by == PlaceEnd.MOVED)
    reasons = reasons_at(queue, {run.shape for run in runs if run is not None}, at, is_paused=is_paused)
    rows = []
    for position, (place, run) in enumerate(zip(places, runs, strict=True), start=offset + 1):
        reason, data = reasons[run.shape] if run is not None else (None, {})
        then, then_at = _end(place, ends, at)
        rows.append(
            PastQueueRow(
                position=position,
                name=run.name if run else None,
                id=str(run.uid) if run else None,
                user=run.user.get_username() if run else None,
                priority=place.priority,
                penalty_s=place.penalty_s,
                queued_at=place.queued_at,
                reason=reason,
                reason_data=data,
                then=then,
                then_at=then_at,
                spec=run.spec if run else {},
            )
        )
    return rows


Ends = Mapping[int, list[tuple[dt.datetime, str]]]


def _ends(run_ids: Iterable[int]) -> Ends:
    """When and how each stay of these runs in a queue ended, in order."""
    ended = PastPlace.objects.filter(run_id__in=set(run_ids)).exclude(ended_by=PlaceEnd.MOVED)
    found: dict[int, list[tuple[dt.datetime, str]]] = {}
    for run_id, until, ended_by in ended.order_by("until").values_list("run_id", "until", "ended_by"):
        found.setdefault(run_id, []).append((until, ended_by))
    return found


def _end(place: Run | PastPlace, ends: Ends, at: dt.datetime) -> tuple[str | None, dt.datetime | None]:
    """What ended the waiting in this place."""
    if isinstance(place, Run):
        return None, None
    if place.ended_by != PlaceEnd.MOVED:
        return place.ended_by, place.until
    return next(((ended_by, until) for until, ended_by in ends.get(place.run_id, ()) if until > at), (None, None))


def reasons_at(queue: Queue, shapes: Collection[str], at: dt.datetime, *, is_paused: bool) -> dict[str, WaitingFor]:
    """Why runs of each of these shapes waited at a moment."""
    wanted = {"", *shapes}
    past = PastVerdict.objects.filter(queue=queue, shape__in=wanted, until__gt=at, since__lte=at)
    now = Verdict.objects.filter(queue=queue, shape__in=wanted, logged_at__lte=at)
    columns = ("shape", "reason", "data")
    verdicts = {
        shape: (reason, data)
        for verdicts in (now.values_list(*columns), past.order_by("until").values_list(*columns))
        for shape, reason, data in verdicts
    }
    return {shape: found[0] for shape, found in most_permanent(verdicts, shapes, is_paused=is_paused).items()}


def _placed(queue: Queue, at: dt.datetime) -> tuple[list[PastPlacedRow], int]:
    """The runs that were placed at a moment, the newest first, and how many they were."""
    there = Job.objects.filter(run__queue=queue, placed_at__lte=at)
    jobs = there.filter(ended_at__gt=at), there.filter(ended_at=None, status__in=JOB_ACTIVE)
    ids: dict[int, dt.datetime] = {}
    for some in jobs:
        ids |= dict(some.order_by("placed_at").values_list("run_id", "placed_at"))
    shown = sorted(ids, key=lambda pk: (ids[pk], pk), reverse=True)[:PLACED_SHOWN]
    of_run: dict[int, list[Job]] = {}
    for some in jobs:
        columns = ("host", "backend", "run__user")
        found = some.filter(run__in=shown).select_related(*columns).defer("run__spec", *(f"run__{t}" for t in TEXTS))
        for job in found.order_by("node"):
            of_run.setdefault(job.run_id, []).append(job)
    return [_placed_row(of_run[pk]) for pk in shown if pk in of_run], len(ids)


def _placed_row(jobs: list[Job]) -> PastPlacedRow:
    run, place = jobs[0].run, placement_summary(jobs)
    ends = [job.ended_at for job in jobs if job.ended_at is not None]
    return PastPlacedRow(
        name=run.name,
        id=str(run.uid),
        user=run.user.get_username(),
        where=place.where if place else "",
        gpus=sum(job.gpu_count for job in jobs),
        placed_at=min(job.placed_at for job in jobs),
        until=max(ends) if len(ends) == len(jobs) else None,
    )


class Pause(NamedTuple):
    """Since when a queue had been paused, and by whom."""

    since: dt.datetime
    by: User | None


def pause_at(queue: Queue, at: dt.datetime) -> Pause | None:
    """The last change of the switch before a moment, at which the queue was paused; None if it is not known."""
    changes = QueueEvent.objects.filter(queue=queue, at__lte=at, data__has_key="paused").select_related("actor")
    last = changes.order_by("-at").first()
    return Pause(last.at, last.actor) if last else None


def lengths(queue: Queue, first: dt.datetime, last: dt.datetime) -> dict[dt.datetime, int | None]:
    """`history.lengths` of a queue."""
    return history.lengths(QueueHour.objects.filter(queue=queue), first, last)


def moment_of(run: Run, jobs: Collection[Job]) -> dt.datetime | None:
    """When a run began to wait, or last waited; None while it is pending, or where it was placed within HARDLY."""
    if run.status == RunStatus.PENDING:
        return None
    placed = [job.placed_at for job in jobs if job.attempt == run.attempt]
    left = min(placed, default=run.ended_at)
    if left is None:
        return run.queued_at
    return left - dt.timedelta(seconds=1) if left - run.queued_at >= HARDLY else None


def old_places(now: dt.datetime) -> QuerySet[PastPlace]:
    """The places to prune. With the queues' ids, since the index begins with them."""
    queues = list(Queue.objects.values_list("pk", flat=True))
    return PastPlace.objects.filter(queue__in=queues, until__lt=now - KEPT)


def old_verdicts(now: dt.datetime) -> QuerySet[PastVerdict]:
    return PastVerdict.objects.filter(until__lt=now - KEPT)
