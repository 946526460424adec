"""Launches the instances that placed runs wait for: one call of a cloud at a time, each for whoever is next then.

An instance's row is written before the cloud is called, which recognizes a repeated order by the instance's id. Several
workers may launch at once: a lease for each instance and the clouds' shared rate limits keep them apart.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal
from uuid import UUID

from django.conf import settings
from django.db.models import Count, F
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from dstackweb.backends import registry
from dstackweb.backends.contract import (
    InstanceEnd,
    InstanceOrder,
    LaunchFailed,
    LaunchFailure,
    SourceFailed,
    SourceFailure,
)
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.backends.user_data import user_data
from dstackweb.lib.errors import DomainError
from dstackweb.lib.models import Lease
from dstackweb.offers import refusals
from dstackweb.runner.pyz import pyz
from dstackweb.runs.codes import MessageCode
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import JobStatus
from dstackweb.scheduler.cloud import agents, instances
from dstackweb.scheduler.placement.launches import Launch, Place, next_launch

log = logging.getLogger(__name__)

Pause = Callable[[float], object]
"""Waits so many seconds: `time.sleep` in a worker; tests pass another."""

LEASE_S = 60.0
"""After this another process may repeat the order of an instance."""
OWN_S = 180.0
"""What the agent may take of an allocation's time for itself."""
WORK_S = 15.0
"""How long one task launches, far below django-q's timeout. The next tick continues."""
MAX_PAUSE_S = 2.0
"""A worker waits this long at most for its turn in a rate limit."""


def launch_waiting(within_s: float = WORK_S, pause: Pause = time.sleep) -> None:
    """Launch what placed runs wait for, as long as something can be launched, for `within_s` seconds at most."""
    began = time.monotonic()
    refused: Counter[int] = Counter()
    paused: dict[Place, dt.datetime] = {}
    broken: dict[UUID, Exception] = {}
    while time.monotonic() - began <= within_s:
        now = timezone.now()
        claimed = _claim_next(refused, {place for place, until in paused.items() if until > now}, broken)
        if claimed is None:
            waits = [until for until in paused.values() if now < until <= now + dt.timedelta(seconds=MAX_PAUSE_S)]
            if not waits or not _wait_alone((min(waits) - now).total_seconds(), pause):
                break
            continue
        launch, holder = claimed
        try:
            if (until := _order_instance(launch, refused)) is not None:
                paused[launch.place] = until
        except Exception as error:
            # The others are not to wait for it.
            log.exception("instance %s can't be ordered", launch.instance)
            broken[launch.instance] = error
        finally:
            Lease.release(_lease(launch.instance), holder)
    if broken:
        raise next(iter(broken.values()))


def _wait_alone(seconds: float, pause: Pause) -> bool:
    """Wait, unless another worker does: the rest is free for other work, and this one looks for all."""
    holder = uuid.uuid4().hex
    if not Lease.take("launches", holder, 2 * MAX_PAUSE_S, timezone.now()):
        return False
    try:
        pause(seconds)
    finally:
        Lease.release("launches", holder)
    return True


def _claim_next(
    refused: Counter[int], paused: Collection[Place], broken: Collection[UUID]
) -> tuple[Launch, str] | None:
    """The next launch, with the holder of its lease; `refused` counts refused calls by queue."""
    now, ttl = timezone.now(), dt.timedelta(seconds=LEASE_S)
    waiting = [launch for launch in _waiting() if launch.instance not in broken]
    if not waiting:
        return None
    held = Lease.objects.filter(name__startswith=_lease(""), expires_at__gt=now, expires_at__lte=now + 2 * ttl)
    taken = set(held.values_list("name", flat=True))
    calling = [launch for launch in waiting if _lease(launch.instance) in taken]
    free = [launch for launch in waiting if _lease(launch.instance) not in taken]
    starting = Job.objects.filter(status=JobStatus.PROVISIONING, instance__status=InstanceStatus.STARTING)
    turns = refused + Counter(dict(starting.order_by().values_list("run__queue").annotate(Count("pk"))))
    turns.update(launch.queue for launch in calling)
    backends = Backend.objects.in_bulk({launch.place[0] for launch in calling})
    known = {pk: refusals.RecentAnswers(backend) for pk, backend in backends.items()}
    launching = {
        (launch.place, launch.offer)
        for launch in calling
        if launch.place[0] in known and known[launch.place[0]].is_launching(launch.offer)
    }
    while (launch := next_launch(free, calling, turns, paused, launching)) is not None:
        holder = uuid.uuid4().hex
        if Lease.take(_lease(launch.instance), holder, LEASE_S, timezone.now()):
            return launch, holder
        free.remove(launch)
        calling.append(launch)
    return None


def _waiting() -> list[Launch]:
    """The instances that jobs wait for and that no cloud is known to have launched."""
    jobs = Job.objects.filter(
        instances.on_cloud_backends(),
        status=JobStatus.PROVISIONING,
        claim_nonce="",
        instance__status=InstanceStatus.REQUESTED,
        instance__holder=F("pk"),
    ).select_related("run", "instance")
    columns = ("node", "backend", "run__rank", "run__seniority_us", "run__queue")
    of_instance = ("backend_id", "region", "instance_type", "is_spot", *refusals.SIZE)
    jobs = jobs.only(*columns, *(f"instance__{name}" for name in of_instance))
    return [
        Launch(
            instance=job.instance.pk,
            job=job.pk,
            node=job.node,
            run=job.run_id,
            rank=job.run.rank,
            seniority_us=job.run.seniority_us,
            queue=job.run.queue_id,
            place=(job.instance.backend_id, job.instance.region),
            offer=refusals.OfferKey.of(job.instance),
        )
        for job in jobs
        if job.instance is not None
    ]


def _order_instance(launch: Launch, refused: Counter[int]) -> dt.datetime | None:
    """Order its instance by one call of the cloud, unless that has become unnecessary. Returns until when the cloud
    can't be called in that region; None if it can."""
    waiting = Job.objects.filter(pk=launch.job, status=JobStatus.PROVISIONING, claim_nonce="", instance=launch.instance)
    requested = Instance.objects.filter(
        pk=launch.instance, holder__in=waiting.values("pk"), status=InstanceStatus.REQUESTED
    )
    instance = requested.select_related("backend", "project").first()
    if instance is None:
        return None  # before the lease was taken another worker ordered it, or its job ended
    backend, never_sent = instance.backend, instance.join_digest == ""
    if not backend.enabled:
        # The order may have been sent, and its answer lost.
        why = InstanceEnd.DISABLED if backend.deleted_at is None else InstanceEnd.DELETED
        instances.end_instance(instance, InstanceStatus.GONE if never_sent else InstanceStatus.STOPPING, why)
        return None
    known = refusals.RecentAnswers(backend)
    if never_sent and known.refusal(launch.offer, instance.zone_prices):
        instances.change_offer(instance)
        return None
    token, digest = agents.join_token(instance.pk)
    is_new = bool(Instance.objects.filter(pk=instance.pk, join_digest="").update(join_digest=digest))
    order = _order(instance, token, is_new=is_new, full_zones=known.full_zones(launch.offer))
    try:
        machine = registry.cloud(backend).launch(order)
    except LaunchFailed as failed:
        log.info("%s in %s: %s", instance.instance_type, instance.region, failed)
        refused[launch.queue] += 1
        if failed.code == LaunchFailure.NO_ROOM:
            instances.note_full(backend)
        else:
            refusals.remember_refusal(instance, failed)
        _clear_errors(instance)
        if failed.code in (LaunchFailure.QUOTA, LaunchFailure.NO_CAPACITY):
            instances.refresh_capacity(backend, instance.region)
        if failed.data.get("elsewhere"):
            _mark_unsent(instance)
        else:
            instances.end_instance(instance, InstanceStatus.GONE, failed.code, failed.text)
        return None
    except (SourceFailed, DomainError, registry.UnknownKind) as error:
        log.warning("%s: cannot start an instance, will retry: %s", backend, error)
        is_throttled = isinstance(error, SourceFailed) and error.code == SourceFailure.THROTTLED
        if is_throttled and is_new:
            _mark_unsent(instance)  # what is throttled is not executed
        until = parse_datetime(str(error.data.get("until", ""))) if isinstance(error, SourceFailed) else None
        now = timezone.now()
        if is_throttled and until is not None and now < until <= now + dt.timedelta(seconds=MAX_PAUSE_S):
            return until
        _store_error(instance, error)
        return dt.datetime.max.replace(tzinfo=dt.UTC)
    _clear_errors(instance)
    instances.record_found(instance, machine)
    refusals.remember_launch(instance, machine.zone)
    instances.refresh_capacity(backend, instance.region)
    return None


def _mark_unsent(instance: Instance) -> None:
    """Note that the cloud has launched nothing for it: the next order is as new as the first."""
    Instance.objects.filter(pk=instance.pk, status=InstanceStatus.REQUESTED, cloud_id="").update(join_digest="")


def _order(instance: Instance, join_token: str, *, is_new: bool, full_zones: tuple[str, ...]) -> InstanceOrder:
    run = Run.objects.filter(jobs__instance=instance).first()
    duration_s: int | None = None
    if run is not None and run.spec.get("max_duration_s") is not None:
        # An allocation of a cluster also needs the time to start, to stop and to report.
        duration_s = int(run.spec["max_duration_s"] + run.spec.get("stop_duration_s", 0) + OWN_S)
    return InstanceOrder(
        instance=str(instance.pk),
        deployment=instances.deployment(),
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
        full_zones=full_zones,
        project=instance.project.name,
        run=run.name if run else "",
        cpus=instance.cpus,
        memory_mib=instance.memory_mib,
        gpu_name=instance.gpu_name,
        gpu_count=instance.gpu_count,
        is_new=is_new,
        duration_s=duration_s,
    )


def _waiting_beside(instance: Instance, *, failing: bool) -> list[UUID]:
    """The instances that wait for its region, itself included: those that show that it fails, or those that don't."""
    waiting = Instance.objects.filter(
        backend=instance.backend, region=instance.region, status=InstanceStatus.REQUESTED
    ).values_list("pk", "error", "error_detail")
    return [pk for pk, error, detail in waiting if bool(error or detail) is failing]


def _store_error(instance: Instance, error: Exception) -> None:
    """Show why the cloud could not be called on the instances and the jobs that wait for the region; one order after
    another is repeated. For those that did not show any, the time begins after which they are given up."""
    detail = {"code": error.code, **error.data} if isinstance(error, SourceFailed) else {}
    text = "" if detail else str(error)
    fresh, failing = _waiting_beside(instance, failing=False), _waiting_beside(instance, failing=True)
    Instance.objects.filter(pk__in=fresh).update(status_s=0)
    Instance.objects.filter(pk__in=[*fresh, *failing]).update(error=text, error_detail=detail)
    message = {"code": MessageCode.SOURCE_FAILED, "kind": instance.backend.kind, "error": detail} if detail else {}
    _show([*fresh, *failing], text, message)


def _clear_errors(instance: Instance) -> None:
    """The cloud has answered: those that wait for the region no longer show that it fails."""
    if failing := _waiting_beside(instance, failing=True):
        Instance.objects.filter(pk__in=failing).update(error="", error_detail={}, status_s=0)
        _show(failing, "", {})


def _show(waiting: Collection[UUID], message: str, detail: Mapping[str, object]) -> None:
    jobs = Job.objects.filter(instance__in=waiting, status=JobStatus.PROVISIONING, claim_nonce="")
    jobs.update(message=message, detail=detail)


def _lease(instance: UUID | str) -> str:
    return f"launch:{instance}"
