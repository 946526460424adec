"""Watching what was placed: silence, deadlines, retries whose time has come (docs/design.md, rule 9).

Silence and time in a status are summed up in the watcher's own monotonic time, between two looks of one machine and at
most `MAX_STEP` intervals of it at once: an hour of downtime or a jump of the clock declares nothing lost. Where several
machines look in turn, no second counts twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from django.conf import settings
from django.db import DatabaseError, transaction
from django.db.models import Exists, F, Model, OuterRef, Q, QuerySet
from django.utils import timezone

from dstackweb.backends.models import Host, Instance, InstanceStatus
from dstackweb.backends.registry import cloud_kinds
from dstackweb.runs.attempts import ended, requeue_due, settle
from dstackweb.runs.models import Job, Run
from dstackweb.runs.recurrence import make_due
from dstackweb.runs.states import JOB_ACTIVE, PLACED, JobStatus, Reason
from dstackweb.runs.transitions import lock_run, move_job, record
from dstackweb.scheduler.models import Watch
from dstackweb.scheduler.monitoring import host_watch
from dstackweb.spec.effective import EffectiveSpec

log = logging.getLogger(__name__)
T = TypeVar("T")
M = TypeVar("M", bound=Model)

MAX_STEP = 3.0
"""Intervals that one look may add at most."""
FORGET_S = 24 * 3600.0
"""A machine that has not looked while so much was counted is new when it comes back."""
LOST_MARGIN_S = 60.0
"""On top of `lost_after` and `stop_duration`: by then a runner without contact has stopped its child."""


def boot_id() -> str:
    """Tells one boot of this machine from another; monotonic times compare within one only."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def elapsed_since_last_look(monotonic_s: float, boot: str) -> float:
    """Seconds that count since this machine's last look, which this call makes the present one."""
    Watch.objects.get_or_create(pk=1)
    with transaction.atomic():
        Watch.objects.filter(pk=1).update(counted_s=F("counted_s"))  # one look after the other
        row = Watch.objects.get(pk=1)
        last_s, counted_then_s = row.looks.get(boot, (None, 0.0))
        step = counted(last_s, monotonic_s, row.counted_s - counted_then_s, settings.DSTACKWEB_WATCH_EVERY_S)
        row.counted_s += step
        row.looks[boot] = [max(monotonic_s, last_s or 0.0), row.counted_s]
        row.looks = {boot: look for boot, look in row.looks.items() if row.counted_s - look[1] < FORGET_S}
        row.save()
    return step


def counted(last_s: float | None, now_s: float, by_others_s: float, every_s: float) -> float:
    """How much of the time since a machine's last look counts: none across a boot (`last_s` None), never more than
    MAX_STEP intervals, and nothing that the looks of other machines have counted meanwhile."""
    if last_s is None:
        return 0.0
    return max(0.0, min(now_s - last_s, MAX_STEP * every_s) - by_others_s)


def watch() -> None:
    """One look at everything that is placed or waits for its time."""
    step = elapsed_since_last_look(time.monotonic(), boot_id())
    _add_silence(step)
    runs = (_make_occurrences, _requeue, _end_what_never_started, _end_what_is_lost, _settle_leftovers)
    parts = (*runs, host_watch.note_presence, host_watch.finish_leaving)
    _each(parts, lambda part: part())


def _each(items: Iterable[T], act: Callable[[T], object]) -> None:
    """Act on every item also when one of them can't be: the last such error is raised when all others are done."""
    failed: Exception | None = None
    for item in items:
        try:
            act(item)
        except DatabaseError:
            raise
        except Exception as error:
            log.exception("the watcher goes on without %s", item)
            failed = error
    if failed is not None:
        raise failed


def _add_silence(step: float) -> None:
    """A handful of statements, however many hosts, machines of clouds and jobs there are."""
    active = Job.objects.filter(status__in=JOB_ACTIVE)
    there = Instance.objects.exclude(status=InstanceStatus.GONE)
    with transaction.atomic():
        _idle(active.exclude(beat=F("watched_beat"))).update(watched_beat=F("beat"), silent_s=0)
        _idle(Host.objects.exclude(beat=F("watched_beat"))).update(watched_beat=F("beat"), silent_s=0)
    with transaction.atomic():
        _idle(there.exclude(beat=F("watched_beat"))).update(watched_beat=F("beat"), silent_s=0)
    if step:
        with transaction.atomic():
            _idle(active).update(silent_s=F("silent_s") + step, status_s=F("status_s") + step)
        with transaction.atomic():
            _idle(Host.objects.all()).update(silent_s=F("silent_s") + step)
        with transaction.atomic():
            _idle(there).update(silent_s=F("silent_s") + step, status_s=F("status_s") + step)


def _idle(rows: QuerySet[M]) -> QuerySet[M]:
    """Those that nobody is writing at this moment: who waited for one while holding others would make deadlocks.

    What is being written is not silent, and the next look counts it again.
    """
    free = rows.select_for_update(skip_locked=True, no_key=True).order_by().values("pk")
    return rows.model._default_manager.filter(pk__in=free)


def _make_occurrences() -> None:
    make_due(timezone.now())


def _requeue() -> None:
    requeue_due(timezone.now())


def _end_what_never_started() -> None:
    """A start deadline fails the attempt: what no runner claimed ends here, what one did is told to stop.

    Machines of clouds have deadlines of their own (`cloud_verdict`), until each node of the attempt has its runner.
    """
    deadline_s = settings.DSTACKWEB_START_DEADLINE_S
    late = Job.objects.filter(status=JobStatus.PROVISIONING, status_s__gt=deadline_s)
    of_clouds = Q(host=None, backend__kind__in=cloud_kinds())
    _each(late.exclude(of_clouds), _end_late)
    coming = Q(claim_nonce="") | Q(status_s__lte=deadline_s) | Q(instance__status_s__lte=deadline_s)
    others = Job.objects.filter(coming, run=OuterRef("run"), attempt=OuterRef("attempt"), status__in=JOB_ACTIVE)
    _each(late.filter(of_clouds).exclude(claim_nonce="").exclude(Exists(others)), _end_late)


def _end_late(late: Job) -> None:
    message = f"it did not start within {settings.DSTACKWEB_START_DEADLINE_S:.0f} s"
    with transaction.atomic():
        run = lock_run(late.run_id)
        job = Job.objects.get(pk=late.pk)
        job.run = run
        if job.status != JobStatus.PROVISIONING:
            return
        if job.message:
            message += f": {job.message}"
        record(run, "start_deadline", {}, node=job.node, attempt=job.attempt)
        if not job.claim_nonce:
            ended(job.pk, Reason.NO_CAPACITY, message=message)
            return
        # It waits at the barrier for nodes that never came: its runner ends it when it asks next.
        move_job(
            job,
            JobStatus.TERMINATING,
            now=timezone.now(),
            stop_reason=Reason.NO_CAPACITY,
            stop_grace_s=0,
            message=message,
        )


def _end_what_is_lost() -> None:
    """A job on a host that is silent for so long that its runner must have stopped it (runs with `retry` only).

    Without `retry` nothing is assumed: the run stays as it is until the host answers or a person decides.
    """
    silent = Job.objects.select_related("run", "host").filter(
        status__in=JOB_ACTIVE,
        silent_s__gt=settings.DSTACKWEB_LOST_AFTER_S,
        host__silent_s__gt=settings.DSTACKWEB_HOST_SILENT_S,
    )
    _each(silent, _end_lost)


def _end_lost(job: Job) -> None:
    spec = EffectiveSpec.model_validate(job.run.spec)
    if not spec.retry or job.silent_s <= settings.DSTACKWEB_LOST_AFTER_S + spec.stop_duration_s + LOST_MARGIN_S:
        return
    host = job.host.name if job.host else "its host"
    ended(job.pk, Reason.INSTANCE_UNREACHABLE, message=f"{host} has not answered for {job.silent_s / 60:.0f} min")


def _settle_leftovers() -> None:
    """Placed runs none of whose jobs is active: a step between two processes was lost."""
    active = Job.objects.filter(status__in=JOB_ACTIVE)
    left = Run.objects.filter(status__in=PLACED).exclude(jobs__in=active).values_list("pk", flat=True)
    _each(left, _settle)


def _settle(run_id: int) -> None:
    with transaction.atomic():
        settle(lock_run(run_id))
