"""Writes the decisions of a pass: many placements and wait reasons in one transaction, or none."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

from django.db.models import Q
from django.utils import timezone

from dstackweb.backends.hosts.fit import HOSTS, Fit
from dstackweb.backends.models import Backend, Host, Instance
from dstackweb.lib import sql
from dstackweb.lib.models import Watch
from dstackweb.runs import past_log, wakeups
from dstackweb.runs.attempts import settle_run, stop_jobs
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.models import DisplacedWork, Job, PastVerdict, Queue, Run, Verdict
from dstackweb.runs.past_log import StoredWait
from dstackweb.runs.queue.queues import COHORT, LIMITS
from dstackweb.runs.shared_rows import ClaimFailed, claim_all, shared_rows_last, touch
from dstackweb.runs.states import Reason, RunStatus
from dstackweb.runs.transitions import RunChanged, lock_run, move_run, move_runs, record
from dstackweb.scheduler.cloud.instances import assign_offer, new_instance, take_idle
from dstackweb.scheduler.models import PassState, Reservation
from dstackweb.scheduler.passes.loading import StoredReservation
from dstackweb.scheduler.placement.displacing import DAY, held_gpu_ms, is_reclaim
from dstackweb.scheduler.placement.hosts import HostPlacement, PlacedRun, Wait
from dstackweb.scheduler.placement.offers import OfferPlacement
from dstackweb.scheduler.placement.reservation import HostReservation

GUARDED_FIELDS = ("paused", *LIMITS, *COHORT, "preempt_points", "preempt_gpu_hours")
"""Queue fields that a decision was based on: they must be unchanged when it is written."""


class InputsChanged(Exception):
    """A queue's settings or an idle instance changed after the pass had read them."""


STALE = (InputsChanged, RunChanged, ClaimFailed)
"""What the pass read has changed; nothing was written."""


@dataclass(frozen=True)
class Placement:
    """A run and its queue as the pass read them, and where its nodes go."""

    run: Run
    queue: Queue
    where: HostPlacement | OfferPlacement


@dataclass(frozen=True)
class Displacement:
    """A waiting run, its queue, and whom the pass stops for it, which may be of other `queues`; all as read."""

    run: Run
    queue: Queue
    victims: Sequence[PlacedRun]
    queues: Sequence[Queue] = ()

    @property
    def reclaims(self) -> bool:
        """Whether its queue takes back what it has lent to others."""
        return is_reclaim(self.queue.pk, self.victims)


@dataclass(frozen=True)
class ReservationChange:
    """A pass's change of one run's reservation. `why`: the code of why the previous one ends, if it does."""

    run_id: int
    queue_id: int
    before: StoredReservation | None
    after: HostReservation | None
    why: str


WaitChanges = Mapping[tuple[Queue, str], Wait | None]
"""By queue and shape: why its runs wait from now on; None: they no longer do."""
KnownWaits = dict[tuple[int, str], StoredWait]
"""The verdicts of rows, by queue id and shape."""


def write_decisions(
    generation: int,
    backends: Mapping[str, Backend],
    placements: Sequence[Placement],
    verdicts: WaitChanges,
    known: KnownWaits,
    changes: Sequence[ReservationChange] = (),
    beside: Iterable[Queue] = (),
) -> None:
    """Write all of it, with the changes of reservations; `backends` by name, `known` has the rows before and after.

    `beside` are queues whose settings decided as well: those of a cohort.

    Raises one of STALE, or ClaimLost when a newer pass has begun, having written nothing.
    Rows are locked in the common order: pass, queues, runs, hosts, queue counters, progress.
    """
    now = timezone.now()
    with shared_rows_last():
        PassState.renew(generation)
        _lock_queues({one.queue for one in placements} | {queue for queue, _ in verdicts} | set(beside))
        for change in changes:
            _write_reservation(change, now)
        # Copies: the runs stay as they were read for a retry after a rollback.
        runs = [copy(one.run) for one in placements]
        waits = _write_waits(verdicts, known, now)
        move_runs(runs, RunStatus.PROVISIONING, now=now, data=[{"nodes": _nodes(one)} for one in placements])
        for queue_id in {queue.pk for queue, _ in verdicts}:
            touch(queue_id)
        _make_jobs(list(zip(runs, placements, strict=True)), backends, now)
    for key in {(queue.pk, shape) for queue, shape in verdicts}:
        known.pop(key, None)
    known |= waits


def _lock_queues(queues: Iterable[Queue]) -> None:
    """Lock the queues in one order, unless they have changed. Raises InputsChanged."""
    for queue in sorted(queues, key=lambda queue: queue.pk):
        as_read = {name: getattr(queue, name) for name in GUARDED_FIELDS}
        guard = [Q(**{f"{name}__isnull": True} if value is None else {name: value}) for name, value in as_read.items()]
        if not Queue.objects.filter(*guard, pk=queue.pk).update(paused=queue.paused):
            raise InputsChanged(f"queue {queue} was changed")


def write_displacements(
    generation: int, displacements: Sequence[Displacement], changes: Sequence[ReservationChange]
) -> None:
    """Stop the victims, each with its `stop_duration`, and reserve what they leave. In a transaction of its own: it
    locks hosts of jobs that no one claimed, as placements do, each by id. Raises one of STALE, or ClaimLost."""
    now = timezone.now()
    with shared_rows_last():
        PassState.renew(generation)
        _lock_queues({queue for one in displacements for queue in (one.queue, *one.queues)})
        for change in changes:
            _write_reservation(change, now)
        _displace(displacements, now)


def _displace(displacements: Sequence[Displacement], now: dt.datetime) -> None:
    waiting = {one.run.pk: one.run for one in displacements}
    victims = {victim.id: (victim, one) for one in displacements for victim in one.victims}
    queue_of = {one.run.pk: one.queue.pk for one in displacements}
    queue_of |= {victim.id: victim.queue_id for victim, _by in victims.values()}
    runs: dict[int, Run] = {}
    for run_id in sorted(queue_of):
        try:
            run = runs[run_id] = lock_run(run_id)
        except Run.DoesNotExist:
            raise InputsChanged("a run was removed") from None
        seen = waiting.get(run_id) or victims[run_id][0]
        expected = (RunStatus.SUBMITTED,) if run_id in waiting else (RunStatus.PROVISIONING, RunStatus.RUNNING)
        same = (run.attempt, run.rank, run.priority) == (seen.attempt, seen.rank, seen.priority)
        if run.status not in expected or not same or run.queue_id != queue_of[run_id]:
            raise InputsChanged(f"run {run.name} was changed")
    for run_id, (_victim, by) in sorted(victims.items()):
        run, first = runs[run_id], runs[by.run.pk]
        data = {"reason": Reason.PREEMPTED, "run": first.name, "user": first.user.get_username()}
        if by.reclaims:
            data["queue"] = by.queue.name
        move_run(run, RunStatus.TERMINATING, now=now, event=RunEventKind.DISPLACED, data=data)
        stop_jobs(run, Reason.PREEMPTED, grace_s=None)
        settle_run(run)
    for one in displacements:
        if not one.reclaims:
            DisplacedWork.objects.filter(queue=one.queue, at__lte=now - DAY).delete()
            lost_ms = held_gpu_ms(one.victims, now)
            DisplacedWork.objects.create(queue=one.queue, user_id=one.run.user_id, at=now, gpu_ms=lost_ms)
        displaced = [
            {"run": victim.name, "user": victim.user, **({"queue": victim.queue} if one.reclaims else {})}
            for victim in one.victims
        ]
        record(runs[one.run.pk], RunEventKind.DISPLACES, {"runs": displaced}, at=now)


def _nodes(one: Placement) -> list[dict[str, object]]:
    """Where the nodes went, as event data."""
    if isinstance(one.where, HostPlacement):
        return [
            {"node": node, "host": fit.host_name, "gpus": len(fit.gpu_uuids)} for node, fit in enumerate(one.where.fits)
        ]
    return [
        {
            "node": node,
            "backend": offer.backend,
            "region": offer.region,
            "instance_type": offer.instance_type,
            "spot": offer.spot,
            "price": str(offer.price),
            "gpus": offer.gpu_count,
            **({"idle": True} if "instance" in offer.detail else {}),
        }
        for node, offer in enumerate(one.where.offers)
    ]


def _make_jobs(placed: Sequence[tuple[Run, Placement]], backends: Mapping[str, Backend], now: dt.datetime) -> None:
    """Create the nodes' jobs: on hosts with their claims, on clouds with an idle or a new instance."""
    jobs: list[Job] = []
    claims: list[tuple[Job, Fit]] = []
    instances: list[Instance] = []
    reused: list[tuple[UUID, Job]] = []
    now_s = Watch.now_s() if placed else 0.0
    for run, one in placed:
        made = [
            Job(run=run, attempt=run.attempt, node=node, placed_at=now, status_at_s=now_s, heard_at_s=now_s)
            for node in range(len(one.where))
        ]
        jobs += made
        if isinstance(one.where, HostPlacement):
            for job, fit in zip(made, one.where.fits, strict=True):
                job.backend, job.host_id = backends[HOSTS], fit.host_id
                job.cpus, job.memory_mib, job.gpus = fit.cpus, fit.memory_mib, list(fit.gpu_uuids)
                job.gpu_count = len(job.gpus)
                claims.append((job, fit))
        else:
            for job, offer in zip(made, one.where.offers, strict=True):
                assign_offer(job, offer, backends[offer.backend])
                if (instance := new_instance(job, offer)) is not None:
                    instances.append(instance)
                elif "instance" in offer.detail:
                    reused.append((UUID(offer.detail["instance"]), job))
    Instance.objects.bulk_create(instances)
    Job.objects.bulk_create(jobs)
    claim_all(claims)
    for instance_id, job in sorted(reused, key=lambda pair: pair[0]):
        if not take_idle(instance_id, job.pk, job.run.project_id, now):
            raise InputsChanged(f"instance {instance_id} is no longer idle")
        Job.objects.filter(pk=job.pk).update(instance=instance_id)
        job.instance_id = instance_id
    hosts = Host.objects.in_bulk({claim.host_id for _, claim in claims})
    for job, claim in claims:
        job.host = hosts[claim.host_id]
    wakeups.request_job_checks(jobs)


def _write_waits(verdicts: WaitChanges, known: KnownWaits, now: dt.datetime) -> KnownWaits:
    """Store new wait reasons, delete ended ones, and note what they replace; returns the new rows."""
    ended: defaultdict[Queue, list[str]] = defaultdict(list)
    past: list[PastVerdict] = []
    stored: KnownWaits = {}
    for (queue, shape), waits in verdicts.items():
        before = known.get((queue.pk, shape))
        logged_at = past_log.logged_from(before, None if waits is None else waits.reason, now)
        if before is not None and logged_at == now:
            past.append(past_log.past_verdict(queue.pk, shape, before, now))
        if waits is None:
            ended[queue].append(shape)
        else:
            stored[queue.pk, shape] = StoredWait(waits.reason, dict(waits.data), logged_at)
    PastVerdict.objects.bulk_create(past)
    for queue, shapes in ended.items():
        Verdict.objects.filter(queue=queue, shape__in=shapes).delete()
    rows = [Verdict(queue_id=queue, shape=shape, at=now, **one._asdict()) for (queue, shape), one in stored.items()]
    sql.write(rows, ["queue", "shape"], ["reason", "data", "at", "logged_at"])
    return stored


def _write_reservation(change: ReservationChange, now: dt.datetime) -> None:
    """Write the row and the run's events. Locks rows of runs: call in the pass's transaction, in the order of runs,
    before queue counters and hosts."""
    touch(change.queue_id)
    before, after = change.before, change.after
    was_kept, is_kept = before is not None and before.is_kept, after is not None and after.lapsed_at is None
    if after is None:
        Reservation.objects.filter(run=change.run_id).delete()
    else:
        known = before.reserved if before else None
        row = {
            # One that isn't the one before with other times is made when it is written: after what its pass placed
            # before it, which it takes to end as well.
            "made_at": now if known is None or known.made_at != after.made_at else after.made_at,
            "starts_at": after.starts_at,
            "expires_at": after.expires_at,
            "lapsed_at": after.lapsed_at,
            "reclaims": after.reclaims,
            "nodes": [asdict(node) for node in after.nodes],
        }
        Reservation.objects.update_or_create(run_id=after.run.id, defaults=row)
    if was_kept and not is_kept:
        _record(change.run_id, RunEventKind.RESERVATION_ENDED, {"reason": change.why}, now)
    if after is not None and is_kept and not was_kept:
        data = {
            "hosts": sorted({node.host for node in after.nodes}),
            "gpus": sum(len(node.gpus) for node in after.nodes),
            "starts_at": after.starts_at.isoformat() if after.starts_at else None,
            "expires_at": after.expires_at.isoformat() if after.expires_at and not after.starts_at else None,
        }
        _record(after.run.id, RunEventKind.RESERVED, data, now)


def _record(run_id: int, kind: RunEventKind, data: dict[str, Any], now: dt.datetime) -> None:
    """Record an event, unless the run was deleted meanwhile."""
    run = Run.objects.filter(pk=run_id).first()
    if run is not None:
        record(run, kind, data, at=now)
