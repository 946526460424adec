"""Watching clouds' machines: what clouds tell of them, deadlines, silence, interruptions, and what is left over.

Found from rows each time; the clouds are asked outside any transaction, a region at a time, and seldom.
"""

from __future__ import annotations

import datetime as dt
import logging
import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from uuid import UUID

from django.db import DatabaseError, transaction
from django.db.models import QuerySet
from django.utils import timezone

from dstackweb.backends import registry
from dstackweb.backends.contract import Machine, SourceFailed
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.lib import leases
from dstackweb.lib.errors import DomainError
from dstackweb.runs import wakeups
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE, JobStatus, Reason
from dstackweb.runs.transitions import lock_run, move_job, record
from dstackweb.scheduler.cloud import common as cloud
from dstackweb.scheduler.cloud import instance_updates as cloud_rows
from dstackweb.scheduler.cloud import start as cloud_start
from dstackweb.scheduler.cloud.lifecycle import Told, grace_s, kept_s, match, orphans, overdue, told

log = logging.getLogger(__name__)

LOOK_EVERY_S = 30.0
SETTLE_EVERY_S = 8.0
"""How often a region is asked where a machine is to end."""
TOLD_S = 5.0
"""By so much less than it has left, a job that is stopping already is told anew."""
WORK_S = 15.0
"""What one tick doesn't come to within this the next one does: starting machines, and looking at those there are."""


def look_over() -> None:
    """One look at all jobs and machines of clouds."""
    give_back(_there().exclude(holder=None))
    _each(_interrupted())
    _each(_overdue())
    waiting = Job.objects.filter(cloud.on_clouds(), status=JobStatus.PROVISIONING, claim_nonce="")
    requested = waiting.filter(instance__status=InstanceStatus.REQUESTED).order_by("placed_at", "pk")
    _each((partial(cloud_start.start, pk) for pk in requested.values_list("pk", flat=True)), WORK_S)
    # With a time of its own: however long starting takes, what is to end ends.
    _each((partial(look, backend, region) for backend, region in _regions_in_turn()), WORK_S)


def look_at_jobs(job_ids: Sequence[str]) -> None:
    """Bring a few jobs forward at once: those that wait get machines started, those that ended give theirs back."""
    give_back(_there().filter(holder__in=job_ids))
    _each(partial(cloud_start.start, UUID(job_id)) for job_id in job_ids)


def reap() -> None:
    """Look at every region that a cloud is, or was lately, used in: machines may be left where no row is.

    In any order, so that what one tick doesn't come to is the next one's.
    """
    now = timezone.now()
    places: list[tuple[Backend, str]] = []
    _each([partial(_add_places, places, backend, now) for backend in cloud.clouds(now)])
    random.shuffle(places)
    _each((partial(look, backend, region) for backend, region in places), 2 * WORK_S)


def _add_places(places: list[tuple[Backend, str]], backend: Backend, now: dt.datetime) -> None:
    places += [(backend, region) for region in cloud.regions_left(backend, now)]
    configured = registry.cloud(backend).regions()
    places += [(backend, region) for region in configured if (backend, region) not in places]


def _each(acts: Iterable[Callable[[], object]], within_s: float | None = None) -> None:
    """Do all of them, also when one can't be done now: a cloud that can't be asked says nothing of any other.

    Whatever else goes wrong is raised when all are done. `within_s`: none begins later.
    """
    began = time.monotonic()
    failed: Exception | None = None
    for act in acts:
        if within_s is not None and time.monotonic() - began > within_s:
            break
        try:
            act()
        except DatabaseError:
            raise
        except (SourceFailed, DomainError, registry.UnknownKind) as error:
            log.warning("a cloud can't be asked now, and nothing is concluded from that: %s", error)
        except Exception as error:
            log.exception("going on without %s", act)
            failed = error
    if failed is not None:
        raise failed


def look(backend: Backend, region: str) -> None:
    """Ask a cloud what machines there are in a region, and follow it. Raises SourceFailed: then nothing is known."""
    code = registry.cloud(backend)
    machines = code.machines(region, cloud.deployment())
    # Read after the answer: a row is there before its machine.
    rows = list(_there().filter(backend=backend, region=region))
    ending = {row.cloud_id for row in rows if _follow(row, match(machines, str(row.pk), row.cloud_id))}
    known = Instance.objects.filter(pk__in=[pk for machine in machines if (pk := _uuid(machine.instance))])
    told_of = known.values_list("pk", "status", "cloud_id")
    wanted = {str(row.pk): (InstanceStatus(row.status), row.cloud_id) for row in rows}
    wanted |= {str(pk): (InstanceStatus(status), cloud_id) for pk, status, cloud_id in told_of}
    for machine in orphans(machines, wanted, timezone.now()):
        log.warning("%s %s: machine %s is nobody's, and is ended", backend, region, machine.cloud_id)
        ending.add(machine.cloud_id)
    if ending - {""}:
        code.terminate(region, sorted(ending - {""}))


def _follow(instance: Instance, machine: Machine | None) -> bool:
    """Do with a row what its cloud says; whether the cloud has to be told to end the machine."""
    interrupted = instance.interrupted_at is not None or instance.why == "interrupted"
    why = "interrupted" if interrupted else (machine.why if machine else "") or "cloud"
    text = machine.text if machine else ""
    match told(cloud.row_of(instance), machine):
        case Told.THERE | Told.ALIVE as there:
            assert machine is not None
            cloud_rows.land(instance, machine)
            instance.cloud_id = machine.cloud_id
            return there is Told.ALIVE
        case Told.ENDING:
            assert machine is not None
            cloud_rows.land(instance, machine)
            instance.refresh_from_db()
            cloud_rows.close(instance, InstanceStatus.STOPPING, why, text)
            return True
        case Told.GONE:
            cloud_rows.close(instance, InstanceStatus.GONE, why, text)
    return False


def give_back(instances: Iterable[Instance]) -> None:
    """Jobs that have ended leave their machines: kept for the next run of the project, or to be ended."""
    rows = list(instances)
    jobs = cloud.served_by(rows)
    for instance in rows:
        job = jobs.get(instance.pk)
        if job is not None and job.status in JOB_ACTIVE:
            continue
        idle_s = job.run.spec.get("idle_duration_s") if job else None
        kept = kept_s(cloud.row_of(instance), job.termination_reason if job else "", idle_s)
        same = Instance.objects.filter(pk=instance.pk, holder=instance.holder, status=instance.status)
        now = timezone.now()
        if kept:
            until = now + dt.timedelta(seconds=kept)
            if same.filter(interrupted_at=None).update(holder=None, idle_since=now, idle_until=until, status_s=0):
                wakeups.want_pass()
        elif instance.status == InstanceStatus.STOPPING:
            same.update(holder=None)
        else:
            same.update(holder=None, status=InstanceStatus.STOPPING, why="finished", status_s=0)


def _overdue() -> Iterator[Callable[[], object]]:
    rows = list(_there().exclude(status=InstanceStatus.STOPPING))
    jobs = cloud.served_by(rows)
    now, rules = timezone.now(), cloud.rules()
    for instance in rows:
        why = overdue(cloud.row_of(instance), cloud.view_of(jobs.get(instance.pk)), now, rules)
        if why is not None:
            log.info("%s %s is to end: %s", instance.backend, instance, why)
            yield partial(cloud_rows.close, instance, InstanceStatus.STOPPING, why)


def _interrupted() -> Iterator[Callable[[], object]]:
    """Jobs on machines that their cloud takes back soon are told to stop, in time to keep what they have."""
    rows = _there().filter(status=InstanceStatus.RUNNING, interrupted_at__isnull=False).exclude(holder=None)
    by_id = {row.pk: row for row in rows}
    for instance_id, job in cloud.served_by(by_id.values()).items():
        if job.status in JOB_ACTIVE and job.claim_nonce:
            yield partial(_tell, job, by_id[instance_id])


def _tell(job: Job, instance: Instance) -> None:
    now = timezone.now()
    assert instance.interrupted_at is not None
    with transaction.atomic():
        run = lock_run(job.run_id)
        fresh = Job.objects.get(pk=job.pk)
        fresh.run = run
        if fresh.status not in JOB_ACTIVE:
            return
        grace = grace_s(job.run.spec.get("stop_duration_s") or 0, instance.interrupted_at, now)
        if fresh.status != JobStatus.TERMINATING:
            record(run, "spot_interruption", {"at": instance.interrupted_at.isoformat()}, node=job.node)
            move_job(fresh, JobStatus.TERMINATING, now=now, stop_reason=Reason.INTERRUPTED, stop_grace_s=grace)
        elif fresh.stop_grace_s is None or grace + TOLD_S < fresh.stop_grace_s - fresh.status_s:
            Job.objects.filter(pk=fresh.pk).update(stop_grace_s=grace, status_s=0)


def _there() -> QuerySet[Instance]:
    return Instance.objects.select_related("backend").exclude(status=InstanceStatus.GONE)


def _regions_in_turn() -> Iterator[tuple[Backend, str]]:
    """Where there are machines, and it is this process's to ask now: by a lease that nobody gives back."""
    settling: dict[tuple[Backend, str], bool] = {}
    for row in _there().order_by("created_at", "pk"):
        place = (row.backend, row.region)
        settling[place] = settling.get(place, False) or row.status == InstanceStatus.STOPPING
    for (backend, region), is_settling in settling.items():
        word, every_s = ("settle", SETTLE_EVERY_S) if is_settling else ("look", LOOK_EVERY_S)
        if leases.take(f"{word}:{backend.pk}:{region}", uuid.uuid4().hex, every_s, timezone.now()):
            yield backend, region


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
