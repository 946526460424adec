"""Which run got the GPUs that a policy stop freed: recorded on the stopped run and in the ledger."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Collection, Sequence
from uuid import UUID

from django.db import transaction

from dstackweb.gpus.models import PolicyStop
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.models import Allocation, Job
from dstackweb.runs.selectors import TEXTS
from dstackweb.runs.states import JOB_ACTIVE
from dstackweb.runs.transitions import lock_run, record

RECENT = dt.timedelta(hours=24)
"""Older stops are not followed up."""
MAX_STOPS = 200
"""How many stops are checked, newest first."""

Resource = str | UUID
"""A GPU by its NVML UUID, or a cloud instance by its id."""


def record_next_runs(now: dt.datetime) -> int:
    """Find the run that now holds what each recent stop freed; returns how many were found.

    Repeatable: what one pass misses, the next one finds in the same rows. A fixed number of queries.
    """
    recent = PolicyStop.objects.filter(observed=False, next_run=None, run__isnull=False, at__gt=now - RECENT)
    stops = list(recent.order_by("-at")[:MAX_STOPS])
    if not stops:
        return 0
    places = _resources_of(stops)
    holders = _jobs_on({place for of_stop in places for place in of_stop})
    return sum(
        _record_next(stop, min(after, key=lambda job: (job.placed_at, job.node)))
        for stop, of_stop in zip(stops, places, strict=True)
        if (after := [job for place in of_stop for job in holders[place] if _is_after(job, stop)])
    )


def _resources_of(stops: Sequence[PolicyStop]) -> list[set[Resource]]:
    """The GPUs and instances that each stop freed."""
    machines: defaultdict[tuple[int | None, int], set[Resource]] = defaultdict(set)
    of_runs = Job.objects.filter(run__in=[stop.run_id for stop in stops], instance__isnull=False)
    for run_id, attempt, instance_id in of_runs.values_list("run", "attempt", "instance"):
        machines[run_id, attempt].add(instance_id)
    return [{*stop.gpus, *machines[stop.run_id, stop.attempt]} for stop in stops]


def _jobs_on(places: Collection[Resource]) -> defaultdict[Resource, list[Job]]:
    """The jobs that hold each resource now."""
    uuids = [place for place in places if isinstance(place, str)]
    on_gpus = Allocation.objects.filter(gpu__uuid__in=uuids).values_list("job", "gpu__uuid")
    found: list[tuple[UUID, Resource]] = [(job_id, str(uuid)) for job_id, uuid in on_gpus]
    machines = [place for place in places if isinstance(place, UUID)]
    on_machines = Job.objects.filter(instance__in=machines, status__in=JOB_ACTIVE).values_list("pk", "instance")
    found += [(job_id, instance_id) for job_id, instance_id in on_machines if instance_id is not None]
    lean = Job.objects.select_related("run").defer("run__spec", *(f"run__{text}" for text in TEXTS))
    jobs = lean.in_bulk({job_id for job_id, _place in found})
    holders: defaultdict[Resource, list[Job]] = defaultdict(list)
    for job_id, place in found:
        if (job := jobs.get(job_id)) is not None:
            holders[place].append(job)
    return holders


def _is_after(job: Job, stop: PolicyStop) -> bool:
    return job.run_id != stop.run_id and job.placed_at >= stop.at


def _record_next(stop: PolicyStop, job: Job) -> bool:
    """Record the next run of a stop, once."""
    assert stop.run_id is not None
    with transaction.atomic():
        run = lock_run(stop.run_id)
        won = PolicyStop.objects.filter(pk=stop.pk, next_run=None).update(next_run=job.run_id, next_at=job.placed_at)
        if won:
            # Members who cannot see another project's run must not learn its name.
            mine = job.run.project_id == stop.project_id
            record(run, RunEventKind.UTILIZATION_NEXT, {"run": job.run.name} if mine else {}, attempt=stop.attempt)
    return bool(won)
