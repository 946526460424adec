"""Where runs are: the hosts and cloud instances of their jobs, as short as lists show them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from django.db.models import F

from dstackweb.runs.models import Job
from dstackweb.runs.states import JobStatus


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
    by_run: dict[int, list[Job]] = {}
    for job in jobs.order_by("run_id", "node"):
        by_run.setdefault(job.run_id, []).append(job)
    return {run: found for run, of_run in by_run.items() if (found := placement_summary(of_run))}
