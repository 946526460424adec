"""What django-q2 calls: thin entry points, each a hint that may be lost, late or doubled."""

from __future__ import annotations

import functools
import logging
from typing import Any

from django.conf import settings
from django.utils import timezone
from django.utils.module_loading import import_string
from django_q.tasks import async_task

from dstackweb.runs import history
from dstackweb.scheduler import hosting, housekeeping, passes, periodic
from dstackweb.scheduler import watch as watching

log = logging.getLogger(__name__)


def tick(name: str, task: str, enqueued_at: float, every_s: float, *args: str) -> None:
    """A periodic job's turn."""
    periodic.run_tick(name, functools.partial(import_string(task), *args), enqueued_at, every_s)


def place_waiting() -> int:
    """A placement pass; returns how many runs it placed."""
    return passes.run_passes()


def watch() -> None:
    """A look at everything that is placed."""
    watching.watch()


def look_at_job(job_id: str) -> None:
    """A look at one job, on its host."""
    hosting.look_at_job(job_id)


def look_over_host(host: str) -> None:
    """A look at all jobs of a host, on it."""
    hosting.look_over_host(host)


def tidy_host(host: str) -> None:
    """Remove what ended jobs left on a host, on it."""
    housekeeping.tidy_host(host)


def sample_queue_lengths() -> None:
    """Keep how many runs wait in each queue, for its history."""
    history.sample_lengths(timezone.now())


def keep_house() -> None:
    """Prune what nobody will look at again."""
    housekeeping.keep_house()


def enqueue_pass(**_signal: Any) -> None:
    """Enqueue a pass unless one is queued that has not begun."""
    if passes.request():
        async_task("dstackweb.scheduler.tasks.place_waiting", cluster=settings.DSTACKWEB_CLUSTERS["control"])


def enqueue_look(job_id: str, cluster: str, **_signal: Any) -> None:
    """Ask a job's host to look at it."""
    async_task("dstackweb.scheduler.tasks.look_at_job", job_id, cluster=cluster)
