"""Where runs are: the hosts and cloud instances of their jobs, as lists show them, and those that are silent."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from django.db.models import F

from dstackweb.backends.hosts.inventory import is_online
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import JOB_ACTIVE, PLACED, JobStatus


class PlacementSummary(NamedTuple):
    """`where` is a host's name or a backend's offer; `detail` and `message` say why it has not started."""

    where: str
    message: str
    detail: dict[str, Any]


def job_place(job: Job) -> str:
    """A host's name, or backend, region and instance type. Reads the job's host and backend."""
    if job.host:
        return job.host.name
    return " ".join(filter(None, (job.backend.name, job.region, job.instance_type, "(spot)" if job.is_spot else "")))


def placement_summary(jobs: Iterable[Job]) -> PlacementSummary | None:
    """Where these jobs of one attempt are, by node; None without any."""
    found = list(jobs)
    if not found:
        return None
    names = list(dict.fromkeys(job_place(job) for job in found))
    where = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
    if len(names) == 1 and len(found) > 1:
        where = f"{len(found)} × {where}"
    starting = [job for job in found if job.status == JobStatus.PROVISIONING]
    message, detail = next(((job.message, job.detail) for job in starting if job.message or job.detail), ("", {}))
    return PlacementSummary(where, message, detail)


def placement_summaries(ids: Collection[int]) -> dict[int, PlacementSummary]:
    """The place of each of these runs whose newest attempt has one."""
    if not ids:
        return {}
    jobs = Job.objects.filter(run__in=ids, attempt=F("run__attempt")).select_related("host", "backend")
    by_run = groupby(jobs.order_by("run_id", "node"), attrgetter("run_id"))
    return {run_id: found for run_id, of_run in by_run if (found := placement_summary(of_run))}


class SilentHost(NamedTuple):
    """An offline host with an active job of the run, and when it was last heard."""

    host: str
    seen_at: dt.datetime | None


def silent_hosts(run: Run, jobs: Iterable[Job] | None = None) -> list[SilentHost]:
    """The silent hosts of a placed run, by name; `jobs` of it, with their hosts, if they are loaded already."""
    if run.status not in PLACED:
        return []
    if jobs is None:
        jobs = Job.objects.select_related("host").filter(run=run, status__in=JOB_ACTIVE, host__isnull=False)
    hosts = {job.host.pk: job.host for job in jobs if job.status in JOB_ACTIVE and job.host is not None}
    return sorted(SilentHost(host.name, host.seen_at) for host in hosts.values() if not is_online(host))
