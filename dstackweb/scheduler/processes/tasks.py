"""What django-q2 calls: thin entry points, each a hint that may be lost, late or doubled."""

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
from dstackweb.scheduler.cloud.cloud_slots import cloud_turn
from dstackweb.scheduler.hosts import gpu_poll
from dstackweb.scheduler.hosts import jobs as hosting
from dstackweb.scheduler.monitoring import ended_tasks
from dstackweb.scheduler.monitoring import job_watch as watching
from dstackweb.scheduler.passes import claim as pass_claim
from dstackweb.scheduler.passes import placement_pass
from dstackweb.scheduler.processes import housekeeping, periodic
from dstackweb.scheduler.processes.periodic import enqueue

log = logging.getLogger(__name__)

TASKS = 8
"""Up to so many jobs are looked at by a task each."""
REAP_AGAIN_S = 10.0
MAX_LOOKS = 5
"""Jobs that one task looks at: a start may take 10 s, and django-q kills a task after a minute."""


def tick(name: str, task: str, enqueued_at: float, every_s: float, *args: str) -> None:
    """A periodic job's turn."""
    periodic.run_tick(name, functools.partial(import_string(task), *args), enqueued_at, every_s)


def place_waiting() -> int:
    """A placement pass; returns how many runs it placed."""
    return placement_pass.run_passes()


def watch() -> None:
    """A look at everything that is placed."""
    watching.watch()


def look_at_jobs(*job_ids: str) -> None:
    """A look at a few jobs, on their host."""
    for job_id in job_ids:
        hosting.look_at_job(job_id)


def look_at_cloud_jobs(*job_ids: str) -> None:
    """A look at a few jobs that clouds' machines are for."""
    with cloud_turn() as mine:
        if mine:
            cloud_watch.look_at_jobs(job_ids)


def look_over_clouds() -> None:
    """A look at all jobs and machines of clouds."""
    with cloud_turn() as mine:
        if mine:
            cloud_watch.look_over()


def reap_machines() -> None:
    """End machines at clouds that no row wants."""
    with cloud_turn() as mine:
        if mine:
            cloud_watch.reap()
        else:
            periodic.bring_forward("cloud-orphans", REAP_AGAIN_S)


def mark_budgets() -> None:
    """Note which shares of their budgets projects have spent."""
    spend.mark_budgets(timezone.now())


def look_over_host(host: str) -> None:
    """A look at all jobs of a host, on it."""
    hosting.look_over_host(host)


def tidy_host(host: str) -> None:
    """Remove what ended jobs left on a host, on it."""
    housekeeping.tidy_host(host)


def sample_gpus(host: str) -> None:
    """One sample of each GPU of a host, on it."""
    gpu_poll.sample_host(host)


def sample_queue_lengths() -> None:
    """Keep how many runs wait in each queue, for its history."""
    history.sample_lengths(timezone.now())


def average_gpu_samples() -> None:
    """Average samples of GPUs, and prune what is averaged and old."""
    averages.roll(timezone.now())


def settle_tasks() -> None:
    """Release what was still to come of the tasks of ended attempts."""
    ended_tasks.settle(timezone.now())


def refresh_offers() -> int:
    """Ask the clouds for what is due; returns for how many sources."""
    return sources.refresh_due(timezone.now())


def keep_house() -> None:
    """Prune what nobody will look at again."""
    housekeeping.keep_house()


def enqueue_pass(**_signal: Any) -> None:
    """Enqueue a pass unless one is queued that has not begun."""
    if pass_claim.request():
        enqueue("dstackweb.scheduler.processes.tasks.place_waiting", cluster=settings.DSTACKWEB_CLUSTERS["control"])


def settle_tasks_soon(**_signal: Any) -> None:
    """Have the tasks of an attempt that has just ended settled at the next tick."""
    periodic.bring_forward("ended-tasks", 0)


def enqueue_refresh(**_signal: Any) -> None:
    """Have what is due asked for now rather than at the next tick."""
    enqueue("dstackweb.scheduler.processes.tasks.refresh_offers", cluster=settings.DSTACKWEB_CLUSTERS["cloud"])


def enqueue_cloud_looks(job_ids: Sequence[str], **_signal: Any) -> None:
    """Have jobs of clouds looked at: each by a task of its own, since each may ask a cloud."""
    for job_id in job_ids:
        enqueue(
            "dstackweb.scheduler.processes.tasks.look_at_cloud_jobs",
            job_id,
            cluster=settings.DSTACKWEB_CLUSTERS["cloud"],
        )


def enqueue_looks(job_ids: Sequence[str], cluster: str, **_signal: Any) -> None:
    """Ask a host to look at its jobs: few by one task each, so that all its workers start some; many by a handful."""
    size = min(MAX_LOOKS, -(-len(job_ids) // TASKS))
    for first in range(0, len(job_ids), size):
        enqueue("dstackweb.scheduler.processes.tasks.look_at_jobs", *job_ids[first : first + size], cluster=cluster)
