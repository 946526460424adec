"""Runs whose GPUs have been watched for a while, as the pages find them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from typing import Any

from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.gpus import intake
from dstackweb.runs.models import Job, Run
from tests.factories import make_run, place_all, placed_job, start
from tests.gpus.snapshots import EVERY_MS, sample

POLICY = {"min_gpu_utilization": 50, "time_window": "1h"}
Used = Callable[[int, int], int | None]
"""Utilization of the GPU at this place, so many seconds before now."""


def watched(
    project: Project,
    user: User,
    name: str,
    minutes: float,
    used: Used,
    *,
    gpus: int = 2,
    silent_s: int = 0,
    policy: dict[str, Any] | None = POLICY,
    **keys: Any,
) -> Run:
    """A run that began so many minutes ago, with a sample of each GPU every ten seconds, up to `silent_s` ago."""
    more = {"utilization_policy": policy} if policy else {}
    run = make_run(project, user, name, resources={"gpu": gpus}, **more, **keys)
    place_all()
    began = timezone.now() - dt.timedelta(minutes=minutes)
    for node in range(run.spec["nodes"]):
        start(placed_job(run, node))
    Job.objects.filter(run=run).update(started_at=began, placed_at=began)
    Run.objects.filter(pk=run.pk).update(started_at=began, submitted_at=began, queued_at=began)
    for job in Job.objects.filter(run=run).select_related("run"):
        see(job, began, used, silent_s)
    return Run.objects.get(pk=run.pk)


def see(job: Job, since: dt.datetime, used: Used, silent_s: int = 0) -> None:
    """Samples of a job's GPUs from a moment on."""
    now_ms, since_ms = round(timezone.now().timestamp() * 1000), round(since.timestamp() * 1000)
    moments = range(now_ms - silent_s * 1000 - 1000, since_ms, -EVERY_MS)
    intake.add_samples(
        job, [(at_ms, _samples(job.gpus, (now_ms - at_ms) // 1000, used)) for at_ms in reversed(moments)]
    )


def _samples(gpus: Sequence[str], ago_s: int, used: Used) -> list[Any]:
    return [
        sample(uuid, used(place, ago_s), memory_used_mib=20_000 + 9_000 * place, power_w=310, temperature_c=61)
        for place, uuid in enumerate(gpus)
    ]
