"""Calls of the agents on cloud instances, and the orders they get in return. Any call may be repeated, doubled or lost:
orders follow from rows alone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core import signing
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from dstackweb.backends.contract import InstanceEnd
from dstackweb.backends.models import Instance, InstanceStatus
from dstackweb.lib.errors import Conflict, Forbidden, NotFound, TooEarly
from dstackweb.lib.models import watch_time
from dstackweb.lib.secrets import digest
from dstackweb.runs import attempts
from dstackweb.runs.codes import MessageCode
from dstackweb.runs.launch import job_token, read_id, sign_id
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE, JobStatus, Reason
from dstackweb.scheduler.cloud import instances

JOIN_SALT, AGENT_SALT = "dstackweb.join", "dstackweb.agent"
IDLE_POLL_S = 1.0
"""How often an agent without a job polls."""
ALONE_MARGIN_S = 60.0
MAX_NOTICE = dt.timedelta(days=1)
"""Clouds give notices of minutes. Reported times further away are clamped to this."""


@dataclass(frozen=True)
class EngineReport:
    """A job waits for its instance's container engine, or there is none for it: `fault` with the installer's words."""

    job: UUID
    fault: str = ""
    text: str = ""


@dataclass(frozen=True)
class AgentReport:
    """What an agent reports with each call.

    `job`: the job whose runner is alive. `left`: processes or an unreported end of a job are left without a runner.
    `interruption_at`: when the cloud takes the instance back. `error`: why the last runner did not start.
    """

    job: UUID | None = None
    left: bool = False
    interruption_at: dt.datetime | None = None
    error: str = ""
    engine: EngineReport | None = None


def join_token(instance: UUID) -> tuple[str, str]:
    """The token for an instance's user data, and its digest: the same each time, as a repeated launch must be
    identical."""
    token = signing.Signer(salt=JOIN_SALT).signature(str(instance))
    return token, digest(token)


def agent_token(instance: UUID) -> str:
    return sign_id(instance, AGENT_SALT)


def instance_of_token(token: str) -> UUID | None:
    """The instance that an agent's token was made for; None for any other string."""
    return read_id(token, AGENT_SALT)


def join(instance_id: UUID, token: str, nonce: str, *, gpus: Sequence[str], address: str) -> str:
    """Register an agent once, and return its token. The same nonce may repeat the call.

    `gpus` are NVML UUIDs. Raises Forbidden for a wrong token, Conflict when another agent has used it or the instance
    is ending, TooEarly while the cloud's answer to the launch is not stored yet.
    """
    instance = Instance.objects.filter(pk=instance_id).first()
    if instance is None or not instance.join_digest or digest(token) != instance.join_digest:
        raise Forbidden("this token does not open this instance")
    now = timezone.now()
    Instance.objects.filter(pk=instance_id, status=InstanceStatus.STARTING, join_nonce="").update(
        status=InstanceStatus.RUNNING,
        status_s=0,
        join_nonce=nonce,
        gpus=list(gpus),
        address=instance.address or address,
        ready_at=now,
        heartbeats=F("heartbeats") + 1,
        seen_at=now,
        silent_s=0,
    )
    instance.refresh_from_db()
    _clear_wait(instance)
    if instance.status == InstanceStatus.REQUESTED:
        raise TooEarly("this instance is being started; come again")
    if instance.join_nonce != nonce:
        raise Conflict("this token has been used")
    if instance.status != InstanceStatus.RUNNING:
        raise Conflict("this instance is to end")
    return agent_token(instance_id)


def _clear_wait(instance: Instance) -> None:
    """Its engine has started it: its job waits for the engine no longer."""
    jobs = Job.objects.filter(instance=instance.pk, status=JobStatus.PROVISIONING, claim_nonce="")
    jobs.filter(detail__code=MessageCode.ENGINE_WAITS).update(detail={})


def next_step(instance_id: UUID, report: AgentReport) -> dict[str, Any]:
    """The next order: `{"do": "run", "job", "orders"}`, `{"do": "wait", "again_s"}` or `{"do": "off"}`.

    `alone_s`: how many seconds the instance stays up without an answer. An interruption is only stored here; the
    watcher acts on it. Raises NotFound.
    """
    now = timezone.now()
    Instance.objects.filter(pk=instance_id).update(heartbeats=F("heartbeats") + 1, seen_at=now, silent_s=0)
    if report.interruption_at is not None:
        record_interruption(instance_id, report.interruption_at)
    instance = Instance.objects.select_related("backend").filter(pk=instance_id).first()
    if instance is None:
        raise NotFound("no such instance")
    if instance.status in (InstanceStatus.STOPPING, InstanceStatus.GONE):
        instances.read_soon(instance.backend)  # an allocation ends with its agent
        return {"do": "off"}
    served = Job.objects.timed().select_related("run").filter(instance=instance, status__in=JOB_ACTIVE)
    job = next((job for job in served if job.pk == instance.holder), None)
    step = None
    if job is not None and job.pk != report.job:
        step = _start_order(job, instance, report)
    if step is None:
        often = settings.DSTACKWEB_HEARTBEAT_S
        step = {"do": "wait", "again_s": min(IDLE_POLL_S, often) if report.job is None else often}
    return step | {"alone_s": _alone_s(instance, now)}


def record_interruption(instance_id: UUID, at: dt.datetime) -> None:
    """Store when the cloud takes an instance back. The watcher acts on it."""
    now = timezone.now()
    there = Instance.objects.filter(pk=instance_id, interrupted_at=None, status=InstanceStatus.RUNNING)
    there.update(interrupted_at=min(max(at, now - MAX_NOTICE), now + MAX_NOTICE))


def _start_order(job: Job, instance: Instance, report: AgentReport) -> dict[str, Any] | None:
    """The order to start the job's runner, which decides itself what is left to do; None to wait."""
    if job.reported_at is not None:
        return None
    unclaimed = Job.objects.filter(pk=job.pk, status=JobStatus.PROVISIONING, claim_nonce="")
    if report.error:
        unclaimed.update(message=report.error)  # shown if the start deadline passes
    if len(instance.gpus) < instance.gpu_count:
        _end_without_gpus(job, instance)
        return {"do": "off"}
    if not job.claim_nonce and instance.interrupted_at is not None:
        return None
    if report.engine is not None and report.engine.job == job.pk and not job.claim_nonce:
        if report.engine.fault:
            detail = {"code": MessageCode.NO_ENGINE, "fault": report.engine.fault}
            attempts.end_job(job.pk, Reason.CREATING_CONTAINER_ERROR, message=report.engine.text, detail=detail)
            return None
        # The time to start counts from the end of the installation, which the agent limits.
        unclaimed.update(status_at_s=watch_time(), detail={"code": MessageCode.INSTALLING_ENGINE})
    if job.claim_nonce and job.silent_s > attempts.RUNNER_GONE_S and not report.left:
        attempts.end_job(job.pk, Reason.INSTANCE_UNREACHABLE, detail={"code": MessageCode.RUNNER_GONE})
        return None
    if not job.claim_nonce and job.gpus != instance.gpus:
        unclaimed.update(gpus=instance.gpus)
    orders = {
        "api": settings.DSTACKWEB_API_URL,
        "job": str(job.pk),
        "token": job_token(job.pk),
        "insecure": settings.DSTACKWEB_INSECURE_HTTP,
        "run_uid": str(job.run.uid),
        "node": job.node,
        "image": bool(job.run.spec.get("image")),
        "gpus": bool(instance.gpu_count),
    }
    return {"do": "run", "job": str(job.pk), "orders": orders}


def _end_without_gpus(job: Job, instance: Instance) -> None:
    """GPUs are missing: the job fails and the instance ends."""
    seen = {"instance_type": instance.instance_type, "seen": len(instance.gpus), "total": instance.gpu_count}
    with transaction.atomic():
        attempts.end_job(job.pk, Reason.EXECUTOR_ERROR, detail={"code": MessageCode.NO_GPUS, **seen})
        Instance.objects.filter(pk=instance.pk, status=InstanceStatus.RUNNING).update(
            status=InstanceStatus.STOPPING, status_s=0, why=InstanceEnd.NO_GPUS, error=""
        )


def _alone_s(instance: Instance, now: dt.datetime) -> float:
    """How long the instance may go without an answer: while it is kept idle, or until it counts as lost."""
    kept_s = (instance.idle_until - now).total_seconds() if instance.idle_until else 0.0
    return max(kept_s, settings.DSTACKWEB_LOST_AFTER_S) + ALONE_MARGIN_S
