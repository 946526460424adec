"""Judges jobs that leave their GPUs unused, and applies their utilization policies, in a worker: what brings samples
only stores them. Which jobs are due follows from rows alone, and each is judged again with its run's row locked. Any
step may be lost, doubled or killed: the next tick repeats it."""

from __future__ import annotations

import datetime as dt
import logging
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, F, OuterRef, QuerySet

from dstackweb.gpus import binding, exemptions, window
from dstackweb.gpus.models import GpuSeries, JobPolicy, PolicyStop, interval_ms
from dstackweb.gpus.policy_status import index_of
from dstackweb.gpus.window import PolicyAction, PolicyVerdict, VerdictKind
from dstackweb.lib.times import to_moment, to_ms
from dstackweb.runs.attempts import settle_run, stop_jobs
from dstackweb.runs.codes import MessageCode, RunEventKind
from dstackweb.runs.models import Allocation, Job, Run
from dstackweb.runs.selectors import TEXTS, in_order
from dstackweb.runs.shared_rows import shared_rows_last, touch
from dstackweb.runs.states import JOB_ACTIVE, JobStatus, Reason, RunStatus
from dstackweb.runs.transitions import lock_run, move_run, record
from dstackweb.spec.codes import UtilizationAction

log = logging.getLogger(__name__)

RUNS_SEARCHED = 50
"""How many of a queue's first runs are searched for one that needs GPUs."""
FOLLOWED_FOR = dt.timedelta(hours=24)
"""How long after a stop the run that got its GPUs is looked for."""
MAX_STOPS = 200
"""How many stops are followed up, newest first."""

Resource = str | UUID
"""A GPU by its NVML UUID, or a cloud instance by its id."""


@dataclass(frozen=True)
class _BoundJob:
    """A running job bound to a policy at `now`, with its GPU series, and how its project enforces that policy."""

    job: Job
    bound: JobPolicy
    series: Sequence[GpuSeries]
    now: dt.datetime
    exempt_until: dt.datetime | None
    observe_only: bool

    @property
    def run(self) -> Run:
        return self.job.run

    @property
    def now_ms(self) -> int:
        return to_ms(self.now)

    @cached_property
    def verdict(self) -> PolicyVerdict:
        """The verdict on its stretches of low use."""
        return binding.verdict_of(self.bound, self.job.gpus, self.series, self.now_ms)

    @property
    def is_outdated(self) -> bool:
        """Whether the job is bound to a policy other than its run's."""
        return not binding.is_bound_to(self.bound, self.job, binding.policy_of(self.run))

    @property
    def notifies(self) -> bool:
        return self.bound.action == UtilizationAction.NOTIFY

    @property
    def exempt_until_ms(self) -> int | None:
        return to_ms(self.exempt_until) if self.exempt_until else None

    @property
    def due(self) -> PolicyAction:
        """What its policy asks for now."""
        enforcement = window.Enforcement(
            window_ms=self.bound.time_window_s * 1000,
            reports_only=self.notifies or self.observe_only,
            noticed_ms=self.bound.noticed_ms,
            acted_ms=self.bound.acted_ms,
            paused_until_ms=self.exempt_until_ms,
        )
        return window.next_action(enforcement, self.verdict, self.now_ms)

    def event_data(self, verdict: PolicyVerdict) -> dict[str, Any]:
        """The data of events about a low stretch."""
        assert verdict.low_since_ms is not None
        return {
            "gpu": index_of(self.job, self.series, verdict),
            "node": self.job.node,
            "nodes": self.run.spec.get("nodes", 1),
            "min": self.bound.min_gpu_utilization,
            "window_s": self.bound.time_window_s,
            "scope": self.bound.scope,
            "low_since": to_moment(verdict.low_since_ms).isoformat(),
        }


def has_low_jobs(now: dt.datetime) -> bool:
    """Whether there is anything to judge."""
    return _low_jobs(now).exists()


def judge_jobs(now: dt.datetime) -> dict[UUID, PolicyAction]:
    """Do what the policies of low jobs ask for at `now`; returns what was done, by job.

    Mostly nothing is due: then no row is locked and no page is woken. A job that fails doesn't stop the others.
    """
    done: dict[UUID, PolicyAction] = {}
    for node in _bound_jobs(list(_low_jobs(now)), now):
        if not node.is_outdated and node.due == PolicyAction.NOTHING:
            continue
        try:
            action = apply_policy(node.job, now)
        except Exception:
            log.exception("%s: policy not applied, will retry", node.job)
            continue
        if action != PolicyAction.NOTHING:
            done[node.job.pk] = action
            log.info(
                "%s of %s: %s, policy %s %% over %s s",
                node.job, node.run.project, action.value, node.bound.min_gpu_utilization, node.bound.time_window_s,
            )  # fmt: skip
    return done


def _low_jobs(now: dt.datetime) -> QuerySet[Job]:
    """Running jobs of which a GPU has been low for half of the window: before that nothing is due."""
    now_ms = to_ms(now)
    low = GpuSeries.objects.filter(
        job=OuterRef("pk"),
        low_since_ms__lte=now_ms - 500 * OuterRef("policy__time_window_s"),
        low_last_ms__gte=now_ms - window.MAX_GAP * interval_ms(),
    )
    running = Job.objects.filter(status=JobStatus.RUNNING, exited_at=None, attempt=F("run__attempt"))
    judged = running.filter(run__status=RunStatus.RUNNING, policy__min_gpu_utilization__isnull=False)
    return judged.filter(Exists(low)).select_related("run__project").defer(*(f"run__{text}" for text in TEXTS))


def apply_policy(job: Job, now: dt.datetime) -> PolicyAction:
    """Do what a job's policy asks for at `now`; returns what was done: nothing for one whose commands do not run."""
    with shared_rows_last():
        return _apply_locked(lock_run(job.run_id), job.pk, now)


def _apply_locked(run: Run, job_id: UUID, now: dt.datetime) -> PolicyAction:
    """The same with the run's row locked."""
    if run.status != RunStatus.RUNNING:
        return PolicyAction.NOTHING
    jobs = list(Job.objects.filter(run=run, attempt=run.attempt, status__in=JOB_ACTIVE).order_by("node"))
    for job in jobs:
        job.run = run
    running = [job for job in jobs if job.status == JobStatus.RUNNING and job.exited_at is None]
    nodes = _bound_jobs(running, now, lock=True)
    mine = next((node for node in nodes if node.job.pk == job_id), None)
    if mine is None:
        return PolicyAction.NOTHING
    if mine.is_outdated:
        binding.rebind(mine.job)
        return PolicyAction.NOTHING
    due = mine.due
    if due == PolicyAction.NOTHING:
        return due
    if due == PolicyAction.NOTICE:
        return _notice(mine, nodes)
    verdict = binding.confirmed(mine.bound, mine.job.gpus, mine.series, mine.now_ms)
    if verdict.kind != VerdictKind.STOP:
        # A stop needs the stored samples as well.
        return PolicyAction.NOTHING
    if due == PolicyAction.STOP:
        return _stop(mine, verdict, jobs)
    return _report_would_stop(mine, verdict, nodes, jobs)


def _bound_jobs(jobs: Sequence[Job], now: dt.datetime, *, lock: bool = False) -> list[_BoundJob]:
    """The jobs that are bound to a policy, including the policy of having none."""
    ids = [job.pk for job in jobs]
    series: defaultdict[UUID | None, list[GpuSeries]] = defaultdict(list)
    rows = GpuSeries.objects.filter(job__in=ids).order_by("pk")
    for one in rows.select_for_update(no_key=True) if lock else rows.defer("processes"):
        series[one.job_id].append(one)
    policies = {bound.job_id: bound for bound in JobPolicy.objects.filter(job__in=ids)}
    kept_until = exemptions.exempt_until([job.run_id for job in jobs])
    rules = exemptions.policies_by_project([job.run.project_id for job in jobs])
    return [
        _BoundJob(
            job, policies[job.pk], series[job.pk], now, kept_until.get(job.run_id),
            rules[job.run.project_id].observe_only,
        ) for job in jobs if job.pk in policies
    ]  # fmt: skip


def _notice(node: _BoundJob, nodes: Sequence[_BoundJob]) -> PolicyAction:
    """Record a notice, once per low stretch of the run, whichever node it began on."""
    low_ms = node.verdict.low_since_ms
    JobPolicy.objects.filter(pk=node.job.pk).update(noticed_ms=low_ms)
    if any(other.bound.noticed_ms == other.verdict.low_since_ms is not None for other in nodes if other is not node):
        return PolicyAction.NOTHING
    warning = window.stop_warning(node.verdict, node.bound.time_window_s * 1000, node.exempt_until_ms, node.now_ms)
    assert warning.stops_ms is not None, "a notice is due before a stop only"
    stops_at = to_moment(warning.stops_ms).isoformat()
    _record(node, RunEventKind.UTILIZATION_NOTICE, node.event_data(node.verdict) | {"stops_at": stops_at})
    return PolicyAction.NOTICE


def _report_would_stop(
    node: _BoundJob, verdict: PolicyVerdict, nodes: Sequence[_BoundJob], jobs: Sequence[Job]
) -> PolicyAction:
    """Record that the run would have been stopped, once per low stretch. With action `notify` this is the notice."""
    low_ms, notifies = node.verdict.low_since_ms, node.notifies
    stamps = {"acted_ms": low_ms} | ({"noticed_ms": low_ms} if notifies else {})
    JobPolicy.objects.filter(pk=node.job.pk).update(**stamps)
    if any(other.bound.acted_ms == other.verdict.low_since_ms is not None for other in nodes if other is not node):
        return PolicyAction.NOTHING
    _add_to_ledger(node, verdict, jobs, observed=True)
    _record(node, RunEventKind.UTILIZATION_WOULD_STOP, node.event_data(verdict) | {"notifies": notifies})
    return PolicyAction.WOULD_STOP


def _record(node: _BoundJob, kind: RunEventKind, data: dict[str, Any]) -> None:
    record(node.run, kind, data, node=node.job.node, attempt=node.job.attempt, at=node.now)
    touch(node.run.queue_id)


def _stop(node: _BoundJob, verdict: PolicyVerdict, jobs: Sequence[Job]) -> PolicyAction:
    """Stop the run, all of its nodes, with an entry in the ledger."""
    run, data = node.run, node.event_data(verdict)
    detail = {"code": MessageCode.LOW_UTILIZATION, **data}
    if first := _first_waiting_for_gpus(run):
        data["next"] = first
    JobPolicy.objects.filter(pk=node.job.pk).update(acted_ms=node.verdict.low_since_ms)
    _add_to_ledger(node, verdict, jobs, observed=False)
    move_run(
        run,
        RunStatus.TERMINATING,
        now=node.now,
        event=RunEventKind.UTILIZATION_STOP,
        data={"reason": Reason.UTILIZATION_POLICY, **data},
        stop_reason=Reason.UTILIZATION_POLICY,
        status_detail=detail,
    )
    stop_jobs(run, Reason.UTILIZATION_POLICY, grace_s=None)
    settle_run(run)
    return PolicyAction.STOP


def _add_to_ledger(node: _BoundJob, verdict: PolicyVerdict, jobs: Sequence[Job], *, observed: bool) -> None:
    """Add a stop to the ledger: what the run held, and until when it could have."""
    assert verdict.low_since_ms is not None
    assert node.bound.min_gpu_utilization is not None
    run = node.run
    began = min(job.started_at for job in jobs if job.started_at is not None)
    PolicyStop.objects.create(
        project_id=run.project_id,
        run=run,
        run_name=run.name,
        user_id=run.user_id,
        attempt=run.attempt,
        node=node.job.node,
        at=node.now,
        observed=observed,
        min_gpu_utilization=node.bound.min_gpu_utilization,
        time_window_s=node.bound.time_window_s,
        scope=node.bound.scope,
        low_since=to_moment(verdict.low_since_ms),
        gpu_index=index_of(node.job, node.series, verdict),
        gpus=[uuid for job in jobs for uuid in job.gpus],
        price=sum((job.price for job in jobs), Decimal(0)),
        until=began + dt.timedelta(seconds=run.limit_s) if run.limit_s is not None else None,
    )


def _first_waiting_for_gpus(run: Run) -> str:
    first = in_order(run.queue).values_list("name", "spec__requirements__gpu_count_min")[:RUNS_SEARCHED]
    return next((str(name) for name, wants in first if wants), "")


def record_next_runs(now: dt.datetime) -> int:
    """Find the run that now holds what each recent stop freed; returns how many were found. Repeatable: what one pass
    misses, the next one finds in the same rows. A fixed number of queries."""
    recent = PolicyStop.objects.filter(observed=False, next_run=None, run__isnull=False, at__gt=now - FOLLOWED_FOR)
    stops = list(recent.order_by("-at")[:MAX_STOPS])
    if not stops:
        return 0
    places = _resources_of(stops)
    holders = _jobs_on({place for of_stop in places for place in of_stop})
    return sum(
        _record_next(stop, min(after, key=lambda job: (job.placed_at, job.node)))
        for stop, of_stop in zip(stops, places, strict=True)
        if (after := [j for p in of_stop for j in holders[p] if j.run_id != stop.run_id and j.placed_at >= stop.at])
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
