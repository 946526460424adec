"""How runs stand with their utilization policies now: what pages, the API and the command line show.

Judged from the same rows and by the same function as the watcher does it.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import F

from dstackweb.gpus.clock import interval_ms, to_moment, to_ms
from dstackweb.gpus.models import GpuSeries, Keep, ProjectPolicies
from dstackweb.gpus.policy.binding import stretches, window_of
from dstackweb.gpus.policy.exemptions import policies_by_project
from dstackweb.gpus.policy.warnings import Warned, warned
from dstackweb.gpus.policy.window import UNKNOWN, Kind, Verdict, judge
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import JOB_ACTIVE, PLACED, JobStatus
from dstackweb.spec.effective import UtilizationPolicy


@dataclass(frozen=True)
class Standing:
    """How a run stands with its policy; of several nodes, that which is stopped first speaks.

    `source` is the policy's provenance (`profiles.resolve.Effective`). `low_since` is from when it has been low, and
    `stops_at` when it is stopped if it goes on so: both None while it isn't low, or that is unknown. `noticed`: people
    were told of this low stretch. `gpu_index` is NVML's of the GPU that is low; None with the scope `all`.
    `paused_until` is until when `keep` (the newest) lasts; None when none does.
    """

    policy: UtilizationPolicy
    source: dict[str, Any]
    verdict: Verdict
    badge: bool
    noticed: bool
    low_since: dt.datetime | None
    stops_at: dt.datetime | None
    gpu_index: int | None
    node: int
    paused_until: dt.datetime | None
    keep: Keep | None
    keeps_left: int
    observe_only: bool


@dataclass(frozen=True)
class _Node:
    """One job with its verdict."""

    job: Job
    verdict: Verdict
    warned: Warned
    noticed: bool
    gpu_index: int | None

    @property
    def urgency(self) -> tuple[int, int]:
        """Smaller speaks first: what is stopped first, then what is unknown, then what is used."""
        if self.verdict.stops_ms is not None:
            return 0, self.verdict.stops_ms
        return (1 if self.verdict.kind == Kind.UNKNOWN else 2), self.job.node


def standings(runs: Collection[Run], now: dt.datetime) -> dict[int, Standing]:
    """By run id, how those of the runs stand that are placed, have GPUs and have a policy.

    Five queries for any number of runs, which may come without their specs and provenance.
    """
    placed = {run.pk: run for run in runs if run.status in PLACED}
    policies = _policies(placed)
    if not policies:
        return {}
    jobs = Job.objects.filter(run__in=policies, attempt=F("run__attempt"), status__in=JOB_ACTIVE)
    with_gpus = [job for job in jobs.select_related("policy").order_by("node") if job.gpus]
    series: defaultdict[Any, list[GpuSeries]] = defaultdict(list)
    for one in GpuSeries.objects.filter(job__in=[job.pk for job in with_gpus]).defer("processes"):
        series[one.job_id].append(one)
    kept, project_of = _keeps(policies), {pk: placed[pk].project_id for pk in policies}
    rules = policies_by_project(project_of.values())
    by_run: defaultdict[int, list[Job]] = defaultdict(list)
    for job in with_gpus:
        by_run[job.run_id].append(job)
    return {
        run_id: _standing(found, series, *policies[run_id], kept[run_id], rules[project_of[run_id]], now)
        for run_id, found in by_run.items()
    }


def standing(run: Run, now: dt.datetime) -> Standing | None:
    """How one run stands; None where there is nothing to stand with."""
    return standings([run], now).get(run.pk)


def _policies(runs: Collection[int]) -> dict[int, tuple[UtilizationPolicy, dict[str, Any]]]:
    """The policy of each run that has one, and its source."""
    if not runs:
        return {}
    found = Run.objects.filter(pk__in=runs, spec__utilization_policy__isnull=False).values_list(
        "pk", "spec__utilization_policy", "provenance__utilization_policy"
    )
    return {
        pk: (UtilizationPolicy.model_validate(policy), source or {"source": "default"})
        for pk, policy, source in found
        if policy
    }


def _keeps(runs: Collection[int]) -> dict[int, list[Keep]]:
    """The keeps of each run, newest first."""
    found: dict[int, list[Keep]] = {pk: [] for pk in runs}
    for keep in Keep.objects.filter(run__in=runs).select_related("by").order_by("-id"):
        found[keep.run_id].append(keep)
    return found


def _standing(
    jobs: Sequence[Job],
    series: defaultdict[Any, list[GpuSeries]],
    policy: UtilizationPolicy,
    source: dict[str, Any],
    keeps: Sequence[Keep],
    rules: ProjectPolicies,
    now: dt.datetime,
) -> Standing:
    until = max((keep.until for keep in keeps), default=None)
    paused_until = until if until is not None and until > now else None
    node = min((_node(job, series[job.pk], until, now) for job in jobs), key=lambda node: node.urgency)
    return Standing(
        policy=policy,
        source=source,
        verdict=node.verdict,
        badge=node.warned.badge,
        noticed=node.noticed,
        low_since=_moment(node.verdict.low_since_ms),
        stops_at=_moment(node.warned.stops_ms),
        gpu_index=node.gpu_index,
        node=node.job.node,
        paused_until=paused_until,
        keep=keeps[0] if keeps and paused_until else None,
        keeps_left=max(0, rules.keeps - len(keeps)),
        observe_only=rules.observe_only,
    )


def _node(job: Job, series: Sequence[GpuSeries], paused_until: dt.datetime | None, now: dt.datetime) -> _Node:
    bound = getattr(job, "policy", None)
    if bound is None or bound.min_gpu_utilization is None or job.status != JobStatus.RUNNING:
        return _Node(job, UNKNOWN, Warned(), False, None)
    now_ms, window = to_ms(now), window_of(bound)
    verdict = judge(window, stretches(job.gpus, series), now_ms, interval_ms())
    due = warned(verdict, window.window_ms, to_ms(paused_until) if paused_until else None, now_ms)
    noticed = verdict.low_since_ms is not None and bound.noticed_ms == verdict.low_since_ms
    return _Node(job, verdict, due, noticed, index_of(job, series, verdict))


def index_of(job: Job, series: Sequence[GpuSeries], verdict: Verdict) -> int | None:
    """NVML's index of the GPU that a verdict is about; None where it is about none, or all."""
    if verdict.gpu is None:
        return None
    return next((one.index for one in series if one.uuid == job.gpus[verdict.gpu]), None)


def _moment(ms: int | None) -> dt.datetime | None:
    return None if ms is None else to_moment(ms)
