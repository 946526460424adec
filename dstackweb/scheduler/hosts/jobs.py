"""Jobs on their own host: start or revive runners, stop them, report ends.

Called by the host's own workers. Safe to repeat: the runner decides from its own files whether to start, to salvage
or to do nothing, and the API lets only one runner claim a job.
"""

from __future__ import annotations

import logging

from django.conf import settings

from dstackweb.backends.contract import Availability, Handle, LaunchSpec, Offer, Presence, StartFailed
from dstackweb.backends.hosts import local
from dstackweb.backends.registry import hosts
from dstackweb.runs.attempts import RUNNER_GONE_S, end_job
from dstackweb.runs.codes import MessageCode
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE, JobStatus, Reason
from dstackweb.runs.tokens import job_token

log = logging.getLogger(__name__)

KILL_MARGIN_S = 15.0
"""How long a stopping job's runner may take beyond its grace before its host kills it."""


def check_job(job_id: str) -> None:
    """Advance one job of this host: start or revive its runner, or stop it."""
    job = Job.objects.select_related("host", "backend", "run").filter(pk=job_id, status__in=JOB_ACTIVE).first()
    if job is None or job.host is None or job.host.name != settings.DSTACKWEB_HOST_NAME:
        return
    backend, handle = hosts(job.backend), Handle(job=str(job.pk), ref=job.host.name)
    overdue = job.status == JobStatus.TERMINATING and job.status_s > (job.stop_grace_s or 0) + KILL_MARGIN_S
    if overdue and not backend.stop(handle, grace_s=None):
        log.warning("%s: processes still alive after kill, will retry", job)
        return
    presence = backend.observe(handle)
    if presence == Presence.ALIVE:
        if job.status == JobStatus.TERMINATING:
            backend.stop(handle, job.stop_grace_s or 0)
        return
    if presence == Presence.GONE and job.claim_nonce and job.silent_s > RUNNER_GONE_S:
        end_job(job.pk, Reason.INSTANCE_UNREACHABLE, detail={"code": MessageCode.RUNNER_GONE})
        return
    try:
        backend.start(launch_spec(job), _offer(job))
    except StartFailed as error:
        log.error("%s: cannot start, will retry: %s", job, error)
        _store_error(job, str(error))
    except Exception as error:
        log.exception("%s: cannot start, will retry", job)
        _store_error(job, f"{type(error).__name__}: {error}")


def check_host(host: str) -> None:
    """Check every active job of a host. A healthy running job costs one flock."""
    for job in Job.objects.filter(host__name=host, status__in=JOB_ACTIVE):
        if job.status == JobStatus.TERMINATING or not local.runner_alive(job.pk):
            check_job(str(job.pk))


def _store_error(job: Job, why: str) -> None:
    """Store why a job did not start: shown if the start deadline passes."""
    Job.objects.filter(pk=job.pk, status=JobStatus.PROVISIONING, claim_nonce="").update(message=why)


def launch_spec(job: Job) -> LaunchSpec:
    """What a backend needs to start a job."""
    return LaunchSpec(
        job_id=str(job.pk),
        run_name=job.run.name,
        run_uid=str(job.run.uid),
        attempt=job.attempt,
        node=job.node,
        nodes=Job.objects.filter(run=job.run_id, attempt=job.attempt).count(),
        cpus=job.cpus,
        memory_mib=job.memory_mib,
        api_url=settings.DSTACKWEB_API_URL,
        token=job_token(job.pk),
        gpu_uuids=tuple(job.gpus),
    )


def _offer(job: Job) -> Offer:
    """The job's placement as an offer."""
    assert job.host is not None
    return Offer(
        backend=job.backend.name,
        instance_type=job.host.name,
        cpus=job.cpus,
        memory_mib=job.memory_mib,
        availability=Availability.IDLE,
        host_id=job.host.pk,
    )
