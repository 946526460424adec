"""Hosts watched over an injected time: what a host's look at its GPUs does, one look after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Gpu, Host
from dstackweb.gpus import intake
from dstackweb.gpus.window import PolicyAction
from dstackweb.lib.times import to_moment
from dstackweb.runner.nvml import Snapshot
from dstackweb.runs import attempts
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import Reason
from dstackweb.scheduler import utilization
from tests.factories import make_host, make_run, place_all, placed_job, start
from tests.gpus.snapshots import EVERY_MS, START_MS, sample

MINUTE = 60_000
IDLE = {"min_gpu_utilization": 50, "time_window": "1m"}


def begin(project: Project, member: User, name: str = "train", *, gpus: int = 1, **keys: Any) -> Job:
    """The first job of a run with GPUs whose commands started at START_MS; hosts are there already, or one is made."""
    if not Host.objects.exists():
        make_host(gpus=4, cpus=16)
    run = make_run(project, member, name, resources={"gpu": gpus}, **keys)
    assert place_all() == 1
    for job in Job.objects.filter(run=run):
        start(job, nonce=str(job.node))
    Job.objects.filter(run=run).update(started_at=to_moment(START_MS))
    return placed_job(run)


Load = Callable[[str, int], int | None]
"""A GPU's utilization by its UUID, some milliseconds after START_MS; None: it doesn't answer."""


def watch(until_ms: int, load: Load = lambda uuid, ms: 0, *, from_ms: int = 0) -> list[tuple[int, PolicyAction]]:
    """Snapshots of each host every ten seconds until so long after START_MS, each judged; what was done when."""
    done = []
    for ms in range(from_ms, until_ms + 1, EVERY_MS):
        for host in Host.objects.order_by("pk"):
            look_at(host, load, ms)
            done += [(ms, action) for action in utilization.judge_jobs(to_moment(START_MS + ms)).values()]
    return done


def look_at(host: Host, load: Load, ms: int) -> None:
    """Store one snapshot of a host's GPUs."""
    seen = [(gpu, load(gpu.uuid, ms)) for gpu in Gpu.objects.filter(host=host).order_by("index")]
    samples = tuple(sample(gpu.uuid, used) for gpu, used in seen if used is not None)
    intake.add_snapshot(host, Snapshot(samples=samples), START_MS + ms)


def stopped(run: Run) -> Run:
    """The run once its runners have obeyed and reported the end of their jobs."""
    for job in Job.objects.filter(run=run, ended_at=None):
        attempts.end_job(job.pk, job.stop_reason or Reason.DONE_BY_RUNNER, exit_code=143)
    run.refresh_from_db()
    return run
