"""Writes the decisions of a pass: many placements and wait reasons in one transaction, or none."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from uuid import UUID

from django.db import transaction
from django.utils import timezone

from dstackweb.backends.hosts.fit import Fit
from dstackweb.backends.models import Backend, Host, Instance
from dstackweb.runs import wakeups
from dstackweb.runs.allocations import Claim, ClaimFailed, claim_all
from dstackweb.runs.models import Job, Queue, Run, Verdict
from dstackweb.runs.queue.queues import LIMITS
from dstackweb.runs.states import RunStatus
from dstackweb.runs.transitions import RunChanged, move_runs
from dstackweb.scheduler.cloud import idle
from dstackweb.scheduler.cloud.provisioning import assign_offer, new_instance
from dstackweb.scheduler.passes import reservations
from dstackweb.scheduler.passes.claim import renew
from dstackweb.scheduler.passes.reservations import ReservationChange
from dstackweb.scheduler.placement.hosts import HOSTS, HostPlacement, Wait
from dstackweb.scheduler.placement.offers import OfferPlacement

GUARDED_FIELDS = ("paused", *LIMITS)
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


WaitChanges = Mapping[tuple[Queue, str], Wait | None]
"""By queue and shape: why its runs wait from now on; None: they no longer do."""


def write_decisions(
    generation: int,
    backends: Mapping[str, Backend],
    placements: Sequence[Placement],
    verdicts: WaitChanges,
    change: ReservationChange | None = None,
) -> None:
    """Write all of it, with the change of the reservation; `backends` by name.

    Raises one of STALE, or ClaimLost when a newer pass has begun, having written nothing.
    Rows are locked in the common order: pass, queues, runs, queue counters, progress, hosts.
    """
    now = timezone.now()
    with transaction.atomic():
        renew(generation)
        _lock_queues({one.queue for one in placements} | {queue for queue, _ in verdicts})
        seen = reservations.write_reservation(change, now) if change else set()
        # Copies: the runs stay as they were read for a retry after a rollback.
        runs = [copy(one.run) for one in placements]
        _write_waits(verdicts, now)
        move_runs(
            runs,
            RunStatus.PROVISIONING,
            now=now,
            data=[{"nodes": _nodes(one)} for one in placements],
            touched={queue.pk for queue, _ in verdicts} | seen,
        )
        _make_jobs(zip(runs, placements, strict=True), backends, now)


def _lock_queues(queues: Iterable[Queue]) -> None:
    """Lock the queues in one order, unless they have changed. Raises InputsChanged."""
    for queue in sorted(queues, key=lambda queue: queue.pk):
        as_read = {name: getattr(queue, name) for name in GUARDED_FIELDS}
        if not Queue.objects.filter(pk=queue.pk, **_guard(as_read)).update(paused=queue.paused):
            raise InputsChanged(f"queue {queue} was changed")


def _guard(values: Mapping[str, object]) -> dict[str, object]:
    return {f"{name}__isnull" if value is None else name: True if value is None else value
            for name, value in values.items()}  # fmt: skip


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


def _make_jobs(placed: Iterable[tuple[Run, Placement]], backends: Mapping[str, Backend], now: dt.datetime) -> None:
    """Create the nodes' jobs: on hosts with their claims, on clouds with an idle or a new instance."""
    jobs: list[Job] = []
    claims: list[tuple[Job, Claim]] = []
    instances: list[Instance] = []
    reused: list[tuple[UUID, Job]] = []
    for run, one in placed:
        made = [Job(run=run, attempt=run.attempt, node=node, placed_at=now) for node in range(len(one.where))]
        jobs += made
        if isinstance(one.where, HostPlacement):
            claims += [
                (_on_host(job, fit, backends), _claim(fit)) for job, fit in zip(made, one.where.fits, strict=True)
            ]
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
        if not idle.take(instance_id, job.pk, job.run.project_id, now):
            raise InputsChanged(f"instance {instance_id} is no longer idle")
        Job.objects.filter(pk=job.pk).update(instance=instance_id)
        job.instance_id = instance_id
    hosts = Host.objects.in_bulk({claim.host_id for _, claim in claims})
    for job, claim in claims:
        job.host = hosts[claim.host_id]
    wakeups.request_job_checks(jobs)


def _on_host(job: Job, fit: Fit, backends: Mapping[str, Backend]) -> Job:
    job.backend, job.host_id = backends[HOSTS], fit.host_id
    job.cpus, job.memory_mib, job.gpus = fit.cpus, fit.memory_mib, list(fit.gpu_uuids)
    return job


def _claim(fit: Fit) -> Claim:
    return Claim(fit.host_id, fit.cpus, fit.memory_mib, fit.gpu_uuids)


def _write_waits(verdicts: WaitChanges, now: dt.datetime) -> None:
    """Store new wait reasons, delete ended ones."""
    ended: defaultdict[Queue, list[str]] = defaultdict(list)
    for (queue, shape), waits in verdicts.items():
        if waits is None:
            ended[queue].append(shape)
    for queue, shapes in ended.items():
        Verdict.objects.filter(queue=queue, shape__in=shapes).delete()
    Verdict.objects.bulk_create(
        [
            Verdict(queue=queue, shape=shape, reason=waits.reason, data=waits.data, at=now)
            for (queue, shape), waits in verdicts.items()
            if waits is not None
        ],
        update_conflicts=True,
        unique_fields=["queue", "shape"],
        update_fields=["reason", "data", "at"],
    )
