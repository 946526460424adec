"""The tasks that django-q2 calls: thin entry points. Any may be lost, late or doubled."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.utils import timezone
from django.utils.module_loading import import_string

from dstackweb.gpus.samples import averages
from dstackweb.offers import sources
from dstackweb.runs import history, spend
from dstackweb.scheduler.cloud import watch as cloud_watch
from dstackweb.scheduler.cloud.cloud_slots import cloud_slot
from dstackweb.scheduler.hosts import gpu_poll
from dstackweb.scheduler.hosts import jobs as host_jobs
from dstackweb.scheduler.monitoring import ended_tasks, job_watch
from dstackweb.scheduler.passes import claim as pass_claim
from dstackweb.scheduler.passes import placement_pass
from dstackweb.scheduler.processes import housekeeping, periodic
from dstackweb.scheduler.processes.periodic import enqueue

log = logging.getLogger(__name__)

TASKS = 8
"""Up to this many jobs are checked by a task each."""
ORPHANS_AGAIN_S = 10.0
MAX_CHECKS = 5
"""Jobs per task: a start may take 10 s, and django-q kills a task after a minute."""


def tick(name: str, task: str, enqueued_at: float, every_s: float, *args: str) -> None:
    """Run a periodic job."""
    periodic.run_tick(name, functools.partial(import_string(task), *args), enqueued_at, every_s)


def place_waiting() -> int:
    """Run placement passes; returns how many runs were placed."""
    return placement_pass.run_passes()


def watch() -> None:
    """Check everything that is placed."""
    job_watch.watch()


def check_jobs(*job_ids: str) -> None:
    """Check a few jobs, on their host."""
    for job_id in job_ids:
        host_jobs.check_job(job_id)


def poll_cloud_jobs(*job_ids: str) -> None:
    """Advance a few cloud jobs."""
    with cloud_slot() as free:
        if free:
            cloud_watch.poll_jobs(job_ids)


def poll_clouds() -> None:
    """Advance all cloud jobs and instances."""
    with cloud_slot() as free:
        if free:
            cloud_watch.poll_all()


def end_orphan_instances() -> None:
    """Terminate cloud instances that no row wants."""
    with cloud_slot() as free:
        if free:
            cloud_watch.end_orphans()
        else:
            periodic.bring_forward("cloud-orphans", ORPHANS_AGAIN_S)


def mark_budgets() -> None:
    """Record which shares of their budgets projects have spent."""
    spend.mark_budgets(timezone.now())


def check_host(host: str) -> None:
    """Check all jobs of a host, on it."""
    host_jobs.check_host(host)


def tidy_host(host: str) -> None:
    """Remove what ended jobs left on a host, on it."""
    housekeeping.tidy_host(host)


def sample_gpus(host: str) -> None:
    """Sample each GPU of a host, on it."""
    gpu_poll.sample_host(host)


def sample_queue_lengths() -> None:
    """Record the length of each queue, for its history."""
    history.sample_lengths(timezone.now())


def average_gpu_samples() -> None:
    """Average GPU samples, and prune old ones."""
    averages.roll(timezone.now())


def settle_tasks() -> None:
    """Settle the tasks of ended attempts."""
    ended_tasks.settle(timezone.now())


def refresh_offers() -> int:
    """Refresh offer sources that are due; returns how many."""
    return sources.refresh_due(timezone.now())


def keep_house() -> None:
    """Prune data that is no longer needed."""
    housekeeping.keep_house()


def enqueue_pass(**_signal: Any) -> None:
    """Enqueue a placement pass unless one is queued already."""
    if pass_claim.request():
        enqueue("dstackweb.scheduler.processes.tasks.place_waiting", cluster=settings.DSTACKWEB_CLUSTERS["control"])


def settle_tasks_soon(**_signal: Any) -> None:
    """Settle the tasks of an attempt that has just ended with the next tick."""
    periodic.bring_forward("ended-tasks", 0)


def enqueue_refresh(**_signal: Any) -> None:
    """Refresh due offer sources now instead of with the next tick."""
    enqueue("dstackweb.scheduler.processes.tasks.refresh_offers", cluster=settings.DSTACKWEB_CLUSTERS["cloud"])


def enqueue_cloud_polls(job_ids: Sequence[str], **_signal: Any) -> None:
    """Enqueue one task per cloud job, since each may call a cloud."""
    for job_id in job_ids:
        enqueue(
            "dstackweb.scheduler.processes.tasks.poll_cloud_jobs",
            job_id,
            cluster=settings.DSTACKWEB_CLUSTERS["cloud"],
        )


def enqueue_job_checks(job_ids: Sequence[str], cluster: str, **_signal: Any) -> None:
    """Enqueue checks of a host's jobs: one task each for few jobs, so that all workers share them; batches for many."""
    size = min(MAX_CHECKS, -(-len(job_ids) // TASKS))
    for first in range(0, len(job_ids), size):
        enqueue("dstackweb.scheduler.processes.tasks.check_jobs", *job_ids[first : first + size], cluster=cluster)
