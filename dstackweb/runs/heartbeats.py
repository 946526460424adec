"""Heartbeats of runners: two statements for one job or for all jobs of a host."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple
from uuid import UUID

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.lib.errors import Conflict, DomainError, NotFound
from dstackweb.lib.models import watch_time
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE, JobStatus


class Heartbeat(NamedTuple):
    """A job and the nonce of the runner that says it is alive."""

    job: UUID
    nonce: str


class HeardJob(NamedTuple):
    """What the answer to a heartbeat depends on."""

    run_id: int
    attempt: int
    status: str
    claim_nonce: str
    is_ready: bool
    stop_reason: str
    stop_grace_s: int | None
    max_duration_s: int | None
    extended_s: int

    @property
    def limit_s(self) -> int | None:
        """As `Run.limit_s`."""
        return None if self.max_duration_s is None else self.max_duration_s + self.extended_s


_COLUMNS = ("run_id", "attempt", "status", "claim_nonce", "is_ready", "stop_reason", "stop_grace_s",
            "run__spec__max_duration_s", "run__extended_s")  # fmt: skip


def take(heartbeats: Sequence[Heartbeat]) -> dict[UUID, HeardJob | DomainError]:
    """Note heartbeats. Returns each job as it is now, or why the server no longer wants this runner's heartbeat."""
    found = Job.objects.filter(pk__in=[one.job for one in heartbeats]).values_list("pk", *_COLUMNS)
    jobs = {row[0]: HeardJob(*row[1:]) for row in found}
    taken = {one.job: _refusal(jobs.get(one.job), one.nonce) or jobs[one.job] for one in heartbeats}
    _note([job for job, answer in taken.items() if isinstance(answer, HeardJob)])
    return taken


def note_pull(job: UUID) -> None:
    """A job whose image is being pulled has the time to start from now on."""
    Job.objects.filter(pk=job, status=JobStatus.PROVISIONING).update(status_at_s=watch_time())


def note_exited(job: UUID) -> None:
    """Note, once, that a job's commands have ended: its GPUs are idle from now on, while its files are sent."""
    Job.objects.filter(pk=job, exited_at=None).update(exited_at=timezone.now())


def reach_barrier(pk: UUID, job: HeardJob) -> bool:
    """Whether all other nodes are ready. While one pulls its image, this one's time to start does not pass either."""
    if not job.is_ready:
        Job.objects.filter(pk=pk).update(is_ready=True)
    nodes = Job.objects.filter(run=job.run_id, attempt=job.attempt, status__in=JOB_ACTIVE, is_ready=False)
    missing = list(nodes.exclude(pk=pk).values_list("claim_nonce", flat=True))
    if any(missing):
        note_pull(pk)
    return not missing


def _refusal(job: HeardJob | None, nonce: str) -> DomainError | None:
    if job is None:
        return NotFound(_("no such job"))
    if not job.claim_nonce:
        return Conflict(_("claim the job first"))
    if job.claim_nonce != nonce:
        return Conflict(_("another runner has this job"))
    return None if job.status in JOB_ACTIVE else Conflict(_("this job has ended"))


def _note(jobs: Collection[UUID]) -> None:
    rows = Job.objects.filter(pk__in=jobs)
    if len(jobs) == 1:
        rows.update(heard_at_s=watch_time())
    elif jobs:
        with transaction.atomic():
            # Waiting for a row while holding others could deadlock. Its next heartbeat counts.
            free = rows.select_for_update(skip_locked=True, no_key=True).order_by().values("pk")
            Job.objects.filter(pk__in=free).update(heard_at_s=watch_time())
