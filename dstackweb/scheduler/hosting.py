"""The work on the machine where jobs run: see that each job has its runner, that a stopped one ends, that ends are told.

Called by the host's own cluster. One step, safe to repeat at any moment: the runner decides from its own files
whether to start, to salvage or to do nothing, and the API lets only one runner claim a job.
"""

from __future__ import annotations

import logging
from uuid import UUID

from django.conf import settings
from django.core import signing

from dstackweb.backends.hosts import local
from dstackweb.runs.attempts import ended
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE, JobStatus, Reason
from dstackweb.scheduler.watch import KILL_MARGIN_S

log = logging.getLogger(__name__)

NO_STATE_S = 60.0
"""A claimed job that has been silent this long, whose runner is gone and can't be brought back, is over."""

JOB_SALT = "dstackweb.job"


def job_token(job_id: UUID, salt: str = JOB_SALT) -> str:
    """The bearer token of one job's runner: signed, so that nothing needs to be stored to check it."""
    return signing.Signer(salt=salt).sign(str(job_id))


def job_of_token(token: str, salt: str = JOB_SALT) -> UUID | None:
    """The job that a token was made for; None for any other string."""
    try:
        return UUID(signing.Signer(salt=salt).unsign(token))
    except (signing.BadSignature, ValueError):
        return None


def look_at_job(job_id: str) -> None:
    """Bring one job of this machine forward: start or revive its runner, or make it stop."""
    job = Job.objects.select_related("host", "run").filter(pk=job_id, status__in=JOB_ACTIVE).first()
    if job is None or job.host is None or job.host.name != settings.DSTACKWEB_HOST_NAME:
        return
    overdue = job.status == JobStatus.TERMINATING and job.status_s > (job.stop_grace_s or 0) + KILL_MARGIN_S
    if overdue and not local.kill_job(job.pk):
        log.warning("%s: its processes don't die yet; looking again", job)
        return
    if local.runner_alive(job.pk):
        local.nudge(job.pk)
        return
    if job.claim_nonce and job.silent_s > NO_STATE_S and local.tree_gone(job.pk):
        ended(job.pk, Reason.INSTANCE_UNREACHABLE, message="its runner and what it knew are gone from the host")
        return
    local.ensure_runner(launch_order(job))


def look_over_host(host: str) -> None:
    """Look at every active job of a machine that may need it. A healthy running job costs one flock."""
    for job in Job.objects.filter(host__name=host, status__in=JOB_ACTIVE):
        if job.status == JobStatus.TERMINATING or not local.runner_alive(job.pk):
            look_at_job(str(job.pk))


def launch_order(job: Job) -> dict[str, object]:
    """What a runner is told on its standard input."""
    assert job.host is not None
    return {
        "api": settings.DSTACKWEB_API_URL,
        "job": str(job.pk),
        "token": job_token(job.pk),
        "state_dir": str(local.state_dir(job.pk)),
        "run_dir": str(local.run_dir(job.host.runs_dir, job.run.uid, job.node)),
        "user": job.host.job_user or None,
        "path": local.job_path(),
    }
