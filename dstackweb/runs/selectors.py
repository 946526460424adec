"""What pages, the API and the scheduler read. Nothing here writes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.models import Max, Q, QuerySet, Sum
from django.utils.translation import gettext as _

from dstackweb.accounts.models import Project
from dstackweb.lib import sql
from dstackweb.lib.errors import Gone, NotFound
from dstackweb.lib.storage import Missing
from dstackweb.runs import logs
from dstackweb.runs.codes import WaitReason, permanence
from dstackweb.runs.models import Dependency, Job, Queue, QueueCount, Run, RunEvent, Sweep
from dstackweb.runs.states import JOB_ENDED, PLACED, RunStatus
from dstackweb.spec.run_fields import MAX_NODES


def find_run(project: Project, name: str) -> Run:
    """The run with this uid, or the newest of this name. Raises NotFound."""
    runs = Run.objects.select_related("queue", "project", "user").filter(project=project)
    # Its own query: beside the joins SQLite would walk all of the project's runs.
    newest = Run.objects.filter(project=project, name=name).order_by("-id").values("pk")[:1]
    run = (runs.filter(uid=uid).first() if (uid := sql.parsed_uid(name)) else None) or runs.filter(pk=newest).first()
    if run is None:
        raise _no_run(project, name)
    return run


def _no_run(project: Project, name: str) -> NotFound:
    return NotFound(_("no run is called %(name)s in %(project)s") % {"name": repr(name), "project": project.name})


def find_runs(project: Project, names: Sequence[str]) -> list[Run]:
    """As `find_run` for each of these, in three statements."""
    runs = Run.objects.select_related("queue", "project", "user").filter(project=project)
    uids = {name: uid for name in names if (uid := sql.parsed_uid(name))}
    by_uid = {run.uid: run for run in runs.filter(uid__in=uids.values())}
    found = {name: by_uid[uid] for name, uid in uids.items() if uid in by_uid}
    rest = Run.objects.filter(project=project, name__in=[name for name in names if name not in found])
    newest = list(rest.order_by().values_list("name").annotate(newest=Max("pk")).values_list("newest", flat=True))
    found |= {run.name: run for run in runs.filter(pk__in=newest)}
    for name in names:
        if name not in found:
            raise _no_run(project, name)
    return [found[name] for name in names]


def dependencies_of(run: Run | Sweep) -> list[Dependency]:
    """The runs and sweeps that had, or have, to end before this one; without a statement where its spec has none."""
    if not run.spec.get("after"):
        return []
    return list(run.dependencies.select_related("predecessor", "sweep__count").order_by("pk"))


def followers_of(run: Run | Sweep, limit: int) -> list[Dependency]:
    """The runs and sweeps that wait, or waited, for the end of this one, oldest first."""
    return list(run.followers.select_related("run", "waiting_sweep__count").order_by("pk")[:limit])


def queue_called(project: Project, name: str) -> Queue | None:
    found = Queue.objects.raw("SELECT * FROM runs_queue WHERE project_id = %s AND name = %s", [project.pk, name])
    queue = next(iter(found), None)
    if queue is not None:
        queue.project = project
    return queue


def in_order(queue: Queue) -> QuerySet[Run]:
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


def placed_gpus(queue_ids: Collection[int]) -> Iterator[tuple[int, int, int]]:
    """Queue, member and requested GPUs of each placed run of these queues, on whichever backend.

    Reads placed runs of all queues, which are few: SQLite would search these queues' waiting runs otherwise.
    """
    columns = ("queue_id", "user_id", "spec__nodes", "spec__requirements__gpu_count_min")
    for queue_id, user_id, nodes, gpus in Run.objects.filter(status__in=PLACED).values_list(*columns):
        if queue_id in queue_ids:
            yield queue_id, user_id, (nodes or 1) * (gpus or 0)


TEXTS = ("config_text", "provenance", "env_secret")
"""What may be large and no list shows: 500 run files can be 128 MB."""


def without_texts(runs: QuerySet[Run]) -> QuerySet[Run]:
    """The same runs for a list."""
    return runs.defer(*TEXTS)


_VERDICTS = "SELECT shape, reason, data FROM runs_verdict WHERE queue_id = %s AND shape IN ({shapes})"


WaitingFor = tuple[str, dict[str, Any]]
"""A reason to wait: its code and its numbers."""


def blockers(queue: Queue, shapes: set[str]) -> dict[str, list[WaitingFor]]:
    """What holds up waiting runs of each shape, the most permanent first: the pause and verdicts; never empty."""
    wanted = {"", *shapes}  # that of the shape "" is the whole queue's
    rows = sql.rows(_VERDICTS.format(shapes=sql.places(wanted)), [queue.pk, *wanted])
    verdicts = {shape: (reason, json.loads(data)) for shape, reason, data in rows}
    return most_permanent(verdicts, shapes, is_paused=queue.paused)


def most_permanent(
    verdicts: Mapping[str, WaitingFor], shapes: Collection[str], *, is_paused: bool
) -> dict[str, list[WaitingFor]]:
    """`blockers` from these verdicts by shape. Pure."""
    whole: list[WaitingFor] = [(WaitReason.QUEUE_PAUSED, {})] if is_paused else []
    whole += [verdicts[""]] if "" in verdicts else []
    # Without a verdict the next pass decides.
    each = {shape: [*whole, *([verdicts[shape]] if shape in verdicts else [])] for shape in shapes}
    return {
        shape: sorted(found, key=lambda one: permanence(*one)) or [(WaitReason.STARTING, {})]
        for shape, found in each.items()
    }


def wait_reasons(queue: Queue, shapes: set[str]) -> dict[str, WaitingFor]:
    """Why waiting runs of each of these shapes wait: the most permanent of their blockers."""
    return {shape: found[0] for shape, found in blockers(queue, shapes).items()}


def blockers_of(run: Run) -> list[WaitingFor]:
    """All that holds up a run that waits, the most permanent first; empty for any other."""
    return blockers(run.queue, {run.shape})[run.shape] if run.status == RunStatus.SUBMITTED else []


def why(run: Run) -> WaitingFor:
    """Reason code and numbers of a run that waits; empty for any other."""
    return next(iter(blockers_of(run)), ("", {}))


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


def newest(runs: QuerySet[Run], limit: int, statuses: Sequence[str] = (), *, oldest_first: bool = False) -> list[int]:
    """Ids of the newest (or oldest) of `runs` in any of these statuses (all, when empty)."""
    # Each status by itself is the start of an index; several at once would be a walk through the whole history.
    each = [runs.filter(status=status) for status in set(statuses)] or [runs]
    order = "id" if oldest_first else "-id"
    found = (pk for part in each for pk in part.order_by(order).values_list("pk", flat=True)[:limit])
    return sorted(found, reverse=not oldest_first)[:limit]


def submitters(project: Project) -> list[str]:
    """The names of a project's members, who may have submitted runs."""
    return list(project.memberships.order_by("user__username").values_list("user__username", flat=True))


def listed(ids: Collection[int]) -> list[Run]:
    runs = Run.objects.filter(pk__in=ids).order_by("-id")
    return list(without_texts(runs).select_related("user", "queue"))


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
    """Bytes of one job's log. `complete` says that nothing will follow `next_offset`.

    `missing` counts the bytes of output that a log over its limit lacks before its last part, or behind its end if it
    was `cut` (`LogCut`); 0 until the job's end.
    """

    data: bytes
    next_offset: int
    attempt: int
    complete: bool
    job: Job | None
    missing: int = 0
    cut: str = ""
    size: int = 0
    """Of the whole log now."""


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

    Raises NotFound for a node or attempt that never was, Gone for a log that was removed, and behind the last byte
    of an ended job's log that is shorter than what was acknowledged.
    """
    job = log_job(run, node=node, attempt=attempt)
    if job is None:
        return LogPart(b"", 0, run.attempt, run.ended_at is not None, None)
    # Whether it has ended is read first: what is there then is all there will be.
    over = job.status in JOB_ENDED
    try:
        if tail is not None:
            offset = logs.tail_offset(job.pk, tail)
        data = logs.read_log(job.pk, offset, limit)
    except Missing as error:
        raise Gone(
            _("part of the log of %(run)s is lost (%(error)s is not there); its status is right")
            % {"run": run.name, "error": error}
        ) from error
    following = offset + len(data)
    stored, acknowledged = logs.log_size(job.pk), (job.log_size or 0) if over else 0
    if not data and stored <= offset < acknowledged:
        raise Gone(
            _(
                "the log of %(run)s had %(acknowledged)s bytes, and %(stored)s of them are here; its status is "
                "right. If each server keeps logs on its own disk, look on the other ones (and set "
                "DSTACKWEB_STORAGE). If it is in a backup, copy the folder joblogs from there"
            )
            % {"run": run.name, "acknowledged": acknowledged, "stored": stored}
        )
    complete = over and following >= max(stored, acknowledged)
    return LogPart(data, following, job.attempt, complete, job, job.log_missing, job.log_cut, stored)


def log_job(run: Run, *, node: int = 0, attempt: int | None = None) -> Job | None:
    """The job with this log, by default of the newest attempt; None before the first one. Raises NotFound, Gone."""
    jobs = Job.objects.filter(run=run, node=node)
    job = jobs.filter(attempt=attempt).first() if attempt else jobs.order_by("-attempt").first()
    if job is None and (attempt is not None or node):
        raise NotFound(
            _("%(run)s has no node %(node)s in attempt %(attempt)s")
            % {"run": run.name, "node": node, "attempt": attempt or run.attempt}
        )
    if job is not None and job.log_removed_at is not None:
        raise Gone(
            _(
                "the log of %(run)s was removed on %(log_removed_at)s: logs are kept for %(days)s days after the end "
                "of a run"
            )
            % {
                "run": run.name,
                "log_removed_at": f"{job.log_removed_at:%Y-%m-%d}",
                "days": settings.DSTACKWEB_LOGS_DAYS,
            }
        )
    return job


STAMPED_LOGS = 8


def log_stamp(run: Run) -> str:
    """Changes with the logs of its newest attempt, and when their jobs end; of the first nodes where there are many."""
    jobs = Job.objects.filter(run=run, attempt=run.attempt).order_by("node")[:STAMPED_LOGS]
    return ".".join(f"{logs.log_size(job.pk)}{'e' if job.status in JOB_ENDED else ''}" for job in jobs)
