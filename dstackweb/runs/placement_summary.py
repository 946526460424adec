"""Where runs are: the machines of their newest attempts, in a few words each."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from django.db.models import F
from django.utils.translation import gettext as _

from dstackweb.runs.models import Job
from dstackweb.runs.states import JobStatus


class Place(NamedTuple):
    """`where` is a host's name or a backend's offer; `message` says what keeps its machine from being asked for."""

    where: str
    message: str


def where(job: Job) -> str:
    """A host's name, or backend, region and instance type. Reads the job's host and backend."""
    if job.host:
        return job.host.name
    told = " ".join(filter(None, (job.backend.name, job.region, job.instance_type)))
    return _("%s (spot)") % told if job.is_spot else told


def place(jobs: Iterable[Job]) -> Place | None:
    """Where these jobs of one attempt are, by node; None without any."""
    found = list(jobs)
    if not found:
        return None
    names = list(dict.fromkeys(where(job) for job in found))
    told = names[0] if len(found) == 1 else f"{len(found)} × {names[0]}" if len(names) == 1 else ", ".join(names[:3])
    if len(names) > 3:
        told += " …"
    waits = next((job.message for job in found if job.status == JobStatus.PROVISIONING and job.message), "")
    return Place(told, waits)


def of_runs(ids: Collection[str]) -> dict[str, Place]:
    """The place of each of these runs (by uid) whose newest attempt has one."""
    if not ids:
        return {}
    jobs = Job.objects.filter(run__uid__in=[uuid.UUID(one) for one in ids], attempt=F("run__attempt"))
    by_run: dict[str, list[Job]] = {}
    for job in jobs.select_related("host", "backend").annotate(run_uid=F("run__uid")).order_by("run_id", "node"):
        by_run.setdefault(str(job.run_uid), []).append(job)
    return {uid: found for uid, of in by_run.items() if (found := place(of))}


def shown(at: Place | None, status_message: str) -> dict[str, Any]:
    """What the API says of a run's place, and of what keeps it from being had."""
    return {"where": at.where if at else None, "status_message": status_message or (at.message if at else "")}
