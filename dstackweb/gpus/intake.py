"""Samples come in: rows in bulk, what each GPU's series knows, and how far its job's low stretch has come.

One short transaction for all that was seen at once, in a number of statements that doesn't depend on how many GPUs or
jobs there are. The series' rows, locked by id, put everybody in order who folds or judges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from dstackweb.backends.hosts.nvml import Look, Reading
from dstackweb.backends.models import Gpu, Host
from dstackweb.gpus import binding, sampling, window
from dstackweb.gpus.averages import KEPT_MS, bucket_of
from dstackweb.gpus.judging import interval_ms, stretch_of, to_ms, verdict_of
from dstackweb.gpus.models import GpuSample, GpuSeries, JobPolicy
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE, JobStatus
from dstackweb.spec.effective import UtilizationPolicy

SEEN = [
    "index", "name", "memory_mib", "power_limit_w", "first_ms", "last_ms", "utilization", "memory_used_mib", "power_w",
    "temperature_c", "throttle", "processes", "low_since_ms", "low_last_ms", "averaged_ms",
]  # fmt: skip
"""What a sample writes to its series."""

Key = tuple[UUID | None, str]
"""A series: its job, None while no job holds the GPU, and the GPU's UUID."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that holds GPUs; `started_ms` is None before its commands run."""

    job_id: UUID
    is_running: bool
    started_ms: int | None
    gpus: Sequence[str]


@dataclass(frozen=True, slots=True)
class Seen:
    """One reading, at a moment, and whose it is."""

    key: Key
    gpu_id: int | None
    at_ms: int
    reading: Reading


def of_host(host: Host, look: Look, at_ms: int) -> list[UUID]:
    """Keep a look at all GPUs of a host; returns the jobs to be looked at closely.

    A GPU that the host has not registered (yet) is left out; one whose job has not begun, or has none, is its own.
    """
    with transaction.atomic():
        seen, holders = _on_host(host, look.readings, at_ms) if look.readings else ([], {})
        worth = _keep(seen, holders, at_ms) if seen else []
        sampling.note(host, look, at_ms)
    return worth


def of_job(job: Job, samples: Sequence[tuple[int, Sequence[Reading]]], now_ms: int | None = None) -> list[UUID]:
    """Keep what a job's runner saw, in any order; returns the job when it is to be looked at closely.

    What was seen before the job ran, or longer ago than samples are kept, or of other GPUs than the job's, is left out.
    """
    now_ms = to_ms(timezone.now()) if now_ms is None else now_ms
    if job.started_at is None or job.status not in JOB_ACTIVE:
        return []
    holder = Holder(job.pk, job.status == JobStatus.RUNNING, to_ms(job.started_at), job.gpus)
    since_ms = max(to_ms(job.started_at), now_ms - KEPT_MS)
    seen = [
        Seen((job.pk, reading.uuid), None, min(at_ms, now_ms), reading)
        for at_ms, readings in sorted(samples, key=lambda sample: sample[0])
        for reading in readings
        if at_ms >= since_ms and reading.uuid in job.gpus
    ]
    if not seen:
        return []
    with transaction.atomic():
        return _keep(seen, {job.pk: holder}, now_ms)


def _on_host(host: Host, readings: Iterable[Reading], at_ms: int) -> tuple[list[Seen], dict[UUID, Holder]]:
    """Whose the readings are, by what jobs hold now."""
    job = "allocation__job"
    rows = Gpu.objects.filter(host=host).values_list(
        "uuid", "id", f"{job}_id", f"{job}__status", f"{job}__started_at", f"{job}__gpus"
    )
    known, holders = {}, {}
    for uuid, gpu_id, job_id, status, started_at, gpus in rows:
        started_ms = to_ms(started_at) if started_at else None
        has_begun = job_id is not None and started_ms is not None and at_ms >= started_ms
        known[uuid] = gpu_id, job_id if has_begun else None
        if has_begun:
            holders[job_id] = Holder(job_id, status == JobStatus.RUNNING, started_ms, gpus)
    seen = []
    for reading in readings:
        if reading.uuid in known:
            gpu_id, holder = known[reading.uuid]
            seen.append(Seen((holder, reading.uuid), gpu_id, at_ms, reading))
    return seen, holders


def _keep(seen: Sequence[Seen], holders: Mapping[UUID, Holder], now_ms: int) -> list[UUID]:
    """Write the samples, fold them into their series, and judge the running jobs among the holders."""
    series = _series(seen, holders)
    # Read behind the series' locks, as they are changed: so nothing is folded by a minimum that holds no more.
    policies, rebound = _policies([holder.job_id for holder in holders.values() if holder.is_running])
    if rebound:
        series = _series(seen, holders)
    step_ms = interval_ms()
    for one in seen:
        job_id = one.key[0]
        policy = policies.get(job_id) if job_id else None
        _fold(series[one.key], one, policy.min_gpu_utilization if policy else None, step_ms)
    GpuSample.objects.bulk_create(
        (
            GpuSample(
                series=series[one.key],
                at_ms=one.at_ms,
                utilization=one.reading.utilization,
                memory_used_mib=one.reading.memory_used_mib,
                power_w=one.reading.power_w,
                temperature_c=one.reading.temperature_c,
                throttle=one.reading.throttle,
            )
            for one in seen
        ),
        ignore_conflicts=True,
    )
    # An upsert of rows that are there, and locked: one statement for all.
    touched = {series[one.key].pk: series[one.key] for one in seen}
    GpuSeries.objects.bulk_create(touched.values(), update_conflicts=True, unique_fields=["id"], update_fields=SEEN)
    return [job_id for job_id, policy in policies.items() if _is_worth_a_look(policy, holders[job_id], series, now_ms)]


def _series(seen: Sequence[Seen], holders: Mapping[UUID, Holder]) -> dict[Key, GpuSeries]:
    """The series of what was seen, and all others of the same jobs, locked by id; those that are missing are made."""
    own = [one.gpu_id for one in seen if one.key[0] is None]
    wanted = Q(job__in=list(holders)) | Q(job=None, gpu__in=own) if own else Q(job__in=list(holders))

    def load() -> dict[Key, GpuSeries]:
        return {
            (row.job_id, row.uuid): row for row in GpuSeries.objects.filter(wanted).select_for_update().order_by("id")
        }

    series = load()
    missing = {one.key: one for one in seen if one.key not in series}
    if not missing:
        return series
    GpuSeries.objects.bulk_create(
        (GpuSeries(job_id=key[0], uuid=key[1], gpu_id=one.gpu_id) for key, one in missing.items()),
        ignore_conflicts=True,
    )
    return load()


def _policies(jobs: Sequence[UUID]) -> tuple[dict[UUID, JobPolicy], bool]:
    """What running jobs are held to: bound here when the first sample comes (R17), or when the spec has changed.

    Also whether any was, which writes to the series.
    """
    policies: dict[UUID, JobPolicy] = {}
    rebound = False
    if not jobs:
        return policies, rebound
    rows = Job.objects.filter(pk__in=jobs).select_related("policy").only("run_id", "started_at", "policy")
    for job in rows.annotate(asked=F("run__spec__utilization_policy")).order_by("pk"):
        bound: JobPolicy | None = getattr(job, "policy", None)
        asked = UtilizationPolicy.model_validate(job.asked) if job.asked else None
        if bound is None or not binding.is_bound_to(bound, job, asked):
            bound = binding.bind(Job.objects.select_related("run").get(pk=job.pk))
            rebound = True
        policies[job.pk] = bound
    return policies, rebound


def _fold(series: GpuSeries, one: Seen, minimum: int | None, step_ms: int) -> None:
    """One more sample of a series; late ones change only what late ones may."""
    reading, at_ms = one.reading, one.at_ms
    series.first_ms = at_ms if series.first_ms is None else min(series.first_ms, at_ms)
    series.averaged_ms = min(series.averaged_ms, bucket_of(at_ms))
    if series.last_ms is None or at_ms > series.last_ms:
        series.last_ms = at_ms
        series.index, series.name, series.memory_mib = reading.index, reading.name, reading.memory_mib
        series.power_limit_w = reading.power_limit_w
        series.utilization, series.memory_used_mib = reading.utilization, reading.memory_used_mib
        series.power_w, series.temperature_c = reading.power_w, reading.temperature_c
        series.throttle, series.processes = reading.throttle, list(reading.processes or ())
    if minimum is not None and reading.utilization is not None:
        stretch = window.fold(stretch_of(series), at_ms, reading.utilization, minimum, step_ms)
        series.low_since_ms, series.low_last_ms = stretch.since_ms, stretch.last_ms


def _is_worth_a_look(policy: JobPolicy, holder: Holder, series: Mapping[Key, GpuSeries], now_ms: int) -> bool:
    """Whether the job is to stop, or people are to be told that it will be and have not been."""
    own = {uuid: one for (job_id, uuid), one in series.items() if job_id == holder.job_id}
    verdict = verdict_of(policy, holder.gpus, own, now_ms)
    if verdict.kind == window.Kind.STOP:
        return True
    before_ms = window.notice_ms(policy.time_window_s * 1000)
    if verdict.stops_ms is None or before_ms is None or policy.noticed_ms == verdict.low_since_ms:
        return False
    return now_ms >= verdict.stops_ms - before_ms
