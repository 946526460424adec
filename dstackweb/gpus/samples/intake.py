"""Samples come in: rows in bulk, what each GPU's series knows, and how far its job's low stretch has come.

One short transaction for all that was seen at once, in a number of statements that doesn't depend on how many GPUs or
jobs there are. The series' rows, locked by id, put everybody in order who folds or judges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from django.db import transaction
from django.utils import timezone

from dstackweb.backends.hosts.nvml import Look, Reading
from dstackweb.backends.models import Host
from dstackweb.gpus.clock import interval_ms, to_ms
from dstackweb.gpus.policy import binding, window
from dstackweb.gpus.policy.warnings import notice_before
from dstackweb.gpus.samples import polling, statements
from dstackweb.gpus.samples.averages import KEPT_MS, bucket_of
from dstackweb.gpus.samples.statements import State, Stored, Terms
from dstackweb.lib import sql
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE, JobStatus

AHEAD_MS = 10 * 60_000
"""Samples come late by less than this: one that is further ahead of the newest is of a clock that was wrong."""

Key = tuple[Stored | None, str]
"""A series: its job, None while no job holds the GPU, and the GPU's UUID."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that has begun and holds GPUs."""

    is_running: bool
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
        polling.note(host, look, at_ms)
    return worth


def of_job(job: Job, samples: Sequence[tuple[int, Sequence[Reading]]], now_ms: int | None = None) -> list[UUID]:
    """Keep what a job's runner saw, in any order; returns the job when it is to be looked at closely.

    What was seen before the job ran, or longer ago than samples are kept, or of other GPUs than the job's, is left out.
    """
    now_ms = to_ms(timezone.now()) if now_ms is None else now_ms
    if job.started_at is None or job.status not in JOB_ACTIVE:
        return []
    job_id, since_ms = statements.stored(job.pk), max(to_ms(job.started_at), now_ms - KEPT_MS)
    seen = [
        Seen((job_id, reading.uuid), None, min(at_ms, now_ms), reading)
        for at_ms, readings in sorted(samples, key=lambda sample: sample[0])
        for reading in readings
        if at_ms >= since_ms and reading.uuid in job.gpus
    ]
    if not seen:
        return []
    with transaction.atomic():
        return _keep(seen, {job_id: Holder(job.status == JobStatus.RUNNING, job.gpus)}, now_ms)


def _on_host(host: Host, readings: Iterable[Reading], at_ms: int) -> tuple[list[Seen], dict[Stored, Holder]]:
    """Whose the readings are, by what jobs hold now."""
    known: dict[str, tuple[int, Stored | None]] = {}
    holders: dict[Stored, Holder] = {}
    for gpu in statements.held_on(host.pk):
        known[gpu.uuid] = gpu.gpu_id, None
        if gpu.job_id is not None and gpu.started_at is not None and at_ms >= to_ms(gpu.started_at):
            known[gpu.uuid] = gpu.gpu_id, gpu.job_id
            holders[gpu.job_id] = Holder(gpu.status == JobStatus.RUNNING, gpu.gpus)
    seen = []
    for reading in readings:
        if reading.uuid in known:
            gpu_id, holder = known[reading.uuid]
            seen.append(Seen((holder, reading.uuid), gpu_id, at_ms, reading))
    return seen, holders


def _keep(seen: Sequence[Seen], holders: Mapping[Stored, Holder], now_ms: int) -> list[UUID]:
    """Write the samples, fold them into their series, and judge the running jobs among the holders."""
    series = _series(seen, holders)
    # Read behind the series' locks, as they are changed: so nothing is folded by a minimum that holds no more.
    policies = _policies([job_id for job_id, holder in holders.items() if holder.is_running])
    step_ms = interval_ms()
    for one in seen:
        policy = policies.get(one.key[0]) if one.key[0] else None
        _forget_what_is_to_come(series[one.key], now_ms)
        _fold(series[one.key], one, policy.minimum if policy else None, step_ms)
    samples = [
        {
            "series_id": series[one.key].id,
            "at_ms": one.at_ms,
            "utilization": one.reading.utilization,
            "memory_used_mib": one.reading.memory_used_mib,
            "power_w": one.reading.power_w,
            "temperature_c": one.reading.temperature_c,
            "throttle": one.reading.throttle,
        }
        for one in seen
    ]
    statements.write(samples, {one.key: series[one.key] for one in seen}.values())
    return [
        UUID(sql.uid(job_id))
        for job_id, policy in policies.items()
        if _is_worth_a_look(policy, [series.get((job_id, uuid)) for uuid in holders[job_id].gpus], now_ms, step_ms)
    ]


def _series(seen: Sequence[Seen], holders: Mapping[Stored, Holder]) -> dict[Key, State]:
    """The series of what was seen, and all others of the same jobs, locked by id; those that are missing are made."""
    jobs, own = list(holders), [one.gpu_id for one in seen if one.key[0] is None and one.gpu_id is not None]
    series = statements.locked(jobs, own)
    missing = {one.key: one.gpu_id for one in seen if one.key not in series}
    if not missing:
        return series
    # In one order, whatever the order of what was seen: others may be adding the same.
    in_order = sorted(missing.items(), key=lambda item: item[0][1])
    statements.add((UUID(sql.uid(job_id)) if job_id else None, uuid, gpu_id) for (job_id, uuid), gpu_id in in_order)
    return statements.locked(jobs, own)


def _policies(jobs: Sequence[Stored]) -> dict[Stored, Terms]:
    """What running jobs are held to, bound now when their first sample comes (R17).

    Whoever changes a run's policy later binds its jobs anew.
    """
    if not jobs:
        return {}
    policies = statements.policies(jobs)
    for job_id in jobs:
        if job_id not in policies:
            job = Job.objects.select_related("run").get(pk=sql.uid(job_id))
            policies[job_id] = Terms.of(binding.bind(job))
    return policies


def _forget_what_is_to_come(series: State, now_ms: int) -> None:
    """A clock that was ahead has been put right: beside what it stamped nothing would be new for as long."""
    latest_ms = now_ms + AHEAD_MS
    if series.last_ms is not None and series.last_ms > latest_ms:
        series.last_ms = None
    if series.low_last_ms is not None and series.low_last_ms > latest_ms:
        series.low_since_ms = series.low_last_ms = None


def _fold(series: State, one: Seen, minimum: int | None, step_ms: int) -> None:
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
        stretch = window.fold(_stretch_of(series), at_ms, reading.utilization, minimum, step_ms)
        series.low_since_ms, series.low_last_ms = stretch.since_ms, stretch.last_ms


def _stretch_of(series: State | None) -> window.Stretch:
    """A GPU without a series was never seen."""
    return window.NOTHING if series is None else window.Stretch(series.low_since_ms, series.low_last_ms)


def _is_worth_a_look(policy: Terms, gpus: Iterable[State | None], now_ms: int, step_ms: int) -> bool:
    """Whether the job is to stop, or people are to be told that it will be and have not been."""
    if policy.minimum is None:
        return False
    verdict = window.judge(policy.window, [_stretch_of(series) for series in gpus], now_ms, step_ms)
    if verdict.kind == window.Kind.STOP:
        return True
    before_ms = notice_before(policy.window.window_ms)
    if verdict.stops_ms is None or before_ms is None or policy.noticed_ms == verdict.low_since_ms:
        return False
    return now_ms >= verdict.stops_ms - before_ms
