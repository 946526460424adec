"""Reads the input of decisions from rows, in a fixed number of queries."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.conf import settings
from django.db.models import Max
from django.utils import timezone
from pydantic import ValidationError

from dstackweb.backends.hosts.inventory import host_views
from dstackweb.runs import selectors
from dstackweb.runs.codes import Reclaim, ReservationEnd
from dstackweb.runs.models import DisplacedWork, Job, Queue, Run
from dstackweb.runs.queue.queues import LIMITS
from dstackweb.runs.states import JOB_ACTIVE, PLACED, JobStatus, RunStatus
from dstackweb.scheduler.cloud.backend_offers import OfferReader, idle_offers, project_budget
from dstackweb.scheduler.models import Reservation
from dstackweb.scheduler.placement.capacity import Capacity
from dstackweb.scheduler.placement.displacing import DAY
from dstackweb.scheduler.placement.hosts import Displaced, PlacedRun, WaitingRun
from dstackweb.scheduler.placement.limits import Cohort, QueueLimits, QueueUsage
from dstackweb.scheduler.placement.reservation import (
    MARGIN_S,
    HostReservation,
    JobUsage,
    ReservedNode,
    Turns,
    latest_end,
)
from dstackweb.spec.effective import EffectiveSpec

MOST_FORECAST = 20_000
"""Waiting runs of a queue of which starts are estimated."""
READ_AT_ONCE = 500
DECIDES_NOTHING: dict[str, Any] = {"commands": (), "init": None, "env": {}, "masked_env": (), "shell": "",
                                   "working_dir": None, "entrypoint": None, "registry_auth": None}  # fmt: skip
"""What may be large in a spec, and says nothing about where a run fits."""


def load_capacity(
    queues: Sequence[Queue],
    reader: OfferReader,
    now: dt.datetime,
    stored: Sequence[StoredReservation],
    beside: Sequence[Queue] | None = None,
) -> Capacity:
    """The capacity for runs of these queues, with the reservations. `beside`: the other queues of their cohorts, where
    they are known."""
    turns = Turns.of(each.reserved for each in stored if each.reserved)
    # Jobs before hosts: what ends between the two queries then counts as free.
    known = job_usage(now) if turns.kept else None
    limits = {queue.pk: limits_of(queue) for queue in (*queues, *(cohort_queues(queues) if beside is None else beside))}
    read_placed = functools.cache(placed_runs)
    capacity = Capacity(
        now=now,
        reserve_after_s=settings.DSTACKWEB_RESERVE_AFTER_S,
        reserve_for_s=settings.DSTACKWEB_RESERVE_FOR_S,
        hosts=tuple(host_views()),
        limits=limits,
        queue_usage=queue_usage({queue_id: each for queue_id, each in limits.items() if each != QueueLimits()}),
        ask_backends=reader.offers_for,
        order_from_backends=reader.order,
        idle_instances=idle_offers(now),
        budget_of=functools.cache(lambda project_id: project_budget(project_id, now)),
        read_job_usage=lambda: job_usage(now) if known is None else known,
        preempt_points={queue.pk: queue.preempt_points for queue in queues if queue.preempt_points is not None},
        preempt_gpu_hours={
            queue.pk: queue.preempt_gpu_hours for queue in queues if queue.preempt_gpu_hours is not None
        },
        displaced_work=functools.cache(lambda queue_id: displaced_work(queue_id, now)),
        placed_runs=lambda queue_id: read_placed()[queue_id],
        turns=turns,
    )
    for each in stored:
        if not each.reserved and each.is_kept:
            turns.turn_is_over(each.run_id, each.host_ids, capacity.hosts)
    return capacity


def load_present(queues: Iterable[Queue]) -> tuple[OfferReader, Capacity]:
    """The capacity as it is now, and what offers it reads."""
    reader = OfferReader()
    return reader, load_capacity(list(queues), reader, timezone.now(), load_reservations())


@dataclass(frozen=True)
class StoredReservation:
    """A row as a pass found it. If its run can no longer start, `reserved` is None and `why` says why it ends."""

    run_id: int
    queue_id: int
    reserved: HostReservation | None
    why: str = ""
    is_kept: bool = True
    """Whether something is reserved; False for the memory of one that has lapsed."""
    host_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, reserved: HostReservation) -> StoredReservation:
        """The row of a reservation that was just written."""
        is_kept = reserved.lapsed_at is None
        return cls(reserved.run.id, reserved.run.queue_id, reserved, "", is_kept, reserved.host_ids)


def load_reservations() -> list[StoredReservation]:
    """The stored reservations, those that have lapsed included."""
    return [_stored(row) for row in Reservation.objects.select_related("run__queue__project")]


def _stored(row: Reservation) -> StoredReservation:
    run, is_kept = row.run, row.lapsed_at is None
    try:
        nodes = tuple(ReservedNode.from_row(node) for node in row.nodes)
        spec = EffectiveSpec.model_validate(run.spec)
    except (ValidationError, TypeError, KeyError):
        return StoredReservation(run.pk, run.queue_id, None, ReservationEnd.UNREADABLE, is_kept)
    host_ids = frozenset(node.host_id for node in nodes)
    if run.status != RunStatus.SUBMITTED:
        return StoredReservation(run.pk, run.queue_id, None, ReservationEnd.LEFT, is_kept, host_ids)
    if run.queue.paused and is_kept:
        return StoredReservation(run.pk, run.queue_id, None, ReservationEnd.QUEUE_PAUSED, is_kept, host_ids)
    of = waiting_run(run, run.queue, spec)
    times = (row.made_at, row.starts_at, row.expires_at, row.lapsed_at)
    reserved = HostReservation(of, nodes, *times, reclaims=row.reclaims)
    return StoredReservation.of(reserved)


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
        spec=spec.of_project(queue.project.name, queue.project.least_isolation),
    )


def limits_of(queue: Queue) -> QueueLimits:
    limits = QueueLimits(**{name: getattr(queue, name) for name in LIMITS})
    if not queue.cohort or queue.max_gpus is None:
        return limits
    cohort = queue.project_id, queue.cohort
    bounds = {"borrow_gpus": queue.borrow_gpus, "lend_gpus": queue.lend_gpus}
    return replace(limits, cohort=cohort, **bounds, reclaim=Reclaim(queue.reclaim))


def limits_without_cohorts(queues: Sequence[Queue]) -> dict[int, QueueLimits]:
    """Their limits for an estimate: as if all that a queue may borrow were free."""
    limits = {queue.pk: limits_of(queue) for queue in (*queues, *cohort_queues(queues))}
    cohorts = Cohort.all(limits)
    return {
        queue_id: replace(each, max_gpus=cohorts[queue_id].most(queue_id), cohort=None) if each.cohort else each
        for queue_id, each in limits.items()
    }


def cohort_queues(queues: Sequence[Queue]) -> list[Queue]:
    """The other queues of their cohorts; no statement where none has a cohort."""
    mine = {(queue.project_id, queue.cohort) for queue in queues if queue.cohort}
    if not mine:
        return []
    ids = {queue.pk for queue in queues}
    found = Queue.objects.filter(cohort__in={name for _project, name in mine}).exclude(pk__in=ids).order_by("pk")
    return [queue for queue in found if (queue.project_id, queue.cohort) in mine]


def job_usage(now: dt.datetime) -> list[JobUsage]:
    """What each active job holds of its host, and when it is gone at the latest."""
    columns = ("run_id", "node", "host_id", "cpus", "memory_mib", "gpus", "placed_at", "started_at",
               "status", "stop_grace_s", "status_s")  # fmt: skip
    rows = list(Job.objects.timed().filter(status__in=JOB_ACTIVE, host__isnull=False).values_list(*columns))
    # Not joined: SQLite would scan all jobs, and PostgreSQL with old statistics all runs.
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
            ends_at=_ends_at(started_at or now, None if limit_s is None else limit_s + extended_s, stop_s or 0, now,
                             None if status != JobStatus.TERMINATING else (grace_s or 0) - status_s),
            stopping=status == JobStatus.TERMINATING,
        )
        for run_id, node, host_id, cpus, memory_mib, gpus, placed_at, started_at, status, grace_s, status_s in rows
        for extended_s, limit_s, stop_s in [limits[run_id]]
    ]  # fmt: skip


def _ends_at(
    began: dt.datetime, limit_s: int | None, stop_s: int, now: dt.datetime, left_s: float | None
) -> dt.datetime | None:
    """When a job is gone at the latest; `left_s` are the seconds that one that is stopping has before it is killed."""
    by_limit = latest_end(began, limit_s, stop_s, now)
    if left_s is None:
        return by_limit
    stopped = latest_end(now, 0, max(0, round(left_s)), now)
    return stopped if by_limit is None or stopped is None else min(by_limit, stopped)


def placed_runs() -> dict[int, list[PlacedRun]]:
    """All runs that are placed and have jobs, by queue id."""
    columns = ("pk", "name", "user_id", "user__username", "attempt", "rank", "priority", "queue_id", "queue__name",
               "status", "spec__preemptible", "spec__stop_duration_s", "spec__nodes",
               "spec__requirements__gpu_count_min")  # fmt: skip
    # By status alone: placed runs are few, and SQLite would search the queues' waiting runs otherwise.
    rows = list(Run.objects.filter(status__in=PLACED).values_list(*columns))
    placed = dict(
        Job.objects.filter(run__in=[row[0] for row in rows], status__in=JOB_ACTIVE)
        .order_by("run_id")
        .values_list("run_id")
        .annotate(at=Max("placed_at"))
    )
    found: defaultdict[int, list[PlacedRun]] = defaultdict(list)
    for (run_id, name, user_id, user, attempt, rank, priority, queue_id, queue, status, preemptible, stop_s, nodes,
         gpus) in rows:  # fmt: skip
        if run_id in placed:
            found[queue_id].append(
                PlacedRun(
                    id=run_id, name=name, user_id=user_id, user=user, attempt=attempt, rank=rank, priority=priority,
                    since=placed[run_id], stop_s=stop_s or 0, queue_id=queue_id, queue=queue,
                    gpus=(nodes or 1) * (gpus or 0), preemptible=bool(preemptible),
                    stopping=status == RunStatus.TERMINATING,
                )
            )  # fmt: skip
    return found


def displaced_work(queue_id: int, now: dt.datetime) -> dict[int, list[Displaced]]:
    """What each member's runs in this queue displaced within the last day."""
    found: defaultdict[int, list[Displaced]] = defaultdict(list)
    recent = DisplacedWork.objects.filter(queue=queue_id, at__gt=now - DAY)
    for user_id, at, gpu_ms in recent.values_list("user_id", "at", "gpu_ms"):
        found[user_id].append((at, gpu_ms))
    return found


def queue_usage(limits: Mapping[int, QueueLimits]) -> QueueUsage:
    """Placed runs of queues with these limits, and the GPUs that they request."""
    return QueueUsage.of(selectors.placed_gpus(limits), limits) if limits else QueueUsage()


def usage_of(queue: Queue) -> QueueUsage:
    """That of one queue, with those of its cohort."""
    return queue_usage({each.pk: limits_of(each) for each in (queue, *cohort_queues([queue]))})


@dataclass(frozen=True, slots=True)
class Waiting:
    """A waiting run, as far as an estimate needs it."""

    id: int
    queue_id: int
    user_id: int
    rank: int
    seniority_us: int
    shape: str
    name: str


@dataclass(frozen=True, slots=True)
class Placed:
    """A placed run, with the seconds that it has lasted, and its limit with all that comes on top."""

    id: int
    queue_id: int
    user_id: int
    project_id: int
    name: str
    gpus: int
    lasted_s: float
    limit_s: float | None


def waiting_of(queue: Queue) -> list[Waiting]:
    """A queue's first waiting runs, in order."""
    columns = ("pk", "queue_id", "user_id", "rank", "seniority_us", "shape", "name")
    runs = Run.objects.filter(queue=queue, status=RunStatus.SUBMITTED).order_by("rank", "id")
    return [Waiting(*row) for row in runs.values_list(*columns)[:MOST_FORECAST]]


def placed(since: dict[int, dt.datetime], now: dt.datetime) -> list[Placed]:
    """All placed runs; `since` has the starts of those with jobs on hosts."""
    columns = (
        "pk", "queue_id", "user_id", "project_id", "name", "started_at", "extended_s", "spec__max_duration_s",
        "spec__stop_duration_s", "spec__nodes", "spec__requirements__gpu_count_min",
    )  # fmt: skip
    found = []
    for row in Run.objects.filter(status__in=PLACED).order_by("pk").values_list(*columns):
        pk, queue_id, user_id, project_id, name, started_at, extended_s, limit_s, stop_s, nodes, gpus = row
        began = since.get(pk) or started_at or now
        whole_s = None if limit_s is None else float(limit_s + extended_s + (stop_s or 0) + MARGIN_S)
        lasted_s = max(0.0, (now - began).total_seconds())
        found.append(Placed(pk, queue_id, user_id, project_id, name, (nodes or 1) * (gpus or 0), lasted_s, whole_s))
    return found


def read_specs(firsts: Mapping[str, int]) -> dict[str, EffectiveSpec]:
    """The specs of shapes, of which `firsts` has a run each, without what decides nothing; those that can be read."""
    found, keys = {}, list(firsts.values())
    for first in range(0, len(keys), READ_AT_ONCE):
        part = Run.objects.filter(pk__in=keys[first : first + READ_AT_ONCE]).values_list("shape", "spec")
        for shape, stored in part:
            with contextlib.suppress(ValidationError):
                found[shape] = EffectiveSpec.model_validate(stored).model_copy(update=DECIDES_NOTHING)
    return found
