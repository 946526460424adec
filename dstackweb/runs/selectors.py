"""What pages, the API and the scheduler read. Nothing here writes."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.db import connection
from django.db.models import Q, QuerySet, Sum

from dstackweb.accounts.models import Project
from dstackweb.backends.models import Gpu, Host
from dstackweb.lib import sql
from dstackweb.lib.errors import NotFound
from dstackweb.runs import logs
from dstackweb.runs.models import Allocation, Job, Queue, QueueCount, Run, RunEvent
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


def queue_called(project: Project, name: str) -> Queue | None:
    """The queue of this name, if there is one."""
    found = Queue.objects.raw("SELECT * FROM runs_queue WHERE project_id = %s AND name = %s", [project.pk, name])
    queue = next(iter(found), None)
    if queue is not None:
        queue.project = project
    return queue


def find_queue(project: Project, name: str) -> Queue:
    """The queue of this name. Raises NotFound."""
    queue = queue_called(project, name)
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


SHOWN = (
    "name", "queue", "priority", "seniority_us", "shape", "queued_at", "moved_at", "spec",
    "user__username", "moved_by__username",
)  # fmt: skip
"""What a queue's page shows of a run that waits."""


def queue_rows(queue: Queue, limit: int = 50, offset: int = 0) -> list[QueueRow]:
    """A page of the queue in true order."""
    runs = list(in_order(queue).select_related("user", "moved_by").only(*SHOWN)[offset : offset + limit])
    told = _verdicts(queue, {run.shape for run in runs})
    return [
        QueueRow(run, position, *_reason(queue, run.shape, told)) for position, run in enumerate(runs, start=offset + 1)
    ]


class QueueLine(NamedTuple):
    """One waiting run in its place, less than a QueueRow: what the API lists."""

    id: str
    name: str
    priority: int
    user: str
    submitted_at: dt.datetime
    moved_by: str | None
    moved_at: dt.datetime | None
    position: int
    reason: str
    reason_data: dict[str, Any]


_QUEUE_LINES = """
SELECT run.uid, run.name, run.priority, (SELECT username FROM accounts_user WHERE id = run.user_id), run.submitted_at,
    (SELECT username FROM accounts_user WHERE id = run.moved_by_id), run.moved_at, run.shape
FROM runs_run run
WHERE run.id IN (
    SELECT id FROM runs_run WHERE queue_id = %s AND status = 'submitted' ORDER BY rank, id LIMIT %s OFFSET %s
)
ORDER BY run.rank, run.id
"""
"""What stands before a page far back is skipped in the index. Subqueries for names are planned faster than joins."""


def queue_lines(queue: Queue, limit: int, offset: int = 0) -> list[QueueLine]:
    """A page of the queue in true order. Those that wait for the same share one `reason_data`."""
    found = sql.rows(_QUEUE_LINES, [queue.pk, limit, offset])
    shapes = {shape for *_, shape in found}
    told = _verdicts(queue, shapes)
    reasons = {shape: _reason(queue, shape, told) for shape in shapes}
    return [
        QueueLine._make([sql.uid(uid), *shown, position, *reasons[shape]])
        for position, (uid, *shown, shape) in enumerate(found, start=offset + 1)
    ]


Verdicts = dict[str, tuple[str, dict[str, Any]]]
"""Reason code and numbers by shape; that of the shape "" is the whole queue's."""


_VERDICTS = "SELECT shape, reason, data FROM runs_verdict WHERE queue_id = %s AND shape IN ({shapes})"


def _verdicts(queue: Queue, shapes: set[str]) -> Verdicts:
    asked = {"", *shapes}
    rows = sql.rows(_VERDICTS.format(shapes=sql.places(asked)), [queue.pk, *asked])
    return {shape: (reason, json.loads(data)) for shape, reason, data in rows}


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


class RunLine(NamedTuple):
    """A run as the API lists it. The names and their order are those of its answers."""

    id: str
    name: str
    status: str
    status_message: str
    termination_reason: str
    priority: int
    queue: str
    user: str
    attempt: int
    exit_code: int | None
    submitted_at: dt.datetime
    started_at: dt.datetime | None
    ended_at: dt.datetime | None
    held_until: dt.datetime | None
    next_at: dt.datetime | None


_RUN_LINES = """
SELECT run.id, run.uid, run.name, run.status, run.status_message, run.termination_reason, run.priority,
    (SELECT name FROM runs_queue WHERE id = run.queue_id), (SELECT username FROM accounts_user WHERE id = run.user_id),
    run.attempt, run.exit_code, run.submitted_at, run.started_at, run.ended_at, run.retry_at, run.extended_s,
    CASE WHEN run.status = 'running' THEN run.spec END
FROM runs_run run
"""
_THESE = _RUN_LINES + "WHERE run.id IN ({ids}) ORDER BY run.id DESC"
_NEWEST = _RUN_LINES + "WHERE run.project_id = %s AND run.id < %s ORDER BY run.id DESC LIMIT %s"
MAX_ID = 2**63 - 1


def newest_lines(
    project: Project,
    *,
    statuses: Sequence[str] = (),
    user: str = "",
    text: str = "",
    before: int | None = None,
    limit: int = 50,
) -> tuple[list[RunLine], int | None]:
    """The runs of `newest_page`, and the cursor of the next page or None."""
    if statuses or user or text:
        ids, following = newest_page(project, statuses=statuses, user=user, text=text, before=before, limit=limit)
        found = sql.rows(_THESE.format(ids=sql.places(ids)), ids) if ids else []
        return [_run_line(*row) for row in found], following
    below = MAX_ID if before is None else max(0, min(before, MAX_ID))
    found = sql.rows(_NEWEST, [project.pk, below, limit + 1])
    return [_run_line(*row) for row in found[:limit]], (found[limit - 1][0] if len(found) > limit else None)


def _run_line(pk: int, uid: uuid.UUID | str, *row: Any) -> RunLine:
    *shown, started_at, ended_at, retry_at, extended_s, spec = row
    held_until = None
    if spec:
        run = Run(status=RunStatus.RUNNING, started_at=started_at, extended_s=extended_s, spec=json.loads(spec))
        held_until = run.held_until
    return RunLine._make([sql.uid(uid), *shown, started_at, ended_at, held_until, retry_at])


JOBS_AT_ONCE = MAX_NODES
"""Jobs of a run that are read at once: the newest attempt is always there as a whole."""
EVENTS_AT_ONCE = 500


def jobs_of(run: Run, limit: int = JOBS_AT_ONCE, after: tuple[int, int] | None = None) -> list[Job]:
    """A run's jobs, newest attempt first, then by node; those behind `after` (attempt, node)."""
    jobs = Job.objects.filter(run=run).select_related("host", "backend", "instance").order_by("-attempt", "node")
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


def hosts_with_holders(name: str = "") -> list[tuple[Host, list[tuple[Gpu, Run | None]]]]:
    """Every host that has not left (or the one called `name`), by name, each with its GPUs by index and the run that
    holds each."""
    hosts = Host.joined.filter(**({"name": name} if name else {}))
    holders = {
        allocation.gpu_id: allocation.job.run
        for allocation in Allocation.objects.filter(gpu__isnull=False, host__in=hosts)
        .select_related("job__run__project", "job__run__user")
        .defer(*(f"job__run__{name}" for name in (*TEXTS, "spec")))
    }
    shown = hosts.prefetch_related("gpus").order_by("name")
    return [(host, [(gpu, holders.get(gpu.pk)) for gpu in host.gpus.all()]) for host in shown]
