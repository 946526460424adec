"""Reads the input of decisions from rows, in a fixed number of queries."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from django.conf import settings
from django.db.models import Count, Sum
from pydantic import ValidationError

from dstackweb.backends.hosts.inventory import host_views
from dstackweb.runs.codes import ReservationEnd
from dstackweb.runs.models import Allocation, Job, Queue, Run
from dstackweb.runs.queue.queues import LIMITS
from dstackweb.runs.states import JOB_ACTIVE, PLACED, RunStatus
from dstackweb.scheduler.cloud.backend_offers import OfferReader, idle_offers, project_budget
from dstackweb.scheduler.models import Reservation
from dstackweb.scheduler.placement.capacity import Capacity
from dstackweb.scheduler.placement.hosts import WaitingRun
from dstackweb.scheduler.placement.limits import QueueLimits, QueueUsage
from dstackweb.scheduler.placement.reservation import HostReservation, JobUsage, ReservedNode, latest_end
from dstackweb.spec.effective import EffectiveSpec


def load_capacity(
    queues: Iterable[Queue], reader: OfferReader, now: dt.datetime, kept: StoredReservation | None
) -> Capacity:
    """The capacity for runs of these queues, with the reservation."""
    reserved = kept.reserved if kept else None
    # Jobs before hosts: what ends between the two queries then counts as free.
    known = job_usage(now) if reserved else None
    limits = {queue.pk: limits_of(queue) for queue in queues}
    return Capacity(
        now=now,
        reserve_after_s=settings.DSTACKWEB_RESERVE_AFTER_S,
        reserve_for_s=settings.DSTACKWEB_RESERVE_FOR_S,
        hosts=tuple(host_views()),
        limits=limits,
        queue_usage=queue_usage([queue_id for queue_id, each in limits.items() if each != QueueLimits()]),
        ask_backends=reader.offers_for,
        idle_instances=idle_offers(now),
        budget_of=functools.cache(lambda project_id: project_budget(project_id, now)),
        read_job_usage=lambda: job_usage(now) if known is None else known,
        reserved=reserved,
    )


@dataclass(frozen=True)
class StoredReservation:
    """The row as a pass found it. If its run can no longer start, `reserved` is None and `lapsed` says why."""

    run_id: int
    queue_id: int
    reserved: HostReservation | None
    lapsed: str = ""


def load_reservation() -> StoredReservation | None:
    """The stored reservation; None without one."""
    row = Reservation.objects.select_related("run__queue__project").first()
    if row is None:
        return None
    run = row.run
    if run.status != RunStatus.SUBMITTED:
        return StoredReservation(run.pk, run.queue_id, None, ReservationEnd.LEFT)
    if run.queue.paused:
        return StoredReservation(run.pk, run.queue_id, None, ReservationEnd.QUEUE_PAUSED)
    try:
        spec = EffectiveSpec.model_validate(run.spec)
        nodes = tuple(ReservedNode.from_row(node) for node in row.nodes)
    except (ValidationError, TypeError, KeyError):
        return StoredReservation(run.pk, run.queue_id, None, ReservationEnd.UNREADABLE)
    of = waiting_run(run, run.queue, spec)
    return StoredReservation(
        run.pk, run.queue_id, HostReservation(of, nodes, row.made_at, row.starts_at, row.expires_at)
    )


def waiting_run(run: Run, queue: Queue, spec: EffectiveSpec) -> WaitingRun:
    """A run of a queue (read with its project) as decisions see it."""
    return WaitingRun(
        id=run.pk,
        name=run.name,
        project_id=queue.project_id,
        project=queue.project.name,
        queue_id=queue.pk,
        user_id=run.user_id,
        rank=run.rank,
        queued_at=run.queued_at,
        spec=spec,
    )


def limits_of(queue: Queue) -> QueueLimits:
    """A queue's limits."""
    return QueueLimits(**{name: getattr(queue, name) for name in LIMITS})


def job_usage(now: dt.datetime) -> list[JobUsage]:
    """What each active job holds of its host, and when it is gone at the latest."""
    columns = ("run_id", "node", "host_id", "cpus", "memory_mib", "gpus", "placed_at", "started_at")
    rows = list(Job.objects.filter(status__in=JOB_ACTIVE, host__isnull=False).values_list(*columns))
    # Not joined: see `usage_by_run`.
    runs = Run.objects.filter(pk__in={run_id for run_id, *_rest in rows})
    times = ("extended_s", "spec__max_duration_s", "spec__stop_duration_s")
    limits = {run_id: limit for run_id, *limit in runs.values_list("pk", *times)}
    return [
        JobUsage(
            job=(run_id, node),
            host_id=host_id,
            cpus=cpus,
            memory_mib=memory_mib,
            gpus=frozenset(gpus),
            since=placed_at,
            ends_at=latest_end(started_at or now, None if limit_s is None else limit_s + extended_s, stop_s or 0, now),
        )
        for run_id, node, host_id, cpus, memory_mib, gpus, placed_at, started_at in rows
        for extended_s, limit_s, stop_s in [limits[run_id]]
    ]


def queue_usage(queue_ids: Sequence[int]) -> QueueUsage:
    """Placed runs of these queues and the GPUs that they request, on whichever backend.

    Reads placed runs of all queues, which are few: SQLite would search these queues' waiting runs otherwise.
    """
    if not queue_ids:
        return QueueUsage()
    columns = ("queue_id", "user_id", "spec__nodes", "spec__requirements__gpu_count_min")
    placed = Run.objects.filter(status__in=PLACED).values_list(*columns)
    return QueueUsage.of(
        (queue_id, user_id, (nodes or 1) * (gpus or 0))
        for queue_id, user_id, nodes, gpus in placed
        if queue_id in queue_ids
    )


def usage_by_run() -> dict[int, tuple[int, int]]:
    """GPUs and CPUs that each run's jobs hold now.

    Two queries instead of a join: SQLite would scan all jobs, and PostgreSQL with old statistics all runs.
    """
    sums = Allocation.objects.values_list("job_id").annotate(gpus=Count("gpu"), cpus=Sum("cpus"))
    of_job = {job_id: (gpus, cpus) for job_id, gpus, cpus in sums}
    held: dict[int, tuple[int, int]] = {}
    for job_id, run_id in Job.objects.filter(pk__in=of_job).values_list("pk", "run_id"):
        (gpus, cpus), (more_gpus, more_cpus) = of_job[job_id], held.get(run_id, (0, 0))
        held[run_id] = gpus + more_gpus, cpus + more_cpus
    return held
