"""Storing samples: one short transaction per snapshot, with a fixed number of statements, which also updates each GPU's
low stretch. Nothing is judged here. Locking the series' rows in the order of their IDs serializes everyone who folds
samples or judges a job."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.utils import timezone

from dstackweb.backends.models import Host, HostEvent, HostEventKind
from dstackweb.gpus import averages, binding, window
from dstackweb.gpus.models import GpuSeries, HostSampling, interval_ms
from dstackweb.lib import bulk, sql
from dstackweb.lib.times import to_moment, to_ms
from dstackweb.runner.nvml import Sample, Snapshot
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE, JobStatus

AHEAD_MS = 10 * 60_000
"""Samples arrive less than this late: one that is further ahead of the newest came from a wrong clock."""
AN_HOUR = dt.timedelta(hours=1)
MOST_AN_HOUR = 12
"""Sampling events of one host: a GPU that fails in every other snapshot must not fill its event list."""
SAMPLING_EVENTS = (
    HostEventKind.NVML_MISSING, HostEventKind.NVML_FOUND, HostEventKind.SAMPLING_FAILS, HostEventKind.SAMPLING_WORKS,
)  # fmt: skip

SAMPLE = {
    "series_id": "bigint", "at_ms": "bigint", "utilization": "smallint", "memory_used_mib": "integer",
    "power_w": "smallint", "temperature_c": "smallint", "throttle": "bigint",
}  # fmt: skip
_MEASURED = attrgetter(*list(SAMPLE)[2:])
SERIES = {
    "index": "smallint", "name": "text", "memory_mib": "bigint", "power_limit_w": "smallint", "first_ms": "bigint",
    "last_ms": "bigint", "utilization": "smallint", "memory_used_mib": "bigint", "power_w": "smallint",
    "temperature_c": "smallint", "throttle": "bigint", "processes": "jsonb", "low_since_ms": "bigint",
    "low_last_ms": "bigint", "averaged_ms": "bigint", "uncounted": "jsonb",
}  # fmt: skip
"""The columns of a series that samples change."""

JobId = UUID | str
"""A job's ID as the database driver returns and takes it."""

Key = tuple[JobId | None, str]
"""A series: its job, None while no job holds the GPU, and the GPU's UUID."""


@dataclass(slots=True)
class SeriesRow:
    """A series, as far as samples change it; `processes` and `uncounted` are JSON."""

    id: int
    job_id: JobId | None
    uuid: str
    index: int
    name: str
    memory_mib: int | None
    power_limit_w: int | None
    first_ms: int | None
    last_ms: int | None
    utilization: int | None
    memory_used_mib: int | None
    power_w: int | None
    temperature_c: int | None
    throttle: int | None
    processes: Any
    low_since_ms: int | None
    low_last_ms: int | None
    averaged_ms: int
    uncounted: Any


@dataclass(frozen=True, slots=True)
class TimedSample:
    """One sample, when it was taken, and the series it belongs to."""

    key: Key
    gpu_id: int | None
    at_ms: int
    sample: Sample


def add_snapshot(host: Host, snapshot: Snapshot, at_ms: int) -> None:
    """Store a snapshot of a host's GPUs. GPUs that the host has not registered are left out, and while no started job
    holds a GPU, its samples are its own."""
    with transaction.atomic():
        samples, running = _on_host(host, snapshot, at_ms) if snapshot.samples else ([], {})
        if samples:
            _store(samples, running, at_ms)
        _record_sampling(host, snapshot, to_moment(at_ms))


def add_samples(job: Job, samples: Sequence[tuple[int, Sequence[Sample]]], now_ms: int | None = None) -> None:
    """Store what a job's runner sampled, in any order. Samples from before the job ran, too old ones and those of other
    jobs' GPUs are left out."""
    now_ms = to_ms(timezone.now()) if now_ms is None else now_ms
    if job.started_at is None or job.status not in JOB_ACTIVE:
        return
    job_id, since_ms = db_id(job.pk), max(to_ms(job.started_at), now_ms - averages.KEPT_MS)
    own = [
        TimedSample((job_id, sample.uuid), None, min(at_ms, now_ms), sample)
        for at_ms, of_moment in sorted(samples, key=lambda timed: timed[0])
        for sample in of_moment
        if at_ms >= since_ms and sample.uuid in job.gpus
    ]
    if own:
        with transaction.atomic():
            _store(own, {job_id: job.status == JobStatus.RUNNING}, now_ms)


def _on_host(host: Host, snapshot: Snapshot, at_ms: int) -> tuple[list[TimedSample], dict[JobId, bool]]:
    """The samples with their series, by what jobs hold now, and whether each of these jobs runs.

    A GPU that a job got while it was read was not the job's yet, but what was read is of the time up to the end.
    """
    known: dict[str, tuple[int, JobId | None]] = {}
    running: dict[JobId, bool] = {}
    for uuid, gpu_id, job_id, status, started_at in sql.rows(
        "SELECT gpu.uuid, gpu.id, job.id, job.status, job.started_at FROM backends_gpu gpu"
        " LEFT JOIN runs_allocation held ON held.gpu_id = gpu.id LEFT JOIN runs_job job ON job.id = held.job_id"
        " WHERE gpu.host_id = %s",
        [host.pk],
    ):
        known[uuid] = gpu_id, None
        if job_id is not None and started_at is not None and at_ms >= to_ms(started_at):
            known[uuid] = gpu_id, job_id
            running[job_id] = status == JobStatus.RUNNING
    timed = []
    for sample in snapshot.samples:
        if sample.uuid in known:
            gpu_id, job_id = known[sample.uuid]
            timed.append(TimedSample((job_id, sample.uuid), gpu_id, at_ms + round(snapshot.took_ms), sample))
    return timed, running


def _store(samples: Sequence[TimedSample], running: Mapping[JobId, bool], now_ms: int) -> None:
    """Write the samples, and fold them into their series."""
    series = _series(samples, running)
    # Read behind the series' locks, under which policies change: nothing is folded with an outdated minimum.
    minimums = _minimums([job_id for job_id, is_running in running.items() if is_running])
    step_ms = interval_ms()
    for sample in samples:
        job_id = sample.key[0]
        _reset_future_state(series[sample.key], now_ms)
        _fold(series[sample.key], sample, minimums.get(job_id) if job_id else None, step_ms)
    _write(samples, series)


def _series(samples: Sequence[TimedSample], jobs: Iterable[JobId]) -> dict[Key, SeriesRow]:
    """The series of the samples and all others of the same jobs, locked by ID; missing ones are created."""
    job_ids, gpu_ids = list(jobs), [one.gpu_id for one in samples if one.key[0] is None and one.gpu_id is not None]
    series = _locked(job_ids, gpu_ids)
    missing = {one.key: one.gpu_id for one in samples if one.key not in series}
    if not missing:
        return series
    # In a fixed order, whatever the order of the samples: others may be adding the same series.
    in_order = sorted(missing.items(), key=lambda item: item[0][1])
    GpuSeries.objects.bulk_create(
        (
            GpuSeries(job_id=UUID(sql.uid(job_id)) if job_id else None, uuid=uuid, gpu_id=gpu_id)
            for (job_id, uuid), gpu_id in in_order
        ),
        ignore_conflicts=True,
    )
    return _locked(job_ids, gpu_ids)


def _minimums(jobs: Sequence[JobId]) -> dict[JobId, int | None]:
    """The minimums of the policies that running jobs are bound to, None without a policy; those with their first sample
    are bound now (R17)."""
    if not jobs:
        return {}
    minimums: dict[JobId, int | None] = {}
    for job_id, minimum in sql.rows(
        f"SELECT job_id, min_gpu_utilization FROM gpus_jobpolicy WHERE job_id IN ({sql.places(jobs)})", jobs
    ):
        minimums[job_id] = minimum
    for job_id in jobs:
        if job_id not in minimums:
            bound = binding.bind(Job.objects.select_related("run").get(pk=sql.uid(job_id)))
            minimums[job_id] = bound.min_gpu_utilization
    return minimums


def _reset_future_state(series: SeriesRow, now_ms: int) -> None:
    """Drop state stamped by a clock that was ahead and has been set back: until then no sample would count as newer."""
    latest_ms = now_ms + AHEAD_MS
    if series.last_ms is not None and series.last_ms > latest_ms:
        series.last_ms = None
    if series.low_last_ms is not None and series.low_last_ms > latest_ms:
        series.low_since_ms = series.low_last_ms = None


def _fold(series: SeriesRow, timed: TimedSample, minimum: int | None, step_ms: int) -> None:
    """Add one sample to a series' state; a late one never replaces newer values."""
    sample, at_ms = timed.sample, timed.at_ms
    series.first_ms = at_ms if series.first_ms is None else min(series.first_ms, at_ms)
    series.averaged_ms = min(series.averaged_ms, averages.bucket_of(at_ms))
    if series.last_ms is None or at_ms > series.last_ms:
        if series.job_id is not None:
            series.uncounted = averages.with_sample(
                series.uncounted, series.last_ms, at_ms, sample.utilization, step_ms
            )
        series.last_ms = at_ms
        series.index, series.name, series.memory_mib = sample.index, sample.name, sample.memory_mib
        series.power_limit_w = sample.power_limit_w
        series.utilization, series.memory_used_mib = sample.utilization, sample.memory_used_mib
        series.power_w, series.temperature_c = sample.power_w, sample.temperature_c
        series.throttle, series.processes = sample.throttle, list(sample.processes or ())
    if minimum is not None and sample.utilization is not None:
        before = window.Stretch(series.low_since_ms, series.low_last_ms)
        stretch = window.fold(before, at_ms, sample.utilization, minimum, step_ms)
        series.low_since_ms, series.low_last_ms = stretch.since_ms, stretch.last_ms


def _record_sampling(host: Host, snapshot: Snapshot, at: dt.datetime) -> None:
    """Keep how sampling a host went, with an event when that changes."""
    if _touch_unchanged(host, snapshot, at):
        return
    before = HostSampling.objects.filter(host=host).first() or HostSampling(host=host)
    result = {"at": at, "took_ms": snapshot.took_ms, "library": snapshot.library, "error": snapshot.error}
    HostSampling.objects.update_or_create(host=host, defaults=result)
    events = []
    if before.library != snapshot.library:
        kind = HostEventKind.NVML_FOUND if snapshot.library else HostEventKind.NVML_MISSING
        events.append(HostEvent(host=host, at=at, kind=kind))
    if before.error != snapshot.error:
        data = {"error": snapshot.error} if snapshot.error else {}
        kind = HostEventKind.SAMPLING_FAILS if snapshot.error else HostEventKind.SAMPLING_WORKS
        events.append(HostEvent(host=host, at=at, kind=kind, data=data))
    recent = HostEvent.objects.filter(host=host, kind__in=SAMPLING_EVENTS, at__gt=at - AN_HOUR).count()
    HostEvent.objects.bulk_create(events[: max(0, MOST_AN_HOUR - recent)])


def _touch_unchanged(host: Host, snapshot: Snapshot, at: dt.datetime) -> bool:
    """Update the time of an unchanged result; False if it changed. SQL of its own: it runs for every snapshot."""
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE gpus_hostsampling SET at = %s, took_ms = %s WHERE host_id = %s AND library = %s AND error = %s",
            [
                connection.ops.adapt_datetimefield_value(at), snapshot.took_ms, host.pk, snapshot.library,
                snapshot.error,
            ],
        )  # fmt: skip
        return bool(cursor.rowcount)


def db_id(job_id: UUID) -> JobId:
    """A job's ID as a parameter of raw SQL."""
    return job_id if connection.features.has_native_uuid_field else job_id.hex


def _locked(jobs: Sequence[JobId], gpus: Sequence[int]) -> dict[tuple[JobId | None, str], SeriesRow]:
    """All series of these jobs, and of these GPUs without a job, locked in the order of their ids."""
    parts = [f"job_id IN ({sql.places(jobs)})"] if jobs else []
    parts += [f"job_id IS NULL AND gpu_id IN ({sql.places(gpus)})"] if gpus else []
    lock = " FOR NO KEY UPDATE" if connection.features.has_select_for_update else ""
    names = ", ".join(map(connection.ops.quote_name, SERIES))
    found = sql.rows(
        f"SELECT id, job_id, uuid, {names} FROM gpus_gpuseries WHERE {' OR '.join(parts)} ORDER BY id{lock}",
        [*jobs, *gpus],
    )
    series = [SeriesRow(*row) for row in found]
    for row in series:
        if isinstance(row.processes, str):
            row.processes = json.loads(row.processes)
        if isinstance(row.uncounted, str):
            row.uncounted = json.loads(row.uncounted)
    return {(row.job_id, row.uuid): row for row in series}


def _write(samples: Sequence[TimedSample], series: Mapping[Key, SeriesRow]) -> None:
    """Insert samples, and update their series. A second sample of the same moment is ignored."""
    rows = [(series[one.key].id, one.at_ms, *_MEASURED(one.sample)) for one in samples]
    bulk.insert("gpus_gpusample", SAMPLE, rows, ignore_conflicts=True)
    changed = {one.key: series[one.key] for one in samples}.values()
    texts = [
        replace(
            row,
            processes=json.dumps(row.processes),
            uncounted=None if row.uncounted is None else json.dumps(row.uncounted),
        )
        for row in changed
    ]
    bulk.update("gpus_gpuseries", SERIES, list(map(attrgetter(*SERIES, "id"), texts)))
