"""What agents of cloud machines say, and what they are told to do.

An agent joins once, with the token of its machine's user data, and asks again and again with the token it gets for
that. Each call may be repeated, doubled or lost; what a machine is to do is told from rows alone.
"""

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

from dstackweb.backends.models import Instance, InstanceStatus
from dstackweb.lib.errors import Conflict, Forbidden, NotFound, TooEarly
from dstackweb.lib.secrets import digest
from dstackweb.runs import attempts
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE, JobStatus, Reason
from dstackweb.runs.tokens import job_token, read_id, sign_id

JOIN_SALT, AGENT_SALT = "dstackweb.join", "dstackweb.agent"
FIRST_LOOK_S = 1.0
"""How often an agent without a job asks, so that none waits long for its machine."""
ALONE_MARGIN_S = 60.0
NOTICE = dt.timedelta(days=1)
"""Clouds give minutes. What a machine says of itself must not be a time that no page can show."""


@dataclass(frozen=True)
class Report:
    """What an agent tells with each call: the job whose runner lives there, and whether processes of one are left
    without a runner, or its end untold; when the cloud takes the machine back; why the last job's runner did not
    start."""

    job: UUID | None = None
    left: bool = False
    interruption_at: dt.datetime | None = None
    error: str = ""


def join_token(instance: UUID) -> tuple[str, str]:
    """The one-time token for an instance's user data, and the digest to keep of it (`Instance.join_digest`).

    Always the same for an instance: a cloud that is asked a second time must be asked for the same.
    """
    token = signing.Signer(salt=JOIN_SALT).signature(str(instance))
    return token, digest(token)


def agent_token(instance: UUID) -> str:
    """The bearer token of the agent that joined."""
    return sign_id(instance, AGENT_SALT)


def instance_of_token(token: str) -> UUID | None:
    """The instance that an agent's token was made for; None for any other string."""
    return read_id(token, AGENT_SALT)


def join(instance_id: UUID, token: str, nonce: str, *, gpus: Sequence[str], address: str) -> str:
    """A machine is up: its agent gets a token of its own. Once; who came with the same nonce may come again.

    `gpus` are NVML's UUIDs. Raises Forbidden for another token, Conflict when it was used by another or the machine is
    to end, TooEarly while the cloud's answer to its launch has not been written down.
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
        beat=F("beat") + 1,
        seen_at=now,
        silent_s=0,
    )
    instance.refresh_from_db()
    if instance.status == InstanceStatus.REQUESTED:
        raise TooEarly("this instance is being started; come again")
    if instance.join_nonce != nonce:
        raise Conflict("this token has been used")
    if instance.status != InstanceStatus.RUNNING:
        raise Conflict("this instance is to end")
    return agent_token(instance_id)


def next_step(instance_id: UUID, report: Report) -> dict[str, Any]:
    """What a machine is to do: `{"do": "run", "job", "orders"}`, `{"do": "wait", "again_s"}` or `{"do": "off"}`.

    With `alone_s`: for how many seconds the machine stays up without an answer. An interruption is
    written down; what follows for the job is the watcher's. Raises NotFound.
    """
    now = timezone.now()
    Instance.objects.filter(pk=instance_id).update(beat=F("beat") + 1, seen_at=now, silent_s=0)
    if report.interruption_at is not None:
        there = Instance.objects.filter(pk=instance_id, interrupted_at=None, status=InstanceStatus.RUNNING)
        there.update(interrupted_at=min(max(report.interruption_at, now - NOTICE), now + NOTICE))
    instance = Instance.objects.filter(pk=instance_id).first()
    if instance is None:
        raise NotFound("no such instance")
    if instance.status in (InstanceStatus.STOPPING, InstanceStatus.GONE):
        return {"do": "off"}
    served = Job.objects.select_related("run").filter(instance=instance, status__in=JOB_ACTIVE)
    job = next((job for job in served if job.pk == instance.holder), None)
    step = None
    if job is not None and job.pk != report.job:
        step = _bring_forward(job, instance, report)
    if step is None:
        often = settings.DSTACKWEB_HEARTBEAT_S
        step = {"do": "wait", "again_s": min(FIRST_LOOK_S, often) if report.job is None else often}
    return step | {"alone_s": _alone_s(instance, now)}


def _bring_forward(job: Job, instance: Instance, report: Report) -> dict[str, Any] | None:
    """Have the machine start the job's runner, which decides itself what is left to do; None where it has to wait."""
    if report.error:
        # For the message of the deadline that may follow.
        Job.objects.filter(pk=job.pk, status=JobStatus.PROVISIONING, claim_nonce="").update(message=report.error)
    if len(instance.gpus) < instance.gpu_count:
        _end_without_gpus(job, instance)
        return {"do": "off"}
    if not job.claim_nonce and instance.interrupted_at is not None:
        return None
    if job.claim_nonce and job.silent_s > attempts.RUNNER_GONE_S and not report.left:
        attempts.ended(
            job.pk, Reason.INSTANCE_UNREACHABLE, message="its runner and what it knew are gone from the machine"
        )
        return None
    if not job.claim_nonce and job.gpus != instance.gpus:
        Job.objects.filter(pk=job.pk, status=JobStatus.PROVISIONING, claim_nonce="").update(gpus=instance.gpus)
    orders = {
        "api": settings.DSTACKWEB_API_URL,
        "job": str(job.pk),
        "token": job_token(job.pk),
        "insecure": settings.DSTACKWEB_INSECURE_HTTP,
        "run_uid": str(job.run.uid),
        "node": job.node,
    }
    return {"do": "run", "job": str(job.pk), "orders": orders}


def _end_without_gpus(job: Job, instance: Instance) -> None:
    """What was paid for can't be used: the job fails, and nobody gets the machine after it."""
    message = (
        f"{instance.instance_type} shows {len(instance.gpus)} of its {instance.gpu_count} GPUs to nvidia-smi: its "
        "image needs NVIDIA's driver"
    )
    with transaction.atomic():
        attempts.ended(job.pk, Reason.EXECUTOR_ERROR, message=message)
        Instance.objects.filter(pk=instance.pk, status=InstanceStatus.RUNNING).update(
            status=InstanceStatus.STOPPING, status_s=0, why="no_gpus", error=message
        )


def _alone_s(instance: Instance, now: dt.datetime) -> float:
    """How long the machine may go without an answer: as long as it is kept idle, or nobody counts it as lost."""
    kept_s = (instance.idle_until - now).total_seconds() if instance.idle_until else 0.0
    return max(kept_s, settings.DSTACKWEB_LOST_AFTER_S) + ALONE_MARGIN_S
