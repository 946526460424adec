"""A machine's row follows the cloud: what it told is written, it ends, and its job goes on, waits again or ends.

Each function may be repeated, doubled or killed: all is guarded by what was read.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from django.db import transaction
from django.utils import timezone

from dstackweb.backends.contract import Machine, Offer, SourceKey
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.offers import sources
from dstackweb.runs.attempts import ended
from dstackweb.runs.models import Job, Run, RunEvent
from dstackweb.runs.states import JobStatus, Reason
from dstackweb.runs.transitions import lock_run, record
from dstackweb.scheduler.cloud import common as cloud
from dstackweb.scheduler.cloud.backend_offers import Market, project_budget
from dstackweb.scheduler.cloud.lifecycle import After, after, end_reason, next_offer
from dstackweb.scheduler.cloud.provisioning import machine_for, on_offer
from dstackweb.scheduler.placement import offers
from dstackweb.spec.effective import EffectiveSpec

QUOTAS = "quotas"


class _MovedOn(Exception):
    """The machine is no longer as it was read."""


def land(instance: Instance, machine: Machine) -> None:
    """Write what the cloud tells of a machine that is there.

    Where its row has been given up meanwhile, the machine has to end.
    """
    now = timezone.now()
    mine = Instance.objects.filter(pk=instance.pk)
    if not instance.cloud_id:
        known = {"cloud_id": machine.cloud_id, "launched_at": machine.launched_at or now}
        mine.filter(cloud_id="").exclude(status=InstanceStatus.GONE).update(**known)
        mine.filter(cloud_id="", status=InstanceStatus.GONE).update(
            status=InstanceStatus.STOPPING, status_s=0, ended_at=None, **known
        )
    if instance.status == InstanceStatus.REQUESTED:
        with transaction.atomic():
            _start(instance, machine)
    for name in ("zone", "address"):
        if getattr(machine, name) and not getattr(instance, name):
            mine.filter(**{name: "", "cloud_id": machine.cloud_id}).update(**{name: getattr(machine, name)})


def _start(instance: Instance, machine: Machine) -> None:
    """Its row goes on, once, at the price of the zone that it got; and its run is told so."""
    job = Job.objects.filter(pk=instance.holder).first() if instance.holder else None
    run = lock_run(job.run_id) if job is not None else None
    instance.price = Decimal(instance.zone_prices.get(machine.zone, instance.price))
    landed = Instance.objects.filter(pk=instance.pk, status=InstanceStatus.REQUESTED, cloud_id=machine.cloud_id).update(
        status=InstanceStatus.STARTING, status_s=0, error="", price=instance.price
    )
    if landed and job is not None and run is not None:
        Job.objects.filter(pk=job.pk).update(price=instance.price)
        data = {**_offer_of(instance), "cloud_id": machine.cloud_id}
        record(run, "machine_started", data, node=job.node, attempt=job.attempt)


def _offer_of(instance: Instance) -> dict[str, Any]:
    """What a machine was had for, as events have it."""
    return {
        "backend": instance.backend.name,
        "region": instance.region,
        "instance_type": instance.instance_type,
        "spot": instance.is_spot,
        "price": str(instance.price),
    }


def close(instance: Instance, status: InstanceStatus, why: str, text: str = "") -> bool:
    """Have a machine end (STOPPING), or note that it has (GONE), and do what follows for its job.

    Returns False, having changed nothing of the machine, when it is no longer as it was read.
    """
    job = cloud.served_by([instance]).get(instance.pk)
    served = cloud.view_of(job)
    becomes = after(cloud.row_of(instance), served, why)
    fields: dict[str, Any] = {"why": instance.why or why, "error": text or instance.error, "holder": None}
    try:
        if job is None or becomes is After.NOTHING:
            return _write(instance, status, fields)
        if becomes is After.END and status == InstanceStatus.STOPPING:
            # Its processes may live until the cloud confirms the end.
            return _write(instance, status, fields | {"holder": instance.holder})
        if becomes is After.END:
            ended(job.pk, end_reason(why), message=text)
            return _write(instance, status, fields)
        offer = _other_offer(job) if becomes is After.OTHER_OFFER else None
        with transaction.atomic():
            _go_on(job, instance, offer, why, text, lambda: _write(instance, status, fields))
    except _MovedOn:
        return False
    return True


def _write(instance: Instance, status: InstanceStatus, fields: dict[str, Any]) -> bool:
    same = Instance.objects.filter(
        pk=instance.pk,
        status=instance.status,
        cloud_id=instance.cloud_id,
        **({"holder": instance.holder} if instance.holder else {"holder__isnull": True}),
        ready_at__isnull=instance.ready_at is None,
    )
    now = timezone.now()
    more = {"ended_at": now, "idle_until": None} if status == InstanceStatus.GONE else {"idle_until": None}
    return bool(same.update(status=status, status_s=0, **fields, **more))


def _go_on(job: Job, instance: Instance, offer: Offer | None, why: str, text: str, give_up: Callable[[], bool]) -> None:
    """Give a job that nothing was executed of another offer; without one its run waits again."""
    run = lock_run(job.run_id)
    fresh = Job.objects.select_related("backend").get(pk=job.pk)
    if fresh.status != JobStatus.PROVISIONING or fresh.claim_nonce or fresh.instance_id != instance.pk:
        raise _MovedOn
    data = {**_offer_of(instance), "code": why, "text": text}
    record(run, "offer_failed", data, node=fresh.node, attempt=fresh.attempt)
    if offer is None:
        ended(fresh.pk, Reason.OUT_OF_CAPACITY, message=text)
        if not give_up():
            raise _MovedOn
        return
    on_offer(fresh, offer, Backend.objects.get(name=offer.backend))
    # The machine that is given up goes first: it still names the job.
    if not give_up():
        raise _MovedOn
    made = machine_for(fresh, offer)
    if made is not None:
        made.save(force_insert=True)
    Job.objects.filter(pk=fresh.pk).update(
        instance=made,
        status_s=0,
        message="",
        **{name: getattr(fresh, name) for name in _PLACE},
    )


_PLACE = ("backend", "region", "instance_type", "price", "is_spot", "cpus", "memory_mib")


def _other_offer(job: Job) -> Offer | None:
    """The next cheapest that the run may take, within the project's budget; several nodes stay in their region."""
    run = Run.objects.select_related("project").get(pk=job.run_id)
    spec = EffectiveSpec.model_validate(run.spec)
    budget = project_budget(run.project_id, timezone.now())
    if budget is not None and budget.is_spent:
        return None
    place = (job.backend.name, job.region) if spec.nodes > 1 else None
    tried = _tried(job) | {(job.backend.name, job.region, job.instance_type, job.is_spot, "")}
    return next_offer(spec, Market().ask(spec), tried, place)


def _tried(job: Job) -> set[offers.Key]:
    """What this attempt was refused."""
    events = RunEvent.objects.filter(run=job.run_id, attempt=job.attempt, kind="offer_failed")
    return {
        (data["backend"], data["region"], data["instance_type"], data["spot"], "")
        for data in events.values_list("data", flat=True)
    }


def quotas_changed(backend: Backend, region: str) -> None:
    """Have the quotas of a region asked for anew: a machine was started there, or refused for want of quota."""
    sources.want_anew(backend, SourceKey(QUOTAS, region))
