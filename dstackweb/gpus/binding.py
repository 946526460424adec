"""Binding jobs to their run's utilization policy, as a row for each job (R17)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from dstackweb.gpus.models import GpuSample, GpuSeries, JobPolicy, interval_ms
from dstackweb.gpus.window import MAX_GAP, NOTHING, UNKNOWN, PolicyVerdict, Stretch, Window, judge, replay
from dstackweb.lib import sql
from dstackweb.lib.times import to_ms
from dstackweb.runs.models import Job, Run
from dstackweb.spec.codes import UtilizationAction, UtilizationScope
from dstackweb.spec.effective import UtilizationPolicy


def policy_of(run: Run) -> UtilizationPolicy | None:
    found = run.spec.get("utilization_policy")
    return UtilizationPolicy.model_validate(found) if found else None


def terms(job: Job, policy: UtilizationPolicy | None) -> dict[str, Any]:
    """The fields of the row that binds a job to a policy. Raises ValueError for a job that has not started."""
    if job.started_at is None:
        raise ValueError(f"job {job.pk} has not started")
    warmup_s = policy.warmup_s if policy else 0
    return {
        "min_gpu_utilization": policy.min_gpu_utilization if policy else None,
        "time_window_s": policy.time_window_s if policy else 0,
        "scope": (policy.scope if policy else UtilizationScope.ANY).value,
        "action": (policy.action if policy else UtilizationAction.TERMINATE).value,
        "from_ms": to_ms(job.started_at) + warmup_s * 1000,
    }


def is_bound_to(bound: JobPolicy, job: Job, policy: UtilizationPolicy | None) -> bool:
    return all(getattr(bound, name) == value for name, value in terms(job, policy).items())


def bind(job: Job) -> JobPolicy:
    """The row that binds a running job to its run's policy: created if missing, updated if the run's spec has changed.

    `job` has its run read in the same statement; with `policy` too it costs no query while nothing changes. Call inside
    a transaction, after locking the job's series. Raises ValueError for a job that has not started.
    """
    policy = policy_of(job.run)
    try:
        bound: JobPolicy = job.policy
    except JobPolicy.DoesNotExist:
        # A concurrent policy change may have created the row, with newer values.
        JobPolicy.objects.bulk_create([JobPolicy(job=job, **terms(job, policy))], ignore_conflicts=True)
        return JobPolicy.objects.get(pk=job.pk)
    return bound if is_bound_to(bound, job, policy) else rebind(job)


def rebind(job: Job) -> JobPolicy:
    """Bind a started job to its run's policy as stored now, and judge its samples by that anew: earlier notices no
    longer count. Call inside a transaction; it locks the job's series (by ID), then its policy's row."""
    series = list(GpuSeries.objects.select_for_update(no_key=True).filter(job=job).order_by("pk"))
    before = JobPolicy.objects.filter(pk=job.pk).first()
    bound = JobPolicy(job=job, **terms(job, policy_of(Run.objects.get(pk=job.run_id))))
    fields = "min_gpu_utilization time_window_s scope action from_ms noticed_ms acted_ms"
    sql.write([bound], ["job"], fields.split())
    # A first sample that bound the job concurrently has created series that could not be locked above. They are visible
    # now that its policy row was waited for.
    late = GpuSeries.objects.filter(job=job).exclude(pk__in=[one.pk for one in series]).order_by("pk")
    is_other = before is None or before.min_gpu_utilization != bound.min_gpu_utilization
    for one in [*(series if is_other else ()), *late]:
        minimum = bound.min_gpu_utilization
        found = NOTHING if minimum is None else replay(samples_of(one), minimum, interval_ms())
        GpuSeries.objects.filter(pk=one.pk).update(low_since_ms=found.since_ms, low_last_ms=found.last_ms)
    return bound


def samples_of(series: GpuSeries, from_ms: int | None = None, last_ms: int | None = None) -> list[tuple[int, int]]:
    """The samples of a series with a utilization, in order: `(at_ms, utilization)`, optionally of a time range."""
    found = GpuSample.objects.filter(series=series, utilization__isnull=False)
    if last_ms is not None:
        found = found.filter(at_ms__lte=last_ms)
    if from_ms is not None:
        found = found.filter(at_ms__gte=from_ms)
    return [(at_ms, cast(int, used)) for at_ms, used in found.order_by("at_ms").values_list("at_ms", "utilization")]


def confirmed(bound: JobPolicy, gpus: Sequence[str], series: Collection[GpuSeries], now_ms: int) -> PolicyVerdict:
    """The verdict on a job from its stored samples, reading only the low stretches.

    Where a stretch began before the oldest stored sample, all stored samples must be low, and its start is trusted.
    """
    minimum, every = bound.min_gpu_utilization, interval_ms()
    if minimum is None:
        return UNKNOWN
    found: dict[str, Stretch] = {}
    for one in series:
        if one.low_since_ms is None:
            found[one.uuid] = Stretch(None, one.low_last_ms)
            continue
        # Up to the newest judged sample: later ones came from a clock that was ahead.
        samples = samples_of(one, one.low_since_ms, one.low_last_ms)
        seen = replay(samples, minimum, every)
        if samples and seen.since_ms == samples[0][0] and samples[0][0] == one.first_ms:
            seen = Stretch(one.low_since_ms, seen.last_ms)
        found[one.uuid] = seen
    return _judged(bound, gpus, found, now_ms)


def verdict_of(bound: JobPolicy, gpus: Sequence[str], series: Collection[GpuSeries], now_ms: int) -> PolicyVerdict:
    """The verdict on a job from the low stretches in its series; its `gpu` is an index into `gpus`, the job's NVML
    UUIDs."""
    if bound.min_gpu_utilization is None:
        return UNKNOWN
    found = {one.uuid: Stretch(one.low_since_ms, one.low_last_ms) for one in series}
    return _judged(bound, gpus, found, now_ms)


def _judged(bound: JobPolicy, gpus: Sequence[str], found: Mapping[str, Stretch], now_ms: int) -> PolicyVerdict:
    """A GPU without samples is unknown."""
    return judge(window_of(bound), [found.get(uuid, NOTHING) for uuid in gpus], now_ms, interval_ms())


def verdict_if_bound(job: Job, policy: UtilizationPolicy, now_ms: int) -> PolicyVerdict:
    """The verdict on a started job if it were bound to a policy, from the samples of the last window."""
    since_ms = now_ms - policy.time_window_s * 1000 - 2 * MAX_GAP * interval_ms()
    found = {
        series.uuid: replay(samples_of(series, since_ms), policy.min_gpu_utilization, interval_ms())
        for series in GpuSeries.objects.filter(job=job)
    }
    return _judged(JobPolicy(job=job, **terms(job, policy)), job.gpus, found, now_ms)


def window_of(bound: JobPolicy) -> Window:
    """The window that a job is judged by. Its policy must have a minimum."""
    return Window(bound.time_window_s * 1000, UtilizationScope(bound.scope), bound.from_ms)
