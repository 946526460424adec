"""Starts the instance of a job: its row is written first, then the cloud is called, then the answer is stored.

Safe to kill or repeat anywhere: the cloud recognizes a repeated order by the instance's id.
"""

from __future__ import annotations

import logging
import time
import uuid
from decimal import Decimal
from uuid import UUID

from django.conf import settings
from django.utils import timezone

from dstackweb.backends import registry
from dstackweb.backends.contract import InstanceEnd, InstanceOrder, LaunchFailed, LaunchFailure, SourceFailed
from dstackweb.backends.models import Instance, InstanceStatus
from dstackweb.backends.user_data import user_data
from dstackweb.lib.errors import DomainError
from dstackweb.lib.models import Lease
from dstackweb.runner.pyz import pyz
from dstackweb.runs.codes import MessageCode
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import JobStatus
from dstackweb.scheduler.cloud import agents
from dstackweb.scheduler.cloud import instances as cloud_rows
from dstackweb.scheduler.cloud.lifecycle import MAX_TRIES

log = logging.getLogger(__name__)

LEASE_S = 60.0
"""After this another process may repeat the order."""
OWN_S = 180.0
"""What the agent may take of an allocation's time for itself."""
WORK_S = 20.0
"""How long one task tries offers, far below django-q's timeout. The next tick continues."""


def start_instance(job_id: UUID) -> None:
    """Start a job's instance, going to the next offer after each refusal until none is left."""
    began = time.monotonic()
    for _ in range(MAX_TRIES + 1):
        if not _try_offer(job_id) or time.monotonic() - began > WORK_S:
            return


def _try_offer(job_id: UUID) -> bool:
    """Try one offer; returns whether to try the next at once."""
    instance = _requested_instance(job_id)
    if instance is None:
        return False
    name, holder = f"launch:{instance.pk}", uuid.uuid4().hex
    if not Lease.take(name, holder, LEASE_S, timezone.now()):
        return False
    try:
        return _launch(instance)
    finally:
        Lease.release(name, holder)


def _requested_instance(job_id: UUID) -> Instance | None:
    """The requested instance that a job still waits for; None when there is nothing to order."""
    job = Job.objects.filter(
        cloud_rows.on_cloud_backends(), pk=job_id, status=JobStatus.PROVISIONING, claim_nonce=""
    ).first()
    if job is None or job.instance_id is None:
        return None
    asked = Instance.objects.select_related("backend", "project")
    return asked.filter(pk=job.instance_id, holder=job.pk, status=InstanceStatus.REQUESTED).first()


def _launch(instance: Instance) -> bool:
    """Call the cloud; returns whether the job has another offer now."""
    if not instance.backend.enabled:
        # The order may have been sent, and its answer lost.
        asked = instance.join_digest != ""
        why = InstanceEnd.DISABLED if instance.backend.deleted_at is None else InstanceEnd.DELETED
        cloud_rows.end_instance(instance, InstanceStatus.STOPPING if asked else InstanceStatus.GONE, why)
        return True
    token, digest = agents.join_token(instance.pk)
    is_new = bool(Instance.objects.filter(pk=instance.pk, join_digest="").update(join_digest=digest))
    try:
        machine = registry.cloud(instance.backend).launch(_order(instance, token, is_new=is_new))
    except LaunchFailed as refused:
        log.info("%s in %s: %s", instance.instance_type, instance.region, refused)
        if refused.code in (LaunchFailure.QUOTA, LaunchFailure.NO_CAPACITY):
            cloud_rows.refresh_capacity(instance.backend, instance.region)
        cloud_rows.end_instance(instance, InstanceStatus.GONE, refused.code, refused.text)
        return True
    except (SourceFailed, DomainError, registry.UnknownKind) as error:
        log.warning("%s: cannot start an instance, will retry: %s", instance.backend, error)
        _store_error(instance, error)
        return False
    cloud_rows.record_found(instance, machine)
    cloud_rows.refresh_capacity(instance.backend, instance.region)
    return False


def _order(instance: Instance, join_token: str, *, is_new: bool) -> InstanceOrder:
    run = Run.objects.filter(jobs__instance=instance).first()
    return InstanceOrder(
        instance=str(instance.pk),
        deployment=cloud_rows.deployment(),
        region=instance.region,
        instance_type=instance.instance_type,
        spot=instance.is_spot,
        user_data=user_data(
            api_url=settings.DSTACKWEB_API_URL,
            instance=str(instance.pk),
            join_token=join_token,
            pyz_sha256=pyz()[1],
            insecure=settings.DSTACKWEB_INSECURE_HTTP,
            allocation=not registry.is_machine(instance.backend),
        ),
        zones=tuple(sorted(instance.zone_prices, key=lambda zone: (Decimal(instance.zone_prices[zone]), zone))),
        project=instance.project.name,
        run=run.name if run else "",
        cpus=instance.cpus,
        memory_mib=instance.memory_mib,
        gpu_name=instance.gpu_name,
        gpu_count=instance.gpu_count,
        is_new=is_new,
        duration_s=_duration_s(run),
    )


def _duration_s(run: Run | None) -> int | None:
    """How long an allocation for the run is needed: its limit, the time to stop, and some to start and report."""
    limit = run.spec.get("max_duration_s") if run else None
    return None if run is None or limit is None else int(limit + run.spec.get("stop_duration_s", 0) + OWN_S)


def _store_error(instance: Instance, error: Exception) -> None:
    """Show why the cloud could not be called on the instance and the job; the order is retried."""
    failed = {"code": error.code, **error.data} if isinstance(error, SourceFailed) else {}
    said = "" if failed else str(error)
    Instance.objects.filter(pk=instance.pk, status=InstanceStatus.REQUESTED).update(error=said, error_detail=failed)
    detail = {"code": MessageCode.SOURCE_FAILED, "kind": instance.backend.kind, "error": failed} if failed else {}
    waiting = Job.objects.filter(instance=instance, status=JobStatus.PROVISIONING, claim_nonce="")
    waiting.update(message=said, detail=detail)
