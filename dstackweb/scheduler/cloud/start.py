"""Starting a job's machine at a cloud: the row first, then the cloud, then what it answered (docs/design.md#execution).

Killed anywhere, or done twice, it comes to the same: the cloud knows an order again by its instance.
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
from dstackweb.backends.contract import LaunchFailed, MachineOrder, SourceFailed
from dstackweb.backends.models import Instance, InstanceStatus
from dstackweb.backends.user_data import user_data
from dstackweb.lib import leases
from dstackweb.lib.errors import DomainError
from dstackweb.runner.pyz import pyz
from dstackweb.runs.models import Job
from dstackweb.runs.states import JobStatus
from dstackweb.scheduler.cloud import agents
from dstackweb.scheduler.cloud import common as cloud
from dstackweb.scheduler.cloud import instance_updates as cloud_rows
from dstackweb.scheduler.cloud.lifecycle import MOST_TRIES
from dstackweb.wording import offers as offer_words

log = logging.getLogger(__name__)

LEASE_S = 60.0
"""How long one process may ask for a machine, before another asks for the same one."""
WORK_S = 20.0
"""How long one task goes from offer to offer; far below django-q's timeout. The next tick goes on."""


def start(job_id: UUID) -> None:
    """Have a job's machine started: at the next offer where the cloud refuses one, until there is none left."""
    began = time.monotonic()
    for _ in range(MOST_TRIES + 1):
        if not _try(job_id) or time.monotonic() - began > WORK_S:
            return


def _try(job_id: UUID) -> bool:
    """One try at one offer; whether another may follow at once."""
    instance = _ordered(job_id)
    if instance is None:
        return False
    name, holder = f"launch:{instance.pk}", uuid.uuid4().hex
    if not leases.take(name, holder, LEASE_S, timezone.now()):
        return False
    try:
        return _launch(instance)
    finally:
        leases.release(name, holder)


def _ordered(job_id: UUID) -> Instance | None:
    """The row of the machine that a job still waits for; None where nothing is to be asked."""
    job = Job.objects.filter(cloud.on_clouds(), pk=job_id, status=JobStatus.PROVISIONING, claim_nonce="").first()
    if job is None or job.instance_id is None:
        return None
    asked = Instance.objects.select_related("backend", "project")
    return asked.filter(pk=job.instance_id, holder=job.pk, status=InstanceStatus.REQUESTED).first()


def _launch(instance: Instance) -> bool:
    """Ask the cloud; whether the job has another offer now."""
    if instance.backend.deleted_at is not None:
        # It may have been asked already, and the answer lost.
        asked = instance.join_digest != ""
        cloud_rows.close(instance, InstanceStatus.STOPPING if asked else InstanceStatus.GONE, "deleted")
        return True
    token, digest = agents.join_token(instance.pk)
    Instance.objects.filter(pk=instance.pk).update(join_digest=digest)
    try:
        machine = registry.cloud(instance.backend).launch(_order(instance, token))
    except LaunchFailed as refused:
        log.info("%s in %s: %s", instance.instance_type, instance.region, refused)
        if refused.code == "quota":
            cloud_rows.quotas_changed(instance.backend, instance.region)
        cloud_rows.close(instance, InstanceStatus.GONE, refused.code, refused.text)
        return True
    except (SourceFailed, DomainError, registry.UnknownKind) as error:
        log.warning("%s can't be asked for a machine, trying again: %s", instance.backend, error)
        told = offer_words.failure({"code": error.code, **error.data}) if isinstance(error, SourceFailed) else ""
        _remember(instance, told or str(error))
        return False
    cloud_rows.land(instance, machine)
    cloud_rows.quotas_changed(instance.backend, instance.region)
    return False


def _order(instance: Instance, join_token: str) -> MachineOrder:
    run = Job.objects.filter(instance=instance).values_list("run__name", flat=True).first()
    return MachineOrder(
        instance=str(instance.pk),
        deployment=cloud.deployment(),
        region=instance.region,
        instance_type=instance.instance_type,
        spot=instance.is_spot,
        user_data=user_data(
            api_url=settings.DSTACKWEB_API_URL,
            instance=str(instance.pk),
            join_token=join_token,
            pyz_sha256=pyz()[1],
            insecure=settings.DSTACKWEB_INSECURE_HTTP,
        ),
        zones=tuple(sorted(instance.zone_prices, key=lambda zone: (Decimal(instance.zone_prices[zone]), zone))),
        project=instance.project.name,
        run=run or "",
    )


def _remember(instance: Instance, why: str) -> None:
    """Keep why the cloud could not be asked: people see it at the job, which goes on being tried."""
    Instance.objects.filter(pk=instance.pk, status=InstanceStatus.REQUESTED).update(error=why)
    Job.objects.filter(instance=instance, status=JobStatus.PROVISIONING, claim_nonce="").update(message=why)
