"""How large logs may get: the log of each job, and all logs of a project together.

A runner keeps to the limit of a job by itself (docs/runner.md). Here it holds for whatever has a job's token. A log
that may not grow is cut: a last line says why, what follows is acknowledged and dropped, and the job goes on.

`ProjectLogs` counts each log up to an eighth ahead of its size, so that few appends write a row.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from django.conf import settings
from django.db import transaction

from dstackweb.lib.storage import Gap
from dstackweb.runs import files
from dstackweb.runs.codes import LogCut, LogCutData, RunEventKind
from dstackweb.runs.models import Job, ProjectLogs, Run
from dstackweb.runs.transitions import lock_job, record

SLACK = 4096
"""For the runner's own lines in a log of just the limit."""
STEP = 1 << 14


@dataclass(frozen=True)
class Appended:
    """`next` is the offset to continue at. `cut`: no more is kept."""

    next: int
    cut: str = ""


class _Full(Exception):
    """The project's quota has no room."""


def counted_for(size: int) -> int:
    """What a log of `size` bytes counts as: a whole number of steps, which are an eighth of it or STEP."""
    step = max(STEP, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def limit_of(cut: LogCut) -> int:
    """The limit in bytes."""
    if cut is LogCut.PROJECT_QUOTA:
        return int(settings.DSTACKWEB_PROJECT_LOG_GB) * 1024**3
    return int(settings.DSTACKWEB_LOG_LIMIT_MB) * 1024**2


def append(job_id: UUID, offset: int, data: bytes) -> Appended:
    """Add `data`, which begins at `offset`, as far as the limits allow. Repeatable.

    Raises storage.Gap when `offset` lies behind the end, and StorageAway.
    """
    end = offset + len(data)
    while True:
        project_id, counted, cut, kept = Job.objects.values_list(
            "run__project", "log_counted", "log_cut", "log_size"
        ).get(pk=job_id)
        if cut:
            return Appended(end if data else kept or 0, cut)
        most = limit_of(LogCut.JOB_LIMIT) + SLACK
        if end <= min(counted, most) or not data:
            return Appended(files.append_log(job_id, offset, data))
        if offset > (size := files.log_size(job_id)):
            raise Gap(size)
        try:
            if not _count(job_id, project_id, counted, counted_for(min(end, most))):
                continue  # another sender was faster
        except _Full:
            return _cut(job_id, offset, data, counted, LogCut.PROJECT_QUOTA)
        if end > most:
            return _cut(job_id, offset, data, most, LogCut.JOB_LIMIT)


def _count(job_id: UUID, project_id: int, was: int, now: int) -> bool:
    """Count the log as `now` bytes; False if it does not count as `was` any more. Raises _Full."""
    if now <= was:
        return True
    ProjectLogs.objects.bulk_create([ProjectLogs(project_id=project_id)], ignore_conflicts=True)
    with transaction.atomic():
        if not Job.objects.filter(pk=job_id, log_counted=was, log_cut="").update(log_counted=now):
            return False
        if not ProjectLogs.take(project_id, now - was, limit_of(LogCut.PROJECT_QUOTA)):
            raise _Full
    return True


def _cut(job_id: UUID, offset: int, data: bytes, most: int, why: LogCut) -> Appended:
    """Keep what fits into `most` bytes, and say in the log, in the job and in an event why that is all."""
    kept = files.append_log(job_id, offset, data[: max(0, most - offset)])
    with transaction.atomic():
        job = lock_job(job_id)
        if won := not job.log_cut:
            Job.objects.filter(pk=job_id).update(log_cut=why, log_size=kept)
            facts: LogCutData = {"why": why, "limit": limit_of(why)}
            record(job.run, RunEventKind.LOG_CUT, dict(facts), node=job.node, attempt=job.attempt, is_locked=True)
    if won:
        files.append_log(job_id, kept, cut_line(why))
    return Appended(offset + len(data), why)


def cut_line(why: LogCut) -> bytes:
    """The last line of a log that was cut."""
    if why is LogCut.PROJECT_QUOTA:
        reached = f"the project's logs have reached their quota of {settings.DSTACKWEB_PROJECT_LOG_GB} GB"
    else:
        reached = f"the log has reached its limit of {settings.DSTACKWEB_LOG_LIMIT_MB} MB"
    return f"\n[dstackweb: {reached}; output from here on is not kept, and the run goes on]\n".encode()


def at_end(job: Job, size: int | None, missing: int) -> tuple[int | None, int]:
    """The size of the job's log, and the bytes missing in it. What a runner had beyond a cut is missing. Repeatable."""
    if not job.log_cut:
        return size, missing
    kept = job.log_size or 0
    return kept, min(missing + max(0, (size or 0) - kept), 2**62)


def forget(job_ids: Sequence[UUID], now: dt.datetime) -> int:
    """The files of these jobs' logs were removed; returns of how many that was new."""
    with transaction.atomic():
        jobs = Job.objects.filter(pk__in=job_ids, log_removed_at=None).select_for_update().order_by("pk")
        found = list(jobs.values_list("pk", "run_id", "log_counted"))
        project_of = dict(
            Run.objects.filter(pk__in={run for _pk, run, _bytes in found}).values_list("pk", "project_id")
        )
        freed = Counter[int]()
        for _pk, run_id, counted in found:
            freed[project_of[run_id]] += counted
        removed = Job.objects.filter(pk__in=[pk for pk, *_ in found]).update(log_removed_at=now, log_counted=0)
        ProjectLogs.uncount(freed)
    return removed
