"""The tasks that django-q2 calls, and the periodic work among them. Any task may be lost, late or doubled. A tick older
than one interval does nothing; none is enqueued while one is outstanding."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db.models import Q
from django.utils import timezone
from django_q.brokers import Broker, get_broker
from django_q.tasks import async_task

from dstackweb.gpus import averages
from dstackweb.lib import logs
from dstackweb.lib.process import try_lock
from dstackweb.lib.storage import storage
from dstackweb.offers import sources
from dstackweb.runs import history, usage
from dstackweb.runs.queue import queues
from dstackweb.scheduler import hosts, utilization, watch
from dstackweb.scheduler.cloud import instances, watch as cloud_watch
from dstackweb.scheduler.models import PassRequest, PeriodicJob
from dstackweb.scheduler.passes import forecast_pass, placement_pass
from dstackweb.scheduler.processes import retention

log = logging.getLogger(__name__)

OUTSTANDING_S = 10.0
"""A tick that has not ended by then counts as lost, and the next may start. Short, because a killed worker delays
everything by this long, and a second tick beside a slow one does no harm."""
TASKS = 8
"""Up to this many jobs are checked by a task each."""
CLOUDS_AGAIN_S = 0.5
ORPHANS_AGAIN_S = 10.0
PRUNE_AGAIN_S = 2.0
PROBE_EVERY_S = 10.0
"""How often a host that is held back tries a start."""
CHANGES_S = 1.0
"""Seconds until an expected change of a source is read: an engine takes as long to see that a job has ended."""
MAX_CHECKS = 5
"""Jobs per task: a start may take 10 s, and django-q kills a task after a minute."""


@dataclass(frozen=True)
class Periodic:
    """Every `every_s` seconds, a worker of `cluster` calls `work`, if `when` returns true."""

    name: str
    work: Callable[[], object]
    every_s: float
    cluster: str
    when: Callable[[], bool] | None = None


def control_jobs() -> list[Periodic]:
    """Work of the deployment, enqueued by whichever ticker is first."""
    control, clouds = settings.DSTACKWEB_CLUSTERS["control"], settings.DSTACKWEB_CLUSTERS["cloud"]
    now = timezone.now
    return [
        Periodic("pass", placement_pass.run_passes, settings.DSTACKWEB_PASS_EVERY_S, control),
        Periodic("watch", watch.watch, settings.DSTACKWEB_WATCH_EVERY_S, control),
        Periodic(
            "policies",
            lambda: utilization.judge_jobs(now()),
            settings.DSTACKWEB_WATCH_EVERY_S,
            control,
            when=lambda: utilization.has_low_jobs(now()),
        ),
        Periodic("queue-lengths", lambda: history.sample_lengths(now()), 120.0, control),
        Periodic("starts", forecast_pass.refresh, 30.0, control, when=forecast_pass.has_work),
        Periodic("offers", refresh_offers, 5.0, clouds, when=sources.has_sourced_backends),
        Periodic("cloud", poll_clouds, 5.0, clouds, when=instances.has_work),
        Periodic("cloud-orphans", end_orphan_instances, 300.0, clouds, when=instances.has_cloud_backends),
        Periodic("fair-shares", lambda: queues.count_shares(now()), 60.0, control, when=queues.has_fair_queues),
        Periodic("budgets", lambda: usage.mark_budgets(now()), 30.0, control, when=usage.has_budgets),
        Periodic("gpu-averages", lambda: averages.roll(now()), 60.0, control, when=averages.has_samples),
        Periodic("gpu-usage", averages.count_idle, 60.0, control, when=averages.has_uncounted),
        Periodic("ended-tasks", lambda: watch.settle_tasks(now()), 30.0, control, when=watch.has_unsettled_tasks),
        Periodic("housekeeping", retention.keep_house, 600.0, control),
        Periodic("storage", keep_storage, 30.0, clouds),
        Periodic("retention", prune_old_data, 600.0, control),
        *_registered.values(),
    ]


_registered: dict[str, Periodic] = {}


def register(name: str, work: Callable[[], object], every_s: float) -> None:
    """Periodic work of a room above this one, which waits for nothing but the database."""
    _registered[name] = Periodic(name, work, every_s, settings.DSTACKWEB_CLUSTERS["control"])


def register_calls(name: str, work: Callable[[], object], every_s: float, when: Callable[[], bool]) -> None:
    """Periodic work of a room above this one that waits for other servers. It is done where clouds are called, but for
    at most a fifth of the time: servers that hang delay neither passes nor clouds."""

    def do() -> None:
        with cloud_slot() as free:
            if not free:
                return
            began = time.monotonic()
            try:
                work()
            finally:
                pause_s = max(every_s, 4 * (time.monotonic() - began))
                PeriodicJob.objects.filter(name=name).update(due_at=timezone.now() + dt.timedelta(seconds=pause_s))

    _registered[name] = Periodic(name, do, every_s, settings.DSTACKWEB_CLUSTERS["cloud"], when)


def host_jobs(host: str) -> list[Periodic]:
    """Work of a server's own machine, enqueued by its ticker for its cluster. Other machines have an agent."""
    cluster = settings.DSTACKWEB_CLUSTERS["control"]
    jobs, gpus, files, probe = PeriodicJob.host_names(host)
    return [
        Periodic(jobs, lambda: hosts.check_jobs(host), settings.DSTACKWEB_WATCH_EVERY_S, cluster),
        Periodic(gpus, lambda: hosts.sample_gpus(host), settings.DSTACKWEB_SAMPLE_EVERY_S, cluster),
        Periodic(files, lambda: remove_old_files(host), 600.0, cluster),
        Periodic(probe, lambda: hosts.probe_start(host), PROBE_EVERY_S, cluster, when=lambda: hosts.is_held_back(host)),
    ]


def ensure_rows(jobs: Sequence[Periodic]) -> None:
    PeriodicJob.objects.bulk_create([PeriodicJob(name=job.name) for job in jobs], ignore_conflicts=True)


def enqueue_due(jobs: Sequence[Periodic], now: dt.datetime) -> int:
    """Enqueue what is due and not outstanding; returns how many. A row whose times lie further ahead than they could
    have been set (the clock was put back) counts as due."""
    names = [job.name for job in jobs]
    horizon = now + dt.timedelta(seconds=OUTSTANDING_S + max(job.every_s for job in jobs))
    due = Q(due_at__lte=now) | Q(due_at__gt=horizon)
    free = Q(outstanding_until=None) | Q(outstanding_until__lte=now) | Q(outstanding_until__gt=horizon)
    ready = set(PeriodicJob.objects.filter(due, free, name__in=names).values_list("name", flat=True))
    return sum(_enqueue_tick(job, due & free, now) for job in jobs if job.name in ready)


def _enqueue_tick(job: Periodic, guard: Q, now: dt.datetime) -> bool:
    won = PeriodicJob.objects.filter(guard, name=job.name).update(
        due_at=now + dt.timedelta(seconds=job.every_s),
        outstanding_until=now + dt.timedelta(seconds=max(OUTSTANDING_S, job.every_s)),
    )
    enqueued = False
    try:
        if won and (job.when is None or job.when()):
            enqueue(tick, job.name, now.timestamp(), cluster=job.cluster, name=job.name)
            enqueued = True
    finally:
        if won and not enqueued:
            PeriodicJob.objects.filter(name=job.name).update(outstanding_until=None)
    return enqueued


def tick(name: str, enqueued_at: float) -> None:
    """Run a periodic job of the deployment or of this machine."""
    host = name.partition(":")[2]
    if host and host != settings.DSTACKWEB_HOST_NAME:
        # This machine's GPUs and files are not that host's.
        log.warning("%s: this is host %s; nothing was done", name, settings.DSTACKWEB_HOST_NAME)
        return
    job = next((job for job in (host_jobs(host) if host else control_jobs()) if job.name == name), None)
    if job is None:
        log.warning("%s is periodic work of another version: left to its workers", name)
        return
    run_tick(job, enqueued_at)


def run_tick(job: Periodic, enqueued_at: float) -> None:
    """Do a tick's work unless it is too old. Its error is stored on the row, for the health page, and raised again."""
    started = timezone.now()
    if started.timestamp() - enqueued_at > max(job.every_s, OUTSTANDING_S):
        return
    row = PeriodicJob.objects.filter(name=job.name)
    row.update(last_started_at=started)
    error = ""
    try:
        job.work()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        raise
    finally:
        row.update(outstanding_until=None, last_ended_at=timezone.now(), last_error=error)


def enqueue(task: Callable[..., object], *args: Any, cluster: str, name: str | None = None) -> None:
    """Have `cluster` call a function of a module. Raises what the broker raises while it is unreachable."""
    # By its path: another version's worker logs a function that it does not know, but cannot unpickle one.
    path, cause = f"{task.__module__}.{task.__qualname__}", logs.request_id.get() or None
    async_task(path, *args, cluster=cluster, broker=_broker(cluster), task_name=name, group=cause)


@functools.cache
def _broker(cluster: str) -> Broker:
    """Kept for the life of the process: django-q2 would open a connection to Redis for each task."""
    return get_broker(cluster)


def _bring_forward(name: str, seconds: float) -> None:
    """Make a periodic job due again in `seconds`, unless it is due sooner."""
    at = timezone.now() + dt.timedelta(seconds=seconds)
    PeriodicJob.objects.filter(name=name, due_at__gt=at).update(due_at=at)


def prune_soon() -> None:
    _bring_forward("retention", 0)


def prune_old_data() -> None:
    """Prune for a while, and again soon if that was not all."""
    if retention.prune():
        _bring_forward("retention", PRUNE_AGAIN_S)


def keep_storage() -> None:
    """Put small parts of logs together. Its error, also of storage that is away, is on the health page."""
    with cloud_slot() as free:  # object storage may hang, as clouds may
        if not free:
            return
        storage().check()
        if not storage().settle():
            _bring_forward("storage", PRUNE_AGAIN_S)


def remove_old_files(host: str) -> None:
    """Remove old files of this host for a while, and again soon if that was not all."""
    if hosts.remove_old_files(host):
        _bring_forward(PeriodicJob.host_names(host)[2], PRUNE_AGAIN_S)


def enqueue_pass(*, urgent: bool = True, **_signal: Any) -> None:
    """Enqueue a placement pass unless one is queued already."""
    if PassRequest.make(urgent=urgent):
        enqueue(placement_pass.run_requested, cluster=settings.DSTACKWEB_CLUSTERS["control"])


def settle_tasks_soon(**_signal: Any) -> None:
    """Settle the tasks of an attempt that has just ended with the next tick."""
    _bring_forward("ended-tasks", 0)


def refresh_offers() -> int:
    """Refresh offer sources that are due; returns how many."""
    return sources.refresh_due(timezone.now())


def refresh_offers_soon(**_signal: Any) -> None:
    """Have the next tick of offers once what they show has changed, unless it comes sooner."""
    _bring_forward("offers", CHANGES_S)


def enqueue_refresh(**_signal: Any) -> None:
    """Refresh due offer sources now instead of with the next tick."""
    enqueue(refresh_offers, cluster=settings.DSTACKWEB_CLUSTERS["cloud"])


def check_jobs(*job_ids: str) -> None:
    """Check a few jobs, on their host."""
    for job_id in job_ids:
        hosts.check_job(job_id)


def enqueue_job_checks(job_ids: Sequence[str], cluster: str, **_signal: Any) -> None:
    """Enqueue checks of a host's jobs: one task each for few jobs, so that all workers share them; batches for many."""
    size = min(MAX_CHECKS, -(-len(job_ids) // TASKS))
    for first in range(0, len(job_ids), size):
        enqueue(check_jobs, *job_ids[first : first + size], cluster=cluster)


def poll_cloud_jobs(*job_ids: str) -> None:
    with cloud_slot() as free:
        if free:
            cloud_watch.poll_jobs(job_ids)
    if not free:
        poll_clouds_soon()


def enqueue_cloud_polls(job_ids: Sequence[str], **_signal: Any) -> None:
    """Enqueue one task per cloud job, since each may call a cloud."""
    for job_id in job_ids:
        enqueue(poll_cloud_jobs, job_id, cluster=settings.DSTACKWEB_CLUSTERS["cloud"])


def poll_clouds() -> None:
    with cloud_slot() as free:
        if free:
            cloud_watch.poll_all()
    if not free:
        poll_clouds_soon()


def poll_clouds_soon() -> None:
    """Have the next tick of clouds soon: the worker that has the slot may not look for launches again."""
    _bring_forward("cloud", CLOUDS_AGAIN_S)


def end_orphan_instances() -> None:
    """Terminate cloud instances that no row wants."""
    with cloud_slot() as free:
        if free:
            cloud_watch.end_orphans()
        else:
            _bring_forward("cloud-orphans", ORPHANS_AGAIN_S)


@contextlib.contextmanager
def cloud_slot() -> Iterator[bool]:
    """Whether this worker may call clouds now: only so many of a machine's workers do at once that a cloud that hangs
    never blocks a pass. If not, a later tick does the work."""
    locks = settings.DSTACKWEB_HOME / "locks"
    slot = next(filter(None, (try_lock(locks / f"cloud-{number}") for number in range(slot_count()))), None)
    with slot or contextlib.nullcontext():
        yield slot is not None


def slot_count() -> int:
    """All workers of a cluster of its own; all but one where the cluster also runs passes."""
    shared = settings.DSTACKWEB_CLUSTERS["cloud"] == settings.DSTACKWEB_CLUSTERS["control"]
    return max(1, settings.DSTACKWEB_CLUSTER_WORKERS - shared)
