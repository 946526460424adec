"""Runs with GPUs and a past: samples as a watcher would have left them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Gpu, Host
from dstackweb.gpus.models import GpuSample, GpuSeries, interval_ms
from dstackweb.lib.times import to_ms
from dstackweb.runs.models import Job, Run
from tests.factories import make_host, make_run, place_all, placed_job, start


def past_run(
    project: Project,
    user: User,
    name: str,
    used: Sequence[Sequence[int | None]],
    *,
    now: dt.datetime | None = None,
    ended_ago_s: int | None = None,
    **keys: Any,
) -> Job:
    """The job of a run with as many GPUs as `used` has lists: their samples, the newest just now or at its end.

    None is a missing sample. The job began one interval before its first sample. It runs, unless it has ended.
    """
    if not Host.objects.exists():
        make_host(gpus=8, cpus=64)
    run = make_run(project, user, name, resources={"gpu": len(used)}, **keys)
    place_all()
    job = start(placed_job(run))
    ends = (now or timezone.now()) - dt.timedelta(seconds=ended_ago_s or 0)
    began = ends - dt.timedelta(milliseconds=interval_ms() * max(len(samples) for samples in used))
    ended_at = None if ended_ago_s is None else ends
    Job.objects.filter(pk=job.pk).update(started_at=began, placed_at=began, ended_at=ended_at)
    Run.objects.filter(pk=run.pk).update(started_at=began, ended_at=ended_at)
    for uuid, samples in zip(job.gpus, used, strict=True):
        add_samples(job, uuid, samples, ends)
    job.refresh_from_db()
    return job


def add_samples(job: Job, uuid: str, used: Sequence[int | None], newest_at: dt.datetime) -> GpuSeries:
    """A series of a job's GPU, and what was seen of it up to a moment."""
    gpu = Gpu.objects.filter(uuid=uuid).first()
    every, newest = interval_ms(), to_ms(newest_at)
    first = newest - every * (len(used) - 1)
    series = GpuSeries.objects.create(
        job=job, gpu=gpu, uuid=uuid, index=gpu.index if gpu else 0, name="NVIDIA A100-SXM4-80GB", memory_mib=81920,
        power_limit_w=400, first_ms=first, last_ms=newest, utilization=used[-1], memory_used_mib=1024, power_w=70,
        temperature_c=31,
    )  # fmt: skip
    GpuSample.objects.bulk_create(
        GpuSample(series=series, at_ms=first + every * number, utilization=value, memory_used_mib=1024, power_w=70)
        for number, value in enumerate(used)
        if value is not None
    )
    return series
