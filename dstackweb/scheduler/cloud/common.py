"""What all work on clouds' machines shares: which deployment they are of, and rows as decisions see them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from uuid import UUID

from django.conf import settings
from django.db.models import Q, QuerySet
from django.utils import timezone
from django.utils.crypto import salted_hmac

from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.backends.registry import cloud_kinds
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE, JobStatus
from dstackweb.scheduler.cloud.lifecycle import Row, Rules, Served

LEFT = dt.timedelta(days=1)
"""For so long machines are looked for where none should be any more: at a deleted backend, in a region given up."""


def deployment() -> str:
    """What tags this deployment's machines: of its secret key, so that no other's are ever touched."""
    return salted_hmac("dstackweb.deployment", "id").hexdigest()[:20]


def rules() -> Rules:
    """The settings that decide."""
    return Rules(
        start_s=settings.DSTACKWEB_CLOUD_START_DEADLINE_S,
        claim_s=settings.DSTACKWEB_START_DEADLINE_S,
        lost_after_s=settings.DSTACKWEB_LOST_AFTER_S,
    )


def row_of(instance: Instance) -> Row:
    """A row, read with its backend, as decisions see it."""
    return Row(
        status=InstanceStatus(instance.status),
        cloud_id=instance.cloud_id,
        ready=instance.ready_at is not None,
        status_s=instance.status_s,
        silent_s=instance.silent_s,
        idle_until=instance.idle_until,
        interrupted_at=instance.interrupted_at,
        wanted=instance.backend.enabled and instance.backend.deleted_at is None,
    )


def served_by(instances: Iterable[Instance]) -> dict[UUID, Job]:
    """The job of each instance that has one, by the instance."""
    holders = {instance.holder: instance.pk for instance in instances if instance.holder is not None}
    jobs = Job.objects.select_related("run", "backend").filter(pk__in=holders)
    return {holders[job.pk]: job for job in jobs}


def view_of(job: Job | None) -> Served | None:
    """An active job as decisions see it; None for one that has ended."""
    if job is None or job.status not in JOB_ACTIVE:
        return None
    return Served(
        status=JobStatus(job.status),
        claimed=bool(job.claim_nonce),
        silent_s=job.silent_s,
        status_s=job.status_s,
        stop_grace_s=job.stop_grace_s or 0,
        spare_s=job.run.spec.get("stop_duration_s") or 0,
    )


def on_clouds() -> Q:
    """Jobs that clouds' machines are for."""
    return Q(host=None, backend__kind__in=cloud_kinds())


def has_work() -> bool:
    """Whether there is a job on its way to a machine, or a machine."""
    there = Instance.objects.exclude(status=InstanceStatus.GONE)
    return there.exists() or Job.objects.filter(on_clouds(), status__in=JOB_ACTIVE).exists()


def has_clouds() -> bool:
    """Whether a backend is, or was lately, set up that starts machines."""
    return clouds(timezone.now()).exists()


def clouds(now: dt.datetime) -> QuerySet[Backend]:
    """Backends at whose clouds machines may be, those among them that were deleted lately."""
    present = Q(deleted_at=None) | Q(deleted_at__gt=now - LEFT)
    return Backend.with_deleted.filter(present, kind__in=cloud_kinds())


def regions_left(backend: Backend, now: dt.datetime) -> set[str]:
    """Where a backend has had machines lately, whatever it is configured for now."""
    lately = Instance.objects.filter(backend=backend, ended_at__gt=now - LEFT)
    return set(lately.order_by().values_list("region", flat=True).distinct())
