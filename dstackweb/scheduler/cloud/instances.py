"""Rows of cloud instances: which there are, new ones for jobs, updates from the cloud's answers, and their ends. Any
function may be repeated, doubled or killed: each write is guarded by what was read."""

from __future__ import annotations

import contextlib
import datetime as dt
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone
from django.utils.crypto import salted_hmac

from dstackweb.backends import registry
from dstackweb.backends.contract import CloudInstance, InstanceEnd, Offer, SourceKey
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.backends.registry import accounting_kinds, cloud_kinds
from dstackweb.lib.models import Lease, Sequence, watch_time
from dstackweb.offers import sources
from dstackweb.offers.source_rows import READINGS
from dstackweb.runs import wakeups
from dstackweb.runs.attempts import end_job, return_job, undo_placement
from dstackweb.runs.codes import MessageCode, RunEventKind
from dstackweb.runs.models import Job, Run, RunEvent
from dstackweb.runs.states import JOB_ACTIVE, JobStatus, Reason
from dstackweb.runs.transitions import lock_run, record
from dstackweb.scheduler.cloud.backend_offers import INSTANCE_FIELDS, JOB_FIELDS, OfferReader, project_budget
from dstackweb.scheduler.cloud.lifecycle import JobFollowUp, follow_up, job_end_reason, next_offer
from dstackweb.scheduler.placement import offers
from dstackweb.spec.effective import EffectiveSpec

SEARCHED_FOR = dt.timedelta(days=1)
"""How long to search deleted backends and regions no longer used for left instances."""
USAGE_ASKED_FOR = dt.timedelta(minutes=10)
"""How long after an instance's end to ask what it used: accounting lags, and may be away. Then it stays unknown."""
ASK_EVERY_S = 30.0
ASKED_AT_ONCE = 200
"""Most instances in one question: they are arguments of a command, or part of a URL."""


class _InstanceChanged(Exception):
    """The instance's row is no longer as it was read."""


def deployment() -> str:
    """The tag of this deployment's instances, derived from its secret key: no other deployment's are ever touched."""
    return salted_hmac("dstackweb.deployment", "id").hexdigest()[:20]


def jobs_by_instance(instances: Iterable[Instance]) -> dict[UUID, Job]:
    """The job of each instance that has one, by instance id."""
    holders = {instance.holder: instance.pk for instance in instances if instance.holder is not None}
    jobs = Job.objects.timed().select_related("run", "backend").filter(pk__in=holders)
    return {holders[job.pk]: job for job in jobs}


def on_cloud_backends() -> Q:
    """Condition: jobs placed on cloud backends."""
    return Q(host=None, backend__kind__in=cloud_kinds())


def without_usage(now: dt.datetime) -> QuerySet[Instance]:
    """Instances that ended lately, and of which their engine's accounting has not said yet what they used."""
    ended = Instance.objects.filter(status=InstanceStatus.GONE, ended_at__gt=now - USAGE_ASKED_FOR, usage__isnull=True)
    return ended.filter(backend__kind__in=accounting_kinds()).exclude(cloud_id="")


def awaits_usage(run: Run, now: dt.datetime) -> bool:
    """Whether accounting may say yet what a run has used that has just ended."""
    if run.ended_at is None or run.ended_at < now - 2 * USAGE_ASKED_FOR:
        return False
    mine = Q(jobs__run=run, usage__isnull=True, backend__kind__in=accounting_kinds())
    ending = Instance.objects.filter(mine).exclude(status=InstanceStatus.GONE).exclude(cloud_id="")
    return without_usage(now).filter(mine).exists() or ending.exists()


def accounting_due() -> Iterator[tuple[Backend, str]]:
    """Backends and regions whose accounting this process may ask now, by a lease that just expires."""
    now = timezone.now()
    rows = without_usage(now).select_related("backend").only("backend", "region").order_by("ended_at")
    for backend, region in dict.fromkeys((row.backend, row.region) for row in rows):
        if Lease.take(f"usage:{backend.pk}:{region}", uuid.uuid4().hex, ASK_EVERY_S, now):
            yield backend, region


def ask_accounting(backend: Backend, region: str) -> None:
    """Store what is known of a region's ended instances. Raises SourceFailed, having changed nothing."""
    rows = without_usage(timezone.now()).filter(backend=backend, region=region).order_by("ended_at")
    cloud_ids = dict(rows.values_list("cloud_id", "pk")[:ASKED_AT_ONCE])
    if not cloud_ids:
        return
    found = registry.accounting(backend).accounting(region, list(cloud_ids))
    mine = Instance.objects.filter(usage__isnull=True)
    if found is None:
        mine.filter(pk__in=cloud_ids.values()).update(usage={})
        return
    for cloud_id, used in found.items():
        if cloud_id in cloud_ids:
            known = {name: value for name, value in asdict(used).items() if value is not None}
            mine.filter(pk=cloud_ids[cloud_id]).update(usage=known)


def has_work() -> bool:
    """Whether any instance exists, any active job needs one, or accounting is to be asked about one."""
    there = Instance.objects.exclude(status=InstanceStatus.GONE)
    active = Job.objects.filter(on_cloud_backends(), status__in=JOB_ACTIVE)
    return there.exists() or active.exists() or without_usage(timezone.now()).exists()


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


def assign_offer(job: Job, offer: Offer, backend: Backend) -> None:
    """Write the offer into the job, unsaved. The job gets the whole instance."""
    job.backend, job.is_spot = backend, offer.spot
    for name in JOB_FIELDS:
        setattr(job, name, getattr(offer, name))


def new_instance(job: Job, offer: Offer) -> Instance | None:
    """The job's new instance, unsaved; None for an idle one, or for a backend without instances."""
    if "instance" in offer.detail or job.backend.kind not in cloud_kinds():
        return None
    job.instance = Instance(
        pk=uuid.uuid4(),
        backend=job.backend,
        project_id=job.run.project_id,
        holder=job.pk,
        is_spot=offer.spot,
        zone_prices=_zone_prices(offer, job.run.spec.get("max_price")),
        **{name: getattr(offer, name) for name in INSTANCE_FIELDS},
    )
    return job.instance


def _zone_prices(offer: Offer, max_price: float | None) -> dict[str, str]:
    """The zones within the run's `max_price`, with their prices, where an offer's price depends on the zone."""
    prices: dict[str, str] = offer.detail.get("zone_prices", {}) if offer.spot else {}
    return {
        zone: price for zone, price in prices.items() if max_price is None or Decimal(price) <= Decimal(str(max_price))
    }


def take_idle(instance_id: UUID, job_id: UUID, project_id: int, now: dt.datetime) -> bool:
    """Give an idle instance to a job of its project; False when it is no longer idle. Call inside a transaction."""
    idle = Instance.objects.filter(
        pk=instance_id,
        project=project_id,
        status=InstanceStatus.RUNNING,
        holder=None,
        interrupted_at=None,
        idle_until__gt=now,
    )
    return bool(idle.update(holder=job_id, idle_since=None, idle_until=None, status_s=0))


def end_idle(instance_id: UUID) -> bool:
    """End an idle instance early. Returns False, changing nothing, when it has a job or is ending already."""
    idle = Instance.objects.filter(pk=instance_id, status=InstanceStatus.RUNNING, holder=None)
    return bool(idle.update(status=InstanceStatus.STOPPING, why=InstanceEnd.STOPPED, idle_until=None, status_s=0))


def record_found(instance: Instance, machine: CloudInstance) -> None:
    """Store what the cloud reports about an instance, which is set to end if its row was given up meanwhile."""
    now = timezone.now()
    rows = Instance.objects.filter(pk=instance.pk)
    if not instance.cloud_id:
        launched = {
            "cloud_id": machine.cloud_id,
            "launched_at": machine.launched_at or now,
            "answered_at_reading": Sequence.current(READINGS),
        }
        rows.filter(cloud_id="").exclude(status=InstanceStatus.GONE).update(**launched)
        rows.filter(cloud_id="", status=InstanceStatus.GONE).update(
            status=InstanceStatus.STOPPING, status_s=0, ended_at=None, **launched
        )
    if instance.status == InstanceStatus.REQUESTED:
        with transaction.atomic():
            _record_started(instance, machine)
    for name in ("zone", "address"):
        if getattr(machine, name) and not getattr(instance, name):
            rows.filter(**{name: "", "cloud_id": machine.cloud_id}).update(**{name: getattr(machine, name)})


def record_wait(instance: Instance, machine: CloudInstance) -> None:
    """Show on the job of an instance that is not up yet what its engine waits for, or no longer."""
    if instance.holder is None or instance.status not in (InstanceStatus.REQUESTED, InstanceStatus.STARTING):
        return
    jobs = Job.objects.filter(pk=instance.holder, instance=instance.pk, status=JobStatus.PROVISIONING, claim_nonce="")
    shown = jobs.values_list("detail", flat=True).first()
    if shown is None or not (machine.waits or shown.get("code") == MessageCode.ENGINE_WAITS):
        return
    kind, waits_for = instance.backend.kind, machine.waits
    detail = {"code": MessageCode.ENGINE_WAITS, "kind": kind, "waits_for": waits_for} if waits_for else {}
    if detail != shown:
        jobs.filter(instance__status__in=(InstanceStatus.REQUESTED, InstanceStatus.STARTING)).update(detail=detail)


def _record_started(instance: Instance, machine: CloudInstance) -> None:
    """Move the row to STARTING once, with the price of its zone, and record that on the run."""
    job = Job.objects.filter(pk=instance.holder).first() if instance.holder else None
    run = lock_run(job.run_id) if job is not None else None
    instance.price = Decimal(instance.zone_prices.get(machine.zone, instance.price))
    landed = Instance.objects.filter(pk=instance.pk, status=InstanceStatus.REQUESTED, cloud_id=machine.cloud_id).update(
        status=InstanceStatus.STARTING, status_s=0, error="", error_detail={}, price=instance.price
    )
    if landed and job is not None and run is not None:
        Job.objects.filter(pk=job.pk).update(price=instance.price)
        data = {**_offer_data(instance), "cloud_id": machine.cloud_id}
        record(run, RunEventKind.MACHINE_STARTED, data, node=job.node, attempt=job.attempt)


def _offer_data(instance: Instance) -> dict[str, Any]:
    return {
        "backend": instance.backend.name,
        "region": instance.region,
        "instance_type": instance.instance_type,
        "spot": instance.is_spot,
        "price": str(instance.price),
    }


def end_instance(instance: Instance, status: InstanceStatus, why: str, text: str = "") -> None:
    """Set an instance to end (STOPPING) or record that it has ended (GONE), and do what follows for its job;
    nothing, when its row is no longer as it was read."""
    job = jobs_by_instance([instance]).get(instance.pk)
    becomes = follow_up(instance, job, why)
    fields: dict[str, Any] = {"why": instance.why or why, "error": text or instance.error, "holder": None}
    with contextlib.suppress(_InstanceChanged):
        if job is None or becomes is JobFollowUp.NOTHING:
            _write(instance, status, fields)
        elif becomes is JobFollowUp.END and status == InstanceStatus.STOPPING:
            # Its processes may run until the cloud confirms the end.
            _write(instance, status, fields | {"holder": instance.holder})
        elif becomes is JobFollowUp.END:
            end_job(job.pk, job_end_reason(why), message=text)
            _write(instance, status, fields)
        else:
            offer = _other_offer(job) if becomes is JobFollowUp.OTHER_OFFER else None
            with transaction.atomic():
                run, fresh = _lock_waiting(job, instance)
                data = {**_offer_data(instance), "code": why, "text": text}
                record(run, RunEventKind.OFFER_FAILED, data, node=fresh.node, attempt=fresh.attempt)
                # Before the new row: the old one still refers to the job.
                _write(instance, status, fields)
                if offer is not None:
                    _assign_other(fresh, offer)
                elif becomes is JobFollowUp.TAKE_BACK:
                    wakeups.request_job_checks(Job.objects.filter(run=run, attempt=run.attempt, host=None))
                    # Another node of it may have a runner, which waits for all nodes: that attempt ends.
                    if not undo_placement(run, job_reason=why, node=fresh.node):
                        return_job(fresh.pk, message=text)
                elif becomes is JobFollowUp.WAIT_AGAIN or not return_to_queue(run):
                    end_job(fresh.pk, Reason.OUT_OF_CAPACITY, message=text)


def change_offer(instance: Instance) -> None:
    """Give the job of an instance that was never ordered another offer, because its own was refused to others lately;
    without one its run waits in its queue. Nothing, when the row is no longer as it was read."""
    job = jobs_by_instance([instance]).get(instance.pk)
    if job is None:
        return
    offer = _other_offer(job)
    with contextlib.suppress(_InstanceChanged), transaction.atomic():
        run, fresh = _lock_waiting(job, instance)
        _write(instance, InstanceStatus.GONE, {"holder": None})
        if offer is not None:
            _assign_other(fresh, offer)
        elif not return_to_queue(run):
            end_job(fresh.pk, Reason.OUT_OF_CAPACITY)
            return
        Instance.objects.filter(pk=instance.pk, join_digest="", cloud_id="").delete()


def _write(instance: Instance, status: InstanceStatus, fields: dict[str, Any]) -> None:
    """Raises _InstanceChanged."""
    same = Instance.objects.filter(
        pk=instance.pk,
        status=instance.status,
        cloud_id=instance.cloud_id,
        **({"holder": instance.holder} if instance.holder else {"holder__isnull": True}),
        ready_at__isnull=instance.ready_at is None,
    )
    now = timezone.now()
    more = {"ended_at": now, "idle_until": None} if status == InstanceStatus.GONE else {"idle_until": None}
    if not same.update(status=status, status_s=0, **fields, **more):
        raise _InstanceChanged


def _lock_waiting(job: Job, instance: Instance) -> tuple[Run, Job]:
    """Lock the run of a job that was never executed. Raises _InstanceChanged if it no longer waits for the instance."""
    run = lock_run(job.run_id)
    fresh = Job.objects.select_related("backend", "run").filter(pk=job.pk).first()
    if fresh is None or fresh.status != JobStatus.PROVISIONING or fresh.claim_nonce:
        raise _InstanceChanged
    if fresh.instance_id != instance.pk:
        raise _InstanceChanged
    return run, fresh


def _assign_other(job: Job, offer: Offer) -> None:
    assign_offer(job, offer, Backend.objects.get(name=offer.backend))
    instance = new_instance(job, offer)
    if instance is not None:
        instance.save(force_insert=True)
    Job.objects.filter(pk=job.pk).update(
        instance=instance,
        status_at_s=watch_time(),
        message="",
        detail={},
        **{name: getattr(job, name) for name in ("backend", "is_spot", *JOB_FIELDS)},
    )


def return_to_queue(run: Run) -> bool:
    """Return a run that no offer is left for to its place in the queue, as if it had not been placed. False if one of
    its nodes may have a machine: each try then costs money. Call after `lock_run`."""
    rows = list(Instance.objects.filter(jobs__run=run, jobs__attempt=run.attempt))
    if any(row.cloud_id or (row.join_digest and row.status != InstanceStatus.GONE) for row in rows):
        return False
    if not undo_placement(run):
        return False
    Instance.objects.filter(pk__in=[row.pk for row in rows if not row.join_digest]).delete()
    return True


def _other_offer(job: Job) -> Offer | None:
    """The next cheapest acceptable offer within the budget; the nodes of a run stay in one region."""
    run = Run.objects.select_related("project").get(pk=job.run_id)
    spec = EffectiveSpec.model_validate(run.spec).of_project(run.project.name, run.project.least_isolation)
    budget = project_budget(run.project_id, timezone.now())
    if budget is not None and budget.is_spent:
        return None
    place = (job.backend.name, job.region) if spec.nodes > 1 else None
    refused = RunEvent.objects.filter(
        run=job.run_id, attempt=job.attempt, kind=RunEventKind.OFFER_FAILED, at__gte=job.placed_at
    )
    tried: set[offers.OfferKey] = {
        (data["backend"], data["region"], data["instance_type"], data["spot"], "")
        for data in refused.values_list("data", flat=True)
    }
    tried.add((job.backend.name, job.region, job.instance_type, job.is_spot, ""))
    return next_offer(spec, OfferReader(shares_trials=True).offers_for(spec), tried, place)


def note_full(backend: Backend) -> None:
    """Order nothing more of a cluster that refused for lack of room, until a reading that began after that."""
    code = sources.driver_of(backend)
    if code is not None and registry.is_counted(code):
        sources.refute(backend, code.key)


def read_soon(backend: Backend) -> None:
    """Read a cluster in a second or so, when an end has given its room to the next run."""
    code = sources.driver_of(backend)
    if code is not None and registry.is_counted(code):
        sources.expect_change(backend, code.key)


def refresh_capacity(backend: Backend, region: str) -> None:
    """Request what changes with each instance, such as quotas, after a launch, a refusal or an end in a region."""
    code = registry.driver(backend)
    for source, spec in code.sources.items() if sources.is_sourced(code) else ():
        if spec.moves:
            sources.invalidate(backend, SourceKey(source, region))
            sources.invalidate(backend, SourceKey(source, ""))
