"""Periodic work as data, and its enqueueing by one guarded UPDATE.

A tick older than one interval does nothing; none is enqueued while one is outstanding.
"""

from __future__ import annotations

import datetime as dt
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db.models import Q
from django.utils import timezone
from django_q.brokers import Broker, get_broker
from django_q.tasks import async_task

from dstackweb.gpus.samples import averages
from dstackweb.offers import sources
from dstackweb.runs import spend
from dstackweb.scheduler.cloud import common as cloud
from dstackweb.scheduler.models import PeriodicJob
from dstackweb.scheduler.monitoring import ended_tasks

log = logging.getLogger(__name__)

OUTSTANDING_S = 10.0
"""A tick that has not ended by then counts as lost, and the next may start. Short, because a killed worker delays
everything by this long, and a second tick beside a slow one does no harm."""


@dataclass(frozen=True)
class Periodic:
    """Every `every_s` seconds, `cluster` calls the dotted path `task` with `args`, if `when` returns true."""

    name: str
    task: str
    every_s: float
    cluster: str
    args: tuple[str, ...] = ()
    when: Callable[[], bool] | None = None


def control_jobs() -> list[Periodic]:
    """Work of the deployment, enqueued by whichever ticker is first."""
    control = settings.DSTACKWEB_CLUSTERS["control"]
    tasks = "dstackweb.scheduler.processes.tasks"
    return [
        Periodic("pass", f"{tasks}.place_waiting", settings.DSTACKWEB_PASS_EVERY_S, control),
        Periodic("watch", f"{tasks}.watch", settings.DSTACKWEB_WATCH_EVERY_S, control),
        Periodic("queue-lengths", f"{tasks}.sample_queue_lengths", 300.0, control),
        Periodic(
            "offers",
            f"{tasks}.refresh_offers",
            5.0,
            settings.DSTACKWEB_CLUSTERS["cloud"],
            when=sources.has_sourced_backends,
        ),
        Periodic("cloud", f"{tasks}.poll_clouds", 5.0, settings.DSTACKWEB_CLUSTERS["cloud"], when=cloud.has_work),
        Periodic(
            "cloud-orphans",
            f"{tasks}.end_orphan_instances",
            300.0,
            settings.DSTACKWEB_CLUSTERS["cloud"],
            when=cloud.has_cloud_backends,
        ),
        Periodic("budgets", f"{tasks}.mark_budgets", 30.0, control, when=spend.has_budgets),
        Periodic("gpu-averages", f"{tasks}.average_gpu_samples", 60.0, control, when=averages.has_samples),
        Periodic("ended-tasks", f"{tasks}.settle_tasks", 30.0, control, when=ended_tasks.has_work),
        Periodic("housekeeping", f"{tasks}.keep_house", 600.0, control),
    ]


def host_jobs(host: str, cluster: str) -> list[Periodic]:
    """Work of one host, enqueued by its own ticker for its own cluster."""
    tasks = "dstackweb.scheduler.processes.tasks"
    check, sample, tidy = PeriodicJob.host_names(host)
    return [
        Periodic(check, f"{tasks}.check_host", settings.DSTACKWEB_WATCH_EVERY_S, cluster, (host,)),
        Periodic(sample, f"{tasks}.sample_gpus", settings.DSTACKWEB_SAMPLE_EVERY_S, cluster, (host,)),
        Periodic(tidy, f"{tasks}.tidy_host", 600.0, cluster, (host,)),
    ]


def enqueue(task: str, *args: Any, cluster: str, name: str | None = None) -> None:
    """Have `cluster` call the dotted path `task`. Raises what the broker raises while it is unreachable."""
    async_task(task, *args, cluster=cluster, broker=_broker(cluster), task_name=name)


@functools.cache
def _broker(cluster: str) -> Broker:
    """Kept for the life of the process: django-q2 would open a connection to Redis for each task."""
    return get_broker(cluster)


def ensure_rows(jobs: list[Periodic]) -> None:
    """Create missing rows."""
    PeriodicJob.objects.bulk_create([PeriodicJob(name=job.name) for job in jobs], ignore_conflicts=True)


def enqueue_due(jobs: list[Periodic], now: dt.datetime) -> int:
    """Enqueue what is due and not outstanding; returns how many.

    A row whose times lie further ahead than they could have been set (the clock was put back) counts as due.
    """
    names = [job.name for job in jobs]
    horizon = now + dt.timedelta(seconds=OUTSTANDING_S + max(job.every_s for job in jobs))
    due = Q(due_at__lte=now) | Q(due_at__gt=horizon)
    free = Q(outstanding_until=None) | Q(outstanding_until__lte=now) | Q(outstanding_until__gt=horizon)
    ready = set(PeriodicJob.objects.filter(due, free, name__in=names).values_list("name", flat=True))
    return sum(_enqueue(job, due & free, now) for job in jobs if job.name in ready)


def _enqueue(job: Periodic, guard: Q, now: dt.datetime) -> bool:
    won = PeriodicJob.objects.filter(guard, name=job.name).update(
        due_at=now + dt.timedelta(seconds=job.every_s),
        outstanding_until=now + dt.timedelta(seconds=max(OUTSTANDING_S, job.every_s)),
    )
    if not won:
        return False
    try:
        if job.when is not None and not job.when():
            PeriodicJob.objects.filter(name=job.name).update(outstanding_until=None)
            return False
        enqueue(
            "dstackweb.scheduler.processes.tasks.tick", job.name, job.task, now.timestamp(), job.every_s, *job.args,
            cluster=job.cluster, name=job.name,
        )  # fmt: skip
    except Exception:
        PeriodicJob.objects.filter(name=job.name).update(outstanding_until=None)
        raise
    return True


def bring_forward(name: str, seconds: float) -> None:
    """Make a job due again in `seconds`."""
    PeriodicJob.objects.filter(name=name).update(due_at=timezone.now() + dt.timedelta(seconds=seconds))


def run_tick(name: str, work: Callable[[], object], enqueued_at: float, every_s: float) -> None:
    """Do a tick's work unless it is too old, and mark it as no longer outstanding.

    An error is stored on the row, for the health page, and raised again.
    """
    started = timezone.now()
    if started.timestamp() - enqueued_at > max(every_s, OUTSTANDING_S):
        return
    PeriodicJob.objects.filter(name=name).update(last_started_at=started)
    error = ""
    try:
        work()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        raise
    finally:
        PeriodicJob.objects.filter(name=name).update(
            outstanding_until=None, last_ended_at=timezone.now(), last_error=error
        )
