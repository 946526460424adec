"""The raw SQL of `intake`: each read and write is one statement for all GPUs, as it runs all the time (lib.sql)."""

from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import connection

from dstackweb.gpus.models import GpuSeries, JobPolicy
from dstackweb.gpus.policy.binding import window_of
from dstackweb.gpus.policy.window import Window
from dstackweb.lib import sql

JobId = UUID | str
"""A job's ID as the database driver returns and takes it."""

SAMPLE = {
    "series_id": "bigint", "at_ms": "bigint", "utilization": "smallint", "memory_used_mib": "integer",
    "power_w": "smallint", "temperature_c": "smallint", "throttle": "bigint",
}  # fmt: skip
SERIES = {
    "index": "smallint", "name": "text", "memory_mib": "bigint", "power_limit_w": "smallint", "first_ms": "bigint",
    "last_ms": "bigint", "utilization": "smallint", "memory_used_mib": "bigint", "power_w": "smallint",
    "temperature_c": "smallint", "throttle": "bigint", "processes": "jsonb", "low_since_ms": "bigint",
    "low_last_ms": "bigint", "averaged_ms": "bigint",
}  # fmt: skip
"""The columns of a series that samples change."""


def db_id(job_id: UUID) -> JobId:
    """A job's ID as a parameter of raw SQL."""
    return job_id if connection.features.has_native_uuid_field else job_id.hex


@dataclass(frozen=True, slots=True)
class HostGpu:
    """A registered GPU of a host, and the job that holds it, if any."""

    uuid: str
    gpu_id: int
    job_id: JobId | None
    status: str
    started_at: dt.datetime | None
    gpus: Sequence[str]


def host_gpus(host_id: int) -> list[HostGpu]:
    """The GPUs of a host."""
    found = sql.rows(
        "SELECT gpu.uuid, gpu.id, job.id, job.status, job.started_at, job.gpus FROM backends_gpu gpu"
        " LEFT JOIN runs_allocation held ON held.gpu_id = gpu.id LEFT JOIN runs_job job ON job.id = held.job_id"
        " WHERE gpu.host_id = %s",
        [host_id],
    )
    return [
        HostGpu(uuid, gpu_id, job_id, status, started_at, json.loads(gpus) if gpus else ())
        for uuid, gpu_id, job_id, status, started_at, gpus in found
    ]


@dataclass(slots=True)
class SeriesRow:
    """A series, as far as samples change it; `processes` is JSON."""

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


def locked(jobs: Sequence[JobId], gpus: Sequence[int]) -> dict[tuple[JobId | None, str], SeriesRow]:
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
    return {(row.job_id, row.uuid): row for row in series}


def add(missing: Iterable[tuple[UUID | None, str, int | None]]) -> None:
    """Create series for these jobs, UUIDs and GPUs; existing ones are left unchanged."""
    GpuSeries.objects.bulk_create(
        (GpuSeries(job_id=job_id, uuid=uuid, gpu_id=gpu_id) for job_id, uuid, gpu_id in missing),
        ignore_conflicts=True,
    )


@dataclass(frozen=True, slots=True)
class BoundPolicy:
    """What a job is judged by; not at all without a minimum."""

    minimum: int | None
    window: Window
    noticed_ms: int | None

    @classmethod
    def of(cls, bound: JobPolicy) -> BoundPolicy:
        """From its row."""
        return cls(bound.min_gpu_utilization, window_of(bound), bound.noticed_ms)


def policies(jobs: Sequence[JobId]) -> dict[JobId, BoundPolicy]:
    """The policies of those of these jobs that are bound to one."""
    found = sql.rows(
        "SELECT job_id, min_gpu_utilization, noticed_ms, time_window_s, scope, from_ms FROM gpus_jobpolicy"
        f" WHERE job_id IN ({sql.places(jobs)})",
        jobs,
    )
    return {
        job_id: BoundPolicy(minimum, Window(window_s * 1000, scope, from_ms), noticed_ms)
        for job_id, minimum, noticed_ms, window_s, scope, from_ms in found
    }


def write(samples: Sequence[Mapping[str, Any]], series: Collection[SeriesRow]) -> None:
    """Insert samples, by SAMPLE's names, and update their series. A second sample of the same moment is ignored."""
    sql.write(_insert(connection.vendor), samples)
    sql.write(_update(connection.vendor), [{name: getattr(row, name) for name in ("id", *SERIES)} for row in series])


@functools.cache
def _insert(_vendor: str) -> str:
    names = ", ".join(map(connection.ops.quote_name, SAMPLE))
    return (
        f"INSERT INTO gpus_gpusample ({names}) SELECT {names} FROM {sql.rows_of(SAMPLE)}"
        " WHERE true ON CONFLICT DO NOTHING"
    )


@functools.cache
def _update(_vendor: str) -> str:
    names = map(connection.ops.quote_name, SERIES)
    values = ", ".join(f"{name} = given.{name}" for name in names)
    return (
        f"UPDATE gpus_gpuseries SET {values} FROM {sql.rows_of({'id': 'bigint', **SERIES})}"
        " WHERE gpus_gpuseries.id = given.id"
    )
