"""Writing what a pass has decided: many placements and verdicts in one transaction, or none of them (DESIGN 5)."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

from django.db import transaction
from django.utils import timezone

from dstackweb.backends.hosts.fit import Fit
from dstackweb.backends.models import Backend, Host
from dstackweb.runs import hints
from dstackweb.runs.allocations import Claim, Taken, claim_all
from dstackweb.runs.models import Job, Queue, Run, Verdict
from dstackweb.runs.states import RunStatus
from dstackweb.runs.transitions import MovedOn, move_runs, touch
from dstackweb.scheduler.pass_claim import keep
from dstackweb.scheduler.placement import Waits

LIMITS = ("paused", "max_running", "max_gpus", "max_running_per_user", "max_gpus_per_user")
"""What a decision read of its queue, and what must be so still when it is written."""


class Changed(Exception):
    """A queue was paused, or given other limits, after the pass had read it."""


STALE = (Changed, MovedOn, Taken)
"""What the pass read is no longer so; nothing was written."""


@dataclass(frozen=True)
class Placement:
    """A run of a queue (as the pass read it), and a place for each of its nodes."""

    run: Run
    queue: Queue
    fits: tuple[Fit, ...]


Verdicts = Mapping[tuple[Queue, str], Waits | None]
"""Why a queue's runs of a shape wait from now on; None: they don't any more."""


def write(generation: int, backend: Backend, placements: Sequence[Placement], verdicts: Verdicts) -> None:
    """Write all of it. Raises one of STALE, or Outdated when a newer pass has begun, having written nothing.

    Rows are locked in the order in which everybody does: pass, queues, runs, queue counters, hosts.
    """
    now = timezone.now()
    with transaction.atomic():
        keep(generation)
        _hold({one.queue for one in placements} | {queue for queue, _ in verdicts})
        # Copies: the runs stay as they were read, for another try, should all of this roll back.
        runs = [copy(one.run) for one in placements]
        move_runs(runs, RunStatus.PROVISIONING, now=now, data=[{"nodes": _nodes(one)} for one in placements])
        _tell(verdicts, now)
        for queue_id in sorted({queue.pk for queue, _ in verdicts} - {run.queue_id for run in runs}):
            touch(queue_id)
        _claim(
            [
                (_job(run, node, fit, backend, now), fit)
                for run, one in zip(runs, placements, strict=True)
                for node, fit in enumerate(one.fits)
            ]
        )


def _hold(queues: Iterable[Queue]) -> None:
    """Lock the queues, in one order, as they were read."""
    for queue in sorted(queues, key=lambda queue: queue.pk):
        as_read = {name: getattr(queue, name) for name in LIMITS}
        if not Queue.objects.filter(pk=queue.pk, **_guard(as_read)).update(paused=queue.paused):
            raise Changed(f"queue {queue} was changed")


def _guard(values: Mapping[str, object]) -> dict[str, object]:
    return {f"{name}__isnull" if value is None else name: True if value is None else value
            for name, value in values.items()}  # fmt: skip


def _nodes(one: Placement) -> list[dict[str, object]]:
    return [{"node": node, "host": fit.host_name, "gpus": len(fit.gpu_uuids)} for node, fit in enumerate(one.fits)]


def _job(run: Run, node: int, fit: Fit, backend: Backend, now: dt.datetime) -> Job:
    return Job(
        run=run,
        attempt=run.attempt,
        node=node,
        backend=backend,
        host_id=fit.host_id,
        cpus=fit.cpus,
        memory_mib=fit.memory_mib,
        gpus=list(fit.gpu_uuids),
        placed_at=now,
    )


def _claim(jobs: Sequence[tuple[Job, Fit]]) -> None:
    Job.objects.bulk_create(job for job, _ in jobs)
    claim_all([(job, Claim(fit.host_id, fit.cpus, fit.memory_mib, fit.gpu_uuids)) for job, fit in jobs])
    hosts = Host.objects.in_bulk({fit.host_id for _, fit in jobs})
    for job, fit in jobs:
        job.host = hosts[fit.host_id]
    hints.want_look(job for job, _ in jobs)


def _tell(verdicts: Verdicts, now: dt.datetime) -> None:
    """Keep new verdicts, end others."""
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
