"""What pages, the API and the scheduler read. Nothing here writes."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connection
from django.db.models import Q, QuerySet, Sum

from dstackweb.accounts.models import Project
from dstackweb.backends.models import Gpu, Host
from dstackweb.lib.errors import NotFound
from dstackweb.runs import logs
from dstackweb.runs.models import Allocation, Job, Queue, QueueCount, Run, RunEvent, Verdict
from dstackweb.runs.states import JOB_ENDED, RunStatus
from dstackweb.spec.run_fields import MAX_NODES


@dataclass(frozen=True)
class QueueRow:
    """One waiting run in its place. `position` counts from 1; `reason` is a code, `reason_data` its numbers."""

    run: Run
    position: int
    reason: str
    reason_data: dict[str, Any]


def find_run(project: Project, name: str) -> Run:
    """The run with this uid, or the newest of this name. Raises NotFound."""
    runs = Run.objects.select_related("queue", "project", "user").filter(project=project)
    # Its own query: beside the joins SQLite would walk all of the project's runs.
    newest = Run.objects.filter(project=project, name=name).order_by("-id").values("pk")[:1]
    run = (runs.filter(uid=uid).first() if (uid := _uuid(name)) else None) or runs.filter(pk=newest).first()
    if run is None:
        raise NotFound(f"no run is called {name!r} in {project.name}")
    return run


def _uuid(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None


def find_queue(project: Project, name: str) -> Queue:
    """The queue of this name. Raises NotFound."""
    queue = Queue.objects.select_related("project").filter(project=project, name=name).first()
    if queue is None:
        raise NotFound(f"no queue is called {name!r} in {project.name}")
    return queue


def in_order(queue: Queue) -> QuerySet[Run]:
    """The queue's waiting runs in their true order."""
    return Run.objects.filter(queue=queue, status=RunStatus.SUBMITTED).order_by("rank", "id")


_HEADS = """
WITH RECURSIVE shapes(shape) AS (
    SELECT min(shape) FROM runs_run WHERE queue_id = %(queue)s AND status = 'submitted'
    UNION ALL
    SELECT (SELECT min(run.shape) FROM runs_run run
            WHERE run.queue_id = %(queue)s AND run.status = 'submitted' AND run.shape > shapes.shape)
    FROM shapes WHERE shapes.shape IS NOT NULL
)
SELECT head.rank, head.id, head.shape FROM shapes JOIN runs_run head ON head.id = (
    SELECT run.id FROM runs_run run
    WHERE run.queue_id = %(queue)s AND run.status = 'submitted' AND run.shape = shapes.shape
        AND (run.rank, run.id) > (%(rank)s, %(id)s)
    ORDER BY run.rank, run.id LIMIT 1
)
"""


def heads_of_shapes(queue: Queue, after: tuple[int, int]) -> list[tuple[int, int, str]]:
    """The first waiting run of each shape behind the place `after` (rank, id): its rank, id and shape, unordered.

    A few steps in one index for each shape, however many runs there are of it.
    """
    rank, pk = after
    with connection.cursor() as cursor:
        cursor.execute(_HEADS, {"queue": queue.pk, "rank": rank, "id": pk})
        return list(cursor.fetchall())


TEXTS = ("config_text", "provenance", "env_secret")
"""What may be large and no list shows: 500 run files can be 128 MB."""


def without_texts(runs: QuerySet[Run]) -> QuerySet[Run]:
    """The same runs for a list."""
    return runs.defer(*TEXTS)


def queue_rows(queue: Queue, limit: int = 50, offset: int = 0) -> list[QueueRow]:
    """A page of the queue in true order."""
    runs = list(without_texts(in_order(queue)).select_related("user", "moved_by")[offset : offset + limit])
    told = _verdicts(queue, {run.shape for run in runs})
    return [
        QueueRow(run, position, *_reason(queue, run.shape, told)) for position, run in enumerate(runs, start=offset + 1)
    ]


@dataclass(frozen=True)
class QueueLine:
    """One waiting run in its place, less than a QueueRow: what the API lists."""

    uid: uuid.UUID
    name: str
    priority: int
    user: str
    submitted_at: dt.datetime
    moved_by: str | None
    moved_at: dt.datetime | None
    position: int
    reason: str
    reason_data: dict[str, Any]


def queue_lines(queue: Queue, limit: int, offset: int = 0) -> list[QueueLine]:
    """A page of the queue in true order, in columns: many programs ask for it often."""
    names = ("uid", "name", "priority", "user__username", "submitted_at", "moved_by__username", "moved_at", "shape")
    found = list(in_order(queue).values_list(*names)[offset : offset + limit])
    told = _verdicts(queue, {shape for *_, shape in found})
    return [
        QueueLine(uid, name, priority, user, at, mover, moved_at, position, *_reason(queue, shape, told))
        for position, (uid, name, priority, user, at, mover, moved_at, shape) in enumerate(found, start=offset + 1)
    ]


Verdicts = dict[str, tuple[str, dict[str, Any]]]
"""Reason code and numbers by shape; that of the shape "" is the whole queue's."""


def _verdicts(queue: Queue, shapes: set[str]) -> Verdicts:
    rows = Verdict.objects.filter(queue=queue, shape__in={"", *shapes}).values_list("shape", "reason", "data")
    return {shape: (reason, data) for shape, reason, data in rows}


def _reason(queue: Queue, shape: str, told: Verdicts) -> tuple[str, dict[str, Any]]:
    """Why a waiting run waits, from the verdict on its shape. Without one the next pass will look at it."""
    if queue.paused:
        return "queue_paused", {}
    return told.get("") or told.get(shape) or ("starting", {})


def why(run: Run) -> tuple[str, dict[str, Any]]:
    """Reason code and numbers of a run that waits; empty for any other."""
    if run.status != RunStatus.SUBMITTED:
        return "", {}
    return _reason(run.queue, run.shape, _verdicts(run.queue, {run.shape}))


def position(run: Run) -> int | None:
    """A run's place in its queue, from 1; None when it isn't waiting in it."""
    if run.status != RunStatus.SUBMITTED:
        return None
    return position_at(run.queue, run.rank, run.pk)


def position_at(queue: Queue, rank: int, pk: int | None) -> int:
    """The place that `rank` has in a queue; `pk` None stands behind its equals."""
    not_behind = Run.objects.filter(queue=queue, status=RunStatus.SUBMITTED, rank__lte=rank)
    ahead = not_behind if pk is None else not_behind.exclude(rank=rank, pk__gte=pk)
    return ahead.count() + 1


def counts(project: Project) -> dict[str, int]:
    """Runs of a project per status, from the kept counters."""
    row = QueueCount.objects.filter(queue__project=project).aggregate(**{s.value: Sum(s.value) for s in RunStatus})
    return {status: row[status] or 0 for status in (s.value for s in RunStatus)}


def list_version(project: Project) -> str:
    """Changes whenever anything that the project's lists show has changed. Read it before the data."""
    rows = QueueCount.objects.filter(queue__project=project).order_by("queue_id").values_list("queue_id", "version")
    return "-".join(f"{queue}.{version}" for queue, version in rows)


def newest_page(
    project: Project,
    *,
    statuses: Sequence[str] = (),
    user: str = "",
    text: str = "",
    before: int | None = None,
    limit: int = 50,
) -> tuple[list[int], int | None]:
    """Ids of runs, newest first, and the cursor (`before`) of the next page or None."""
    runs = Run.objects.filter(project=project)
    if user:
        runs = runs.filter(user__username=user)
    if text:
        runs = runs.filter(name__icontains=text)
    if before is not None:
        runs = runs.filter(pk__lt=before)
    found = _newest(runs, limit + 1, statuses)
    return found[:limit], (found[limit - 1] if len(found) > limit else None)


def newest(runs: QuerySet[Run], limit: int, statuses: Sequence[str] = ()) -> list[Run]:
    """The newest of `runs` in any of these statuses (all, when empty), for a list."""
    return runs_called(_newest(runs, limit, statuses))


def runs_called(ids: Sequence[int]) -> list[Run]:
    """These runs, newest first, for a list."""
    shown = Run.objects.filter(pk__in=ids).order_by("-id")
    return list(without_texts(shown).select_related("user", "queue"))


def _newest(runs: QuerySet[Run], limit: int, statuses: Sequence[str]) -> list[int]:
    # Each status by itself is the start of an index; several at once would be a walk through the whole history.
    each = [runs.filter(status=status) for status in set(statuses)] or [runs]
    found = (pk for part in each for pk in part.order_by("-id").values_list("pk", flat=True)[:limit])
    return sorted(found, reverse=True)[:limit]


def columns_of(ids: Sequence[int], *columns: str) -> list[dict[str, Any]]:
    """Columns of these runs, newest first, with `held_until` of each: many programs ask for lists often."""
    rows = list(Run.objects.filter(pk__in=ids).order_by("-id").values("pk", "status", *columns))
    running = [row["pk"] for row in rows if row["status"] == RunStatus.RUNNING]
    read = Run.objects.filter(pk__in=running).only("status", "started_at", "extended_s", "spec") if running else ()
    held = {run.pk: run.held_until for run in read}
    return [row | {"held_until": held.get(row["pk"])} for row in rows]


JOBS_AT_ONCE = MAX_NODES
"""Jobs of a run that are read at once: the newest attempt is always there as a whole."""
EVENTS_AT_ONCE = 500


def jobs_of(run: Run, limit: int = JOBS_AT_ONCE, after: tuple[int, int] | None = None) -> list[Job]:
    """A run's jobs, newest attempt first, then by node; those behind `after` (attempt, node)."""
    jobs = Job.objects.filter(run=run).select_related("host", "backend").order_by("-attempt", "node")
    if after is not None:
        attempt, node = after
        jobs = jobs.filter(Q(attempt__lt=attempt) | Q(attempt=attempt, node__gt=node))
    return list(jobs[:limit])


def events_of(run: Run, limit: int = EVENTS_AT_ONCE, before: int | None = None) -> list[RunEvent]:
    """What happened to a run, newest first; of that what was before the event with the id `before`."""
    events = run.events.select_related("actor").order_by("-id")
    return list((events if before is None else events.filter(pk__lt=before))[:limit])


@dataclass(frozen=True)
class LogPart:
    """Bytes of one job's log. `complete` says that nothing will follow `next_offset`."""

    data: bytes
    next_offset: int
    attempt: int
    complete: bool
    job: Job | None


def log_part(
    run: Run,
    *,
    node: int = 0,
    attempt: int | None = None,
    offset: int = 0,
    tail: int | None = None,
    limit: int = 1 << 20,
) -> LogPart:
    """Part of a log: from `offset`, or its last `tail` lines. Defaults to the newest attempt that was placed.

    Raises NotFound for a node or attempt that never was.
    """
    jobs = Job.objects.filter(run=run, node=node)
    job = jobs.filter(attempt=attempt).first() if attempt else jobs.order_by("-attempt").first()
    if job is None:
        if attempt is None and node == 0:
            return LogPart(b"", 0, run.attempt, run.ended_at is not None, None)
        raise NotFound(f"{run.name} has no node {node} in attempt {attempt or run.attempt}")
    # Whether it has ended is read first: what is there then is all there will be.
    over = job.status in JOB_ENDED
    if tail is not None:
        offset = logs.tail_offset(job.pk, tail)
    data = logs.read(job.pk, offset, limit)
    following = offset + len(data)
    return LogPart(data, following, job.attempt, over and following >= logs.size(job.pk), job)


def hosts_with_holders() -> list[tuple[Host, list[tuple[Gpu, Run | None]]]]:
    """Every host that has not left, by name, each with its GPUs by index and the run that holds each."""
    holders = {
        allocation.gpu_id: allocation.job.run
        for allocation in Allocation.objects.exclude(gpu=None)
        .select_related("job__run__project")
        .defer(*(f"job__run__{name}" for name in (*TEXTS, "spec")))
    }
    hosts = Host.joined.prefetch_related("gpus").order_by("name")
    return [(host, [(gpu, holders.get(gpu.pk)) for gpu in host.gpus.all()]) for host in hosts]
