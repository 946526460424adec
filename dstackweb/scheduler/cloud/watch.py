"""Watches cloud instances: the clouds' answers, deadlines, silence, interruptions, orphans; and has them launched.

All work is found from rows. Clouds are called outside transactions, one region at a time.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from dstackweb.backends import registry
from dstackweb.backends.contract import (
    CloudInstance,
    InstanceEnd,
    SourceFailed,
)
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.lib.errors import DomainError
from dstackweb.lib.models import Lease, watch_time
from dstackweb.lib.sql import for_each, parsed_uid
from dstackweb.runs import wakeups
from dstackweb.runs.attempts import end_job
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE, JobStatus, Reason
from dstackweb.runs.transitions import lock_run, move_job, record
from dstackweb.scheduler.cloud import instances, launching, lifecycle
from dstackweb.scheduler.cloud.lifecycle import Cause, CloudState, find_instance

log = logging.getLogger(__name__)

POLL_EVERY_S = 30.0
AMID_S = 2.0
"""How long to launch between two polls."""
SETTLE_EVERY_S = 8.0
"""How often to poll a region with an ending instance."""
GRACE_STEP_S = 5.0
"""A stopping job gets a new grace only if it is shorter by more than this."""
WORK_S = 15.0
"""Time for polling regions in one tick. The next tick does the rest."""


def poll_all() -> None:
    """Advance all cloud jobs and instances once."""
    release_instances(_present_instances().exclude(holder=None))
    _run_all(_interruptions_due())
    _run_all(_ends_due())
    _run_all(_launches_and_polls(), launching.WORK_S + WORK_S)
    _run_all((partial(instances.ask_accounting, *place) for place in instances.accounting_due()), WORK_S)


def poll_jobs(job_ids: Sequence[str]) -> None:
    """Advance a few jobs at once: release the instances of ended ones, launch whatever is next, and ask the cloud about
    the machines of those that were ended by a signal."""
    release_instances(_present_instances().filter(holder__in=job_ids))
    launching.launch_waiting()
    if _reported_jobs().filter(pk__in=job_ids).exists():
        _run_all((partial(poll_region, *place) for place in _regions_due()), WORK_S)


def end_orphans() -> None:
    """Poll every region that a cloud backend uses, or used recently: instances without rows may be left there. In
    random order, so that later ticks reach what this one has no time for."""
    now = timezone.now()
    places: list[tuple[Backend, str]] = []
    _run_all([partial(_add_regions, places, backend, now) for backend in instances.cloud_backends(now)])
    random.shuffle(places)
    _run_all((partial(poll_region, *place) for place in places), 2 * WORK_S)


def _add_regions(places: list[tuple[Backend, str]], backend: Backend, now: dt.datetime) -> None:
    places += [(backend, region) for region in instances.recent_regions(backend, now)]
    configured = registry.cloud(backend).regions()
    places += [(backend, region) for region in configured if (backend, region) not in places]


def _run_all(acts: Iterable[Callable[[], object]], within_s: float = math.inf) -> None:
    """Run all of them, even when one fails. `within_s`: none after the first begins later than that."""
    began = time.monotonic()

    def in_time() -> Iterator[Callable[[], object]]:
        for act in acts:
            yield act
            if time.monotonic() - began > within_s:
                return  # before the next is taken, since that may hold a lease

    for_each(in_time(), _run)


def _run(act: Callable[[], object]) -> None:
    try:
        act()
    except (SourceFailed, DomainError, registry.UnknownKind) as error:
        log.warning("cloud unreachable, instances unchanged: %s", error)


def _launches_and_polls() -> Iterator[Callable[[], object]]:
    """Yield the launches of all that waits, then each region's poll and the launches of what was placed by then."""
    yield launching.launch_waiting
    for backend, region in _regions_due():
        yield partial(poll_region, backend, region)
        yield partial(launching.launch_waiting, AMID_S)


def poll_region(backend: Backend, region: str) -> None:
    """Compare a region's rows with the cloud, and act on differences. Raises SourceFailed, having changed nothing."""
    code = registry.cloud(backend)
    # Before the question: what the cloud answers must be younger than what their runners have reported.
    reported = list(_reported_jobs().filter(instance__backend=backend, instance__region=region))
    machines = code.instances(region, instances.deployment())
    # Read after the answer: a row exists before its instance.
    rows = list(_present_instances().filter(backend=backend, region=region))
    ending = {row.cloud_id for row in rows if _update_row(row, find_instance(machines, str(row.pk), row.cloud_id))}
    known = Instance.objects.filter(pk__in=[pk for machine in machines if (pk := parsed_uid(machine.instance))])
    stored = known.values_list("pk", "status", "cloud_id")
    wanted = {str(row.pk): (InstanceStatus(row.status), row.cloud_id) for row in rows}
    wanted |= {str(pk): (InstanceStatus(status), cloud_id) for pk, status, cloud_id in stored}
    for machine in lifecycle.find_orphans(machines, wanted, timezone.now()):
        log.warning("%s %s: terminating orphan instance %s", backend, region, machine.cloud_id)
        ending.add(machine.cloud_id)
    for job in reported:
        assert job.instance is not None
        _settle_reported(job, job.instance, find_instance(machines, str(job.instance_id), job.instance.cloud_id))
    if ending - {""}:
        code.terminate(region, sorted(ending - {""}))


def _reported_jobs() -> QuerySet[Job]:
    """Jobs that were ended by a signal, and whose clouds have not said yet whether their machines were."""
    return (
        Job.objects.timed()
        .select_related("instance")
        .filter(status=JobStatus.TERMINATING, reported_at__isnull=False, instance__isnull=False)
    )


def _settle_reported(job: Job, instance: Instance, machine: CloudInstance | None) -> None:
    match lifecycle.cause_of_end(job, machine):
        case Cause.MACHINE:
            assert machine is not None
            end_job(job.pk, lifecycle.job_end_reason(_why(instance, machine)), message=machine.text)
        case Cause.OWN:
            end_job(job.pk, Reason.CONTAINER_EXITED_WITH_ERROR, message=job.message)


def _why(instance: Instance, machine: CloudInstance | None) -> str:
    if instance.interrupted_at is not None or instance.why == InstanceEnd.INTERRUPTED:
        return InstanceEnd.INTERRUPTED
    return (machine.why if machine else "") or InstanceEnd.CLOUD


def _update_row(instance: Instance, machine: CloudInstance | None) -> bool:
    """Update a row from the cloud's answer; returns whether the instance must be terminated."""
    why = _why(instance, machine)
    text = machine.text if machine else ""
    match lifecycle.cloud_state(instance, machine):
        case CloudState.THERE | CloudState.ALIVE as there:
            assert machine is not None
            instances.record_found(instance, machine)
            instances.record_wait(instance, machine)
            instance.cloud_id = machine.cloud_id
            if there is CloudState.THERE and lifecycle.lacks_room(instance, machine):
                instances.end_instance(instance, InstanceStatus.STOPPING, InstanceEnd.NO_ROOM)
                instance.refresh_from_db()  # its agent may have called meanwhile: then it stays
                return instance.status == InstanceStatus.STOPPING
            return there is CloudState.ALIVE
        case CloudState.ENDING:
            assert machine is not None
            instances.record_found(instance, machine)
            instance.refresh_from_db()
            instances.end_instance(instance, InstanceStatus.STOPPING, why, text)
            return True
        case CloudState.GONE:
            instances.end_instance(instance, InstanceStatus.GONE, why, text)
            instances.read_soon(instance.backend)
    return False


def release_instances(held: Iterable[Instance]) -> None:
    """Take ended jobs off their instances, which are kept idle for the project or set to end."""
    rows = list(held)
    jobs = instances.jobs_by_instance(rows)
    for instance in rows:
        job = jobs.get(instance.pk)
        if job is not None and job.status in JOB_ACTIVE:
            continue
        idle_s = job.run.spec.get("idle_duration_s") if job and registry.is_machine(instance.backend) else None
        kept = lifecycle.idle_time_s(instance, job.termination_reason if job else "", idle_s)
        same = Instance.objects.filter(pk=instance.pk, holder=instance.holder, status=instance.status)
        now = timezone.now()
        if kept:
            until = now + dt.timedelta(seconds=kept)
            if same.filter(interrupted_at=None).update(holder=None, idle_since=now, idle_until=until, status_s=0):
                wakeups.request_pass()
        elif instance.status == InstanceStatus.STOPPING:
            same.update(holder=None)
        else:
            same.update(holder=None, status=InstanceStatus.STOPPING, why=InstanceEnd.FINISHED, status_s=0)


def _ends_due() -> Iterator[Callable[[], object]]:
    rows = list(_present_instances().exclude(status=InstanceStatus.STOPPING))
    jobs = instances.jobs_by_instance(rows)
    now = timezone.now()
    for instance in rows:
        why = lifecycle.reason_to_end(instance, jobs.get(instance.pk), now)
        if why is not None:
            log.info("%s %s: ending, reason %s", instance.backend, instance, why)
            yield partial(instances.end_instance, instance, InstanceStatus.STOPPING, why)


def _interruptions_due() -> Iterator[Callable[[], object]]:
    """Stop jobs on instances that their cloud is about to take back."""
    rows = _present_instances().filter(status=InstanceStatus.RUNNING, interrupted_at__isnull=False).exclude(holder=None)
    by_id = {row.pk: row for row in rows}
    for instance_id, job in instances.jobs_by_instance(by_id.values()).items():
        if job.status in JOB_ACTIVE and job.claim_nonce:
            yield partial(_stop_interrupted, job, by_id[instance_id])


def _stop_interrupted(job: Job, instance: Instance) -> None:
    now = timezone.now()
    assert instance.interrupted_at is not None
    with transaction.atomic():
        run = lock_run(job.run_id)
        fresh = Job.objects.timed().get(pk=job.pk)
        fresh.run = run
        if fresh.status not in JOB_ACTIVE:
            return
        if fresh.reported_at is not None:
            end_job(fresh.pk, Reason.INTERRUPTED)
            return
        grace = lifecycle.grace_s(job.run.spec.get("stop_duration_s") or 0, instance.interrupted_at, now)
        if fresh.status != JobStatus.TERMINATING:
            record(run, RunEventKind.SPOT_INTERRUPTION, {"at": instance.interrupted_at.isoformat()}, node=job.node)
            move_job(fresh, JobStatus.TERMINATING, now=now, stop_reason=Reason.INTERRUPTED, stop_grace_s=grace)
        elif fresh.stop_grace_s is None or grace + GRACE_STEP_S < fresh.stop_grace_s - fresh.status_s:
            Job.objects.filter(pk=fresh.pk).update(stop_grace_s=grace, status_at_s=watch_time())


def _present_instances() -> QuerySet[Instance]:
    return Instance.objects.select_related("backend").exclude(status=InstanceStatus.GONE)


def _regions_due() -> Iterator[tuple[Backend, str]]:
    """Backends and regions with instances that this process may poll now, by a lease that just expires."""
    settling: dict[tuple[Backend, str], bool] = {}
    reported = set(_reported_jobs().values_list("instance_id", flat=True))
    for row in _present_instances().order_by("created_at", "pk"):
        place = (row.backend, row.region)
        settling[place] = settling.get(place, False) or row.status == InstanceStatus.STOPPING or row.pk in reported
    for (backend, region), is_settling in settling.items():
        word, every_s = ("settle", SETTLE_EVERY_S) if is_settling else ("poll", POLL_EVERY_S)
        if Lease.take(f"{word}:{backend.pk}:{region}", uuid.uuid4().hex, every_s, timezone.now()):
            yield backend, region
