"""Shared by all work on cloud instances: the deployment's tag, and rows as decisions see them."""

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
from dstackweb.scheduler.cloud.lifecycle import Deadlines, InstanceJob, InstanceView

SEARCHED_FOR = dt.timedelta(days=1)
"""How long to search deleted backends and regions no longer used for left instances."""


def deployment() -> str:
    """The tag of this deployment's instances, derived from its secret key: no other deployment's are ever touched."""
    return salted_hmac("dstackweb.deployment", "id").hexdigest()[:20]


def deadlines() -> Deadlines:
    """The deadlines from the settings."""
    return Deadlines(
        start_s=settings.DSTACKWEB_CLOUD_START_DEADLINE_S,
        claim_s=settings.DSTACKWEB_START_DEADLINE_S,
        lost_after_s=settings.DSTACKWEB_LOST_AFTER_S,
    )


def instance_view(instance: Instance) -> InstanceView:
    """A row (read with its backend) as decisions see it."""
    return InstanceView(
        status=InstanceStatus(instance.status),
        cloud_id=instance.cloud_id,
        ready=instance.ready_at is not None,
        status_s=instance.status_s,
        silent_s=instance.silent_s,
        idle_until=instance.idle_until,
        interrupted_at=instance.interrupted_at,
        wanted=instance.backend.enabled and instance.backend.deleted_at is None,
    )


def jobs_by_instance(instances: Iterable[Instance]) -> dict[UUID, Job]:
    """The job of each instance that has one, by instance id."""
    holders = {instance.holder: instance.pk for instance in instances if instance.holder is not None}
    jobs = Job.objects.select_related("run", "backend").filter(pk__in=holders)
    return {holders[job.pk]: job for job in jobs}


def instance_job(job: Job | None) -> InstanceJob | None:
    """An active job as decisions see it; None for one that has ended."""
    if job is None or job.status not in JOB_ACTIVE:
        return None
    return InstanceJob(
        status=JobStatus(job.status),
        claimed=bool(job.claim_nonce),
        silent_s=job.silent_s,
        status_s=job.status_s,
        stop_grace_s=job.stop_grace_s or 0,
        spare_s=job.run.spec.get("stop_duration_s") or 0,
    )


def on_cloud_backends() -> Q:
    """Condition: jobs placed on cloud backends."""
    return Q(host=None, backend__kind__in=cloud_kinds())


def has_work() -> bool:
    """Whether any instance exists, or any active job needs one."""
    there = Instance.objects.exclude(status=InstanceStatus.GONE)
    return there.exists() or Job.objects.filter(on_cloud_backends(), status__in=JOB_ACTIVE).exists()


def has_cloud_backends() -> bool:
    """Whether a cloud backend is set up, or was until recently."""
    return cloud_backends(timezone.now()).exists()


def cloud_backends(now: dt.datetime) -> QuerySet[Backend]:
    """Cloud backends that may have instances, recently deleted ones included."""
    present = Q(deleted_at=None) | Q(deleted_at__gt=now - SEARCHED_FOR)
    return Backend.with_deleted.filter(present, kind__in=cloud_kinds())


def recent_regions(backend: Backend, now: dt.datetime) -> set[str]:
    """Regions where a backend had instances recently, whatever its configuration says now."""
    lately = Instance.objects.filter(backend=backend, ended_at__gt=now - SEARCHED_FOR)
    return set(lately.order_by().values_list("region", flat=True).distinct())
