"""The current state of runs under their policies, judged from the same rows as by the watcher that stops runs."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import F

from dstackweb.gpus.binding import verdict_of
from dstackweb.gpus.exemptions import policies_by_project
from dstackweb.gpus.models import GpuSeries, PolicyExemption, ProjectPolicies
from dstackweb.gpus.window import UNKNOWN, PolicyVerdict, VerdictKind, stop_warning
from dstackweb.lib.times import to_moment, to_ms
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import JOB_ACTIVE, PLACED, JobStatus
from dstackweb.spec.effective import UtilizationPolicy


@dataclass(frozen=True)
class PolicyStatus:
    """A run's state under its policy: that of the node that would be stopped first.

    `source` is the policy's provenance (`profiles.resolve.Effective`). `low_since` is when the low stretch began and
    `stops_at` when the run will be stopped if it stays low: both None while it isn't low or that is unknown. `noticed`:
    a notice was sent for this low stretch. `gpu_index` is NVML's index of the low GPU, None with the scope `all`.
    `paused_until` is the end of its exemptions, and `exemption` the newest; both None when none is active.
    """

    policy: UtilizationPolicy
    source: dict[str, Any]
    verdict: PolicyVerdict
    badge: bool
    noticed: bool
    low_since: dt.datetime | None
    stops_at: dt.datetime | None
    gpu_index: int | None
    node: int
    paused_until: dt.datetime | None
    exemption: PolicyExemption | None
    exemptions_left: int
    observe_only: bool


def policy_statuses(runs: Collection[Run], now: dt.datetime) -> dict[int, PolicyStatus]:
    """By run ID, the status of each placed run that has GPUs and a policy, in five queries. Their specs may be
    deferred."""
    placed = {run.pk: run for run in runs if run.status in PLACED}
    policies = _policies(placed)
    if not policies:
        return {}
    jobs = Job.objects.filter(run__in=policies, attempt=F("run__attempt"), status__in=JOB_ACTIVE)
    with_gpus = [job for job in jobs.select_related("policy").order_by("node") if job.gpus]
    series: defaultdict[Any, list[GpuSeries]] = defaultdict(list)
    for one in GpuSeries.objects.filter(job__in=[job.pk for job in with_gpus]).defer("processes"):
        series[one.job_id].append(one)
    exemptions, project_of = _exemptions(policies), {pk: placed[pk].project_id for pk in policies}
    rules = policies_by_project(project_of.values())
    by_run: defaultdict[int, list[Job]] = defaultdict(list)
    for job in with_gpus:
        by_run[job.run_id].append(job)
    return {
        run_id: _status_of_run(found, series, *policies[run_id], exemptions[run_id], rules[project_of[run_id]], now)
        for run_id, found in by_run.items()
    }


def policy_status(run: Run, now: dt.datetime) -> PolicyStatus | None:
    """The status of one run; None where it is not placed, or has no GPUs or no policy."""
    return policy_statuses([run], now).get(run.pk)


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


def _exemptions(runs: Collection[int]) -> dict[int, list[PolicyExemption]]:
    """The exemptions of each run, newest first."""
    found: dict[int, list[PolicyExemption]] = {pk: [] for pk in runs}
    for exemption in PolicyExemption.objects.filter(run__in=runs).select_related("by").order_by("-id"):
        found[exemption.run_id].append(exemption)
    return found


def _status_of_run(
    jobs: Sequence[Job],
    series: defaultdict[Any, list[GpuSeries]],
    policy: UtilizationPolicy,
    source: dict[str, Any],
    exemptions: Sequence[PolicyExemption],
    rules: ProjectPolicies,
    now: dt.datetime,
) -> PolicyStatus:
    until = max((exemption.until for exemption in exemptions), default=None)
    paused_until = until if until is not None and until > now else None
    verdicts = [(job, _verdict(job, series[job.pk], to_ms(now))) for job in jobs]
    job, verdict = min(verdicts, key=_urgency)
    bound = getattr(job, "policy", None)
    window_ms = bound.time_window_s * 1000 if bound else 0
    warning = stop_warning(verdict, window_ms, to_ms(until) if until else None, to_ms(now))
    return PolicyStatus(
        policy=policy,
        source=source,
        verdict=verdict,
        badge=warning.badge,
        noticed=bound is not None and bound.noticed_ms == verdict.low_since_ms is not None,
        low_since=_moment(verdict.low_since_ms),
        stops_at=_moment(warning.stops_ms),
        gpu_index=index_of(job, series[job.pk], verdict),
        node=job.node,
        paused_until=paused_until,
        exemption=exemptions[0] if exemptions and paused_until else None,
        exemptions_left=max(0, rules.max_exemptions - len(exemptions)),
        observe_only=rules.observe_only,
    )


def _verdict(job: Job, series: Sequence[GpuSeries], now_ms: int) -> PolicyVerdict:
    bound = getattr(job, "policy", None)
    if bound is None or job.status != JobStatus.RUNNING:
        return UNKNOWN
    return verdict_of(bound, job.gpus, series, now_ms)


def _urgency(judged: tuple[Job, PolicyVerdict]) -> tuple[int, int]:
    """Ascending: nodes by when they would be stopped, then unknown ones, then used ones."""
    job, verdict = judged
    if verdict.stops_ms is not None:
        return 0, verdict.stops_ms
    return (1 if verdict.kind == VerdictKind.UNKNOWN else 2), job.node


def index_of(job: Job, series: Sequence[GpuSeries], verdict: PolicyVerdict) -> int | None:
    """NVML's index of the GPU that a verdict is about; None where it is about none, or all."""
    if verdict.gpu is None:
        return None
    return next((one.index for one in series if one.uuid == job.gpus[verdict.gpu]), None)


def _moment(ms: int | None) -> dt.datetime | None:
    return None if ms is None else to_moment(ms)
