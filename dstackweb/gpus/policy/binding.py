"""Which policy a job is held to: its run's, from wherever that came, as a row beside the job (R17)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, cast

from dstackweb.gpus.clock import interval_ms, to_ms
from dstackweb.gpus.models import GpuSample, GpuSeries, JobPolicy
from dstackweb.gpus.policy.window import NOTHING, UNKNOWN, Stretch, Verdict, Window, judge, replay
from dstackweb.runs.models import Job, Run
from dstackweb.spec.effective import UtilizationPolicy


def policy_of(run: Run) -> UtilizationPolicy | None:
    """The utilization policy in a run's spec, if it has one."""
    found = run.spec.get("utilization_policy")
    return UtilizationPolicy.model_validate(found) if found else None


def terms(job: Job, policy: UtilizationPolicy | None) -> dict[str, Any]:
    """The fields of the row that holds a job which has started to a policy. Raises ValueError for one that has not."""
    if job.started_at is None:
        raise ValueError(f"job {job.pk} has not started: there is nothing to judge")
    warmup_s = policy.warmup_s if policy else 0
    return {
        "min_gpu_utilization": policy.min_gpu_utilization if policy else None,
        "time_window_s": policy.time_window_s if policy else 0,
        "scope": policy.scope if policy else "any",
        "action": policy.action if policy else "terminate",
        "from_ms": to_ms(job.started_at) + warmup_s * 1000,
    }


def is_bound_to(bound: JobPolicy, job: Job, policy: UtilizationPolicy | None) -> bool:
    """Whether the row says what the policy does."""
    return all(getattr(bound, name) == value for name, value in terms(job, policy).items())


def bind(job: Job) -> JobPolicy:
    """The row that holds a running job to its run's policy: made when there is none, brought in line when the run's
    spec has another.

    `job` comes with its run, read in one statement; with `policy` read along it costs no query while nothing changes.
    Call inside a transaction, behind the rows of the job's series. Raises ValueError for a job that has not started.
    """
    policy = policy_of(job.run)
    try:
        bound: JobPolicy = job.policy
    except JobPolicy.DoesNotExist:
        # Whoever changed the policy meanwhile has made the row, and knows better.
        JobPolicy.objects.bulk_create([JobPolicy(job=job, **terms(job, policy))], ignore_conflicts=True)
        return JobPolicy.objects.get(pk=job.pk)
    return bound if is_bound_to(bound, job, policy) else rebind(job)


def rebind(job: Job) -> JobPolicy:
    """Hold a job that has started to its run's policy as it is stored now, and judge its samples by that anew.

    What people were told under another policy counts no more. Call inside a transaction; it locks the job's series (by
    id), then the row of its policy.
    """
    series = list(GpuSeries.objects.select_for_update(no_key=True).filter(job=job).order_by("pk"))
    before = JobPolicy.objects.filter(pk=job.pk).first()
    bound = JobPolicy(job=job, **terms(job, policy_of(Run.objects.get(pk=job.run_id))))
    JobPolicy.objects.bulk_create(
        [bound],
        update_conflicts=True,
        unique_fields=["job"],
        update_fields=[
            "min_gpu_utilization", "time_window_s", "scope", "action", "from_ms", "bound_at", "noticed_ms", "acted_ms",
        ],
    )  # fmt: skip
    # A first sample that bound the job at this very moment has made series that weren't there to be locked: whoever
    # waited for its row of the policy sees them now.
    late = GpuSeries.objects.filter(job=job).exclude(pk__in=[one.pk for one in series]).order_by("pk")
    is_other = before is None or before.min_gpu_utilization != bound.min_gpu_utilization
    for one in [*(series if is_other else ()), *late]:
        _replay(one, bound.min_gpu_utilization)
    return bound


def _replay(series: GpuSeries, minimum: int | None) -> None:
    """Find the low stretch of a GPU anew, from the samples that are kept."""
    found = NOTHING if minimum is None else replay(samples_of(series), minimum, interval_ms())
    GpuSeries.objects.filter(pk=series.pk).update(low_since_ms=found.since_ms, low_last_ms=found.last_ms)


def samples_of(series: GpuSeries, from_ms: int | None = None, last_ms: int | None = None) -> list[tuple[int, int]]:
    """The samples of a series that can be judged, in order: `(at_ms, utilization)`; all, or those of some time."""
    found = GpuSample.objects.filter(series=series, utilization__isnull=False)
    if last_ms is not None:
        found = found.filter(at_ms__lte=last_ms)
    if from_ms is not None:
        found = found.filter(at_ms__gte=from_ms)
    return [(at_ms, cast(int, used)) for at_ms, used in found.order_by("at_ms").values_list("at_ms", "utilization")]


def confirmed(bound: JobPolicy, gpus: Sequence[str], series: Collection[GpuSeries], now_ms: int) -> Verdict:
    """The verdict on a job from its stored samples, of which as much is read as its stretches say is low.

    Where a stretch is older than the samples that are kept, all of these must be low, and the rest is believed.
    """
    minimum, every = bound.min_gpu_utilization, interval_ms()
    if minimum is None:
        return UNKNOWN
    found: dict[str, Stretch] = {}
    for one in series:
        if one.low_since_ms is None:
            found[one.uuid] = Stretch(None, one.low_last_ms)
            continue
        # Its newest is as the verdict has it: later ones are of a clock that was ahead.
        samples = samples_of(one, one.low_since_ms, one.low_last_ms)
        seen = replay(samples, minimum, every)
        if samples and seen.since_ms == samples[0][0] and samples[0][0] == one.first_ms:
            seen = Stretch(one.low_since_ms, seen.last_ms)
        found[one.uuid] = seen
    return judge(window_of(bound), [found.get(uuid, NOTHING) for uuid in gpus], now_ms, every)


def window_of(bound: JobPolicy) -> Window:
    """What a job is judged by. It has a minimum (`min_gpu_utilization` is not None)."""
    return Window(bound.time_window_s * 1000, cast(Literal["any", "all"], bound.scope), bound.from_ms)


def stretches(gpus: Sequence[str], series: Collection[GpuSeries]) -> list[Stretch]:
    """The low stretch of each of a job's GPUs (NVML's UUIDs), in their order; nothing is known of one without samples.

    The `gpu` of a verdict on them is a place in `gpus`.
    """
    by_uuid: Mapping[str, GpuSeries] = {one.uuid: one for one in series}
    return [
        Stretch(one.low_since_ms, one.low_last_ms) if (one := by_uuid.get(uuid)) is not None else NOTHING
        for uuid in gpus
    ]
