"""Watches placed runs and hosts: silence, deadlines, due retries, schedules, and the tasks of ended attempts.

Silence and time in a status are added up in monotonic time between two checks of one machine, at most `MAX_STEP`
intervals at once: downtime or a clock change declares nothing lost.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, F, Model, OuterRef, Q, QuerySet
from django.utils import timezone

from dstackweb.backends.models import Host, HostEvent, HostEventKind, Instance, InstanceStatus
from dstackweb.backends.registry import cloud_kinds
from dstackweb.lib.models import Watch
from dstackweb.lib.sql import for_each
from dstackweb.lib.times import to_ms
from dstackweb.progress import finalize
from dstackweb.progress.models import Scope
from dstackweb.runner.machine import boot_id
from dstackweb.runs import dependencies
from dstackweb.runs.attempts import end_job, requeue_due, return_job, settle_run
from dstackweb.runs.codes import MessageCode, RunEventKind
from dstackweb.runs.models import Allocation, Job, Run
from dstackweb.runs.recurrence import create_occurrences
from dstackweb.runs.shared_rows import shared_rows_last
from dstackweb.runs.states import ENDED, JOB_ACTIVE, PLACED, JobStatus, Reason
from dstackweb.runs.sweeps import creation as sweeps
from dstackweb.runs.transitions import lock_run, move_job, record
from dstackweb.scheduler.models import PeriodicJob
from dstackweb.spec.effective import EffectiveSpec

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Model)

MAX_STEP = 3.0
"""The most intervals that one check may add."""
FORGET_S = 24 * 3600.0
"""A machine that has not checked while this much was counted starts anew when it comes back."""
LOST_MARGIN_S = 60.0
"""On top of `lost_after` and `stop_duration`: by then a runner without contact has stopped its commands."""
SETTLE_S = 20.0
"""How long one task settles scopes, far below django-q's timeout. The next one continues."""


def elapsed_since_last_check(monotonic_s: float, boot: str) -> float:
    """Seconds to count since this machine's last check; this call becomes its last check."""
    Watch.objects.get_or_create(pk=1)
    with transaction.atomic():
        Watch.objects.filter(pk=1).update(counted_s=F("counted_s"))  # locks the row: one check at a time
        row = Watch.objects.get(pk=1)
        last_s, counted_then_s = row.checks.get(boot, (None, 0.0))
        step = countable_s(last_s, monotonic_s, row.counted_s - counted_then_s, settings.DSTACKWEB_WATCH_EVERY_S)
        row.counted_s += step
        row.checks[boot] = [max(monotonic_s, last_s or 0.0), row.counted_s]
        row.checks = {boot: seen for boot, seen in row.checks.items() if row.counted_s - seen[1] < FORGET_S}
        row.save()
    return step


def countable_s(last_s: float | None, now_s: float, by_others_s: float, every_s: float) -> float:
    """Seconds to count since a machine's last check: none across a boot (`last_s` None), at most MAX_STEP intervals,
    less what other machines have counted meanwhile."""
    if last_s is None:
        return 0.0
    return max(0.0, min(now_s - last_s, MAX_STEP * every_s) - by_others_s)


def watch() -> None:
    """Check once everything that is placed or waits for its time."""
    _add_silence(elapsed_since_last_check(time.monotonic(), boot_id()))
    parts: tuple[Callable[[], object], ...] = (
        partial(create_occurrences, timezone.now()),
        partial(requeue_due, timezone.now()),
        partial(sweeps.settle, timezone.now()),
        partial(dependencies.settle, timezone.now()),
        _return_from_silent_hosts,
        _end_unstarted,
        _end_lost_jobs,
        _settle_leftovers,
        record_presence,
        remove_left_hosts,
    )
    for_each(parts, lambda part: part())


def _add_silence(step: float) -> None:
    """Add `step` seconds of silence to machines without a heartbeat, in a fixed number of statements. Jobs, of which
    there are most, are not written: what has passed is derived (`Job.objects.timed`)."""
    counted: tuple[tuple[QuerySet[Any], tuple[str, ...]], ...] = (
        (Host.objects.all(), ("silent_s",)),
        (Instance.objects.exclude(status=InstanceStatus.GONE), ("silent_s", "status_s")),
    )
    for rows, columns in counted:
        with transaction.atomic():
            heard = _unlocked(rows.exclude(heartbeats=F("heartbeats_seen")))
            heard.update(heartbeats_seen=F("heartbeats"), silent_s=0)
        if step:
            with transaction.atomic():
                _unlocked(rows).update(**{name: F(name) + step for name in columns})


def _unlocked(rows: QuerySet[M]) -> QuerySet[M]:
    """The rows that no other transaction has locked: waiting for one while holding others could deadlock. A row being
    written is not silent."""
    free = rows.select_for_update(skip_locked=True, no_key=True).order_by().values("pk")
    return rows.model._default_manager.filter(pk__in=free)


def _return_from_silent_hosts() -> None:
    """Return runs to the queue whose host fell silent before a runner claimed them."""
    silent = Job.objects.select_related("host").filter(
        status=JobStatus.PROVISIONING, claim_nonce="", host__silent_s__gte=settings.DSTACKWEB_HOST_SILENT_S
    )
    for_each(silent, _return_from_silent_host)


def _return_from_silent_host(job: Job) -> None:
    assert job.host is not None
    detail = {"code": MessageCode.HOST_SILENT, "host": job.host.name, "silent_s": job.host.silent_s}
    return_job(job.pk, detail=detail)


def _end_unstarted() -> None:
    """End attempts that miss the start deadline: unclaimed jobs return to the queue, claimed ones have to stop. Those
    on clouds have other deadlines (`cloud.lifecycle`) until each node of the attempt has its runner."""
    deadline_s = settings.DSTACKWEB_START_DEADLINE_S
    late = Job.objects.timed().filter(status=JobStatus.PROVISIONING, status_s__gt=deadline_s)
    of_clouds = Q(host=None, backend__kind__in=cloud_kinds())
    for_each(late.exclude(of_clouds), _end_late_job)
    coming = Q(claim_nonce="") | Q(status_s__lte=deadline_s) | Q(instance__status_s__lte=deadline_s)
    others = Job.objects.timed().filter(coming, run=OuterRef("run"), attempt=OuterRef("attempt"), status__in=JOB_ACTIVE)
    for_each(late.filter(of_clouds).exclude(claim_nonce="").exclude(Exists(others)), _end_late_job)


def _end_late_job(late: Job) -> None:
    with transaction.atomic():
        run = lock_run(late.run_id)
        job = Job.objects.get(pk=late.pk)
        job.run = run
        if job.status != JobStatus.PROVISIONING:
            return
        detail = {"code": MessageCode.LATE, "deadline_s": settings.DSTACKWEB_START_DEADLINE_S, "cause": job.detail}
        record(run, RunEventKind.START_DEADLINE, {}, node=job.node, attempt=job.attempt)
        if not job.claim_nonce:
            # A silent host's runs have returned before: this one is up, and its runner does not call.
            return_job(job.pk, message=job.message, detail=detail, failed_start=True)
            return
        # Its runner waits for nodes that never came, and ends the job when it polls next.
        move_job(
            job,
            JobStatus.TERMINATING,
            now=timezone.now(),
            stop_reason=Reason.NO_CAPACITY,
            stop_grace_s=0,
            detail=detail,
        )


def _end_lost_jobs() -> None:
    """End jobs whose host has been silent so long that their runner must have stopped them, for runs with `retry`:
    others stay until the host answers or a person decides."""
    silent = (
        Job.objects.timed()
        .select_related("run", "host")
        .filter(
            status__in=JOB_ACTIVE,
            silent_s__gt=settings.DSTACKWEB_LOST_AFTER_S,
            host__silent_s__gt=settings.DSTACKWEB_HOST_SILENT_S,
        )
    )
    for_each(silent, _end_lost_job)


def _end_lost_job(job: Job) -> None:
    spec = EffectiveSpec.model_validate(job.run.spec)
    if not spec.retry or job.silent_s <= settings.DSTACKWEB_LOST_AFTER_S + spec.stop_duration_s + LOST_MARGIN_S:
        return
    host = job.host.name if job.host else "its host"
    detail = {"code": MessageCode.HOST_SILENT, "host": host, "silent_s": job.silent_s}
    end_job(job.pk, Reason.INSTANCE_UNREACHABLE, detail=detail)


def _settle_leftovers() -> None:
    """Settle placed runs without an active job: the process that should have done it was killed."""
    active = Job.objects.filter(run=OuterRef("pk"), status__in=JOB_ACTIVE)
    left = Run.objects.filter(~Exists(active), status__in=PLACED).values_list("pk", flat=True)
    for_each(left, _settle)


def _settle(run_id: int) -> None:
    with shared_rows_last():
        settle_run(lock_run(run_id))


def record_presence() -> None:
    """Record once that a host went offline, and once that it is back. Placement reads the silence itself."""
    joined = Host.joined.exclude(seen_at=None)
    limit = settings.DSTACKWEB_HOST_SILENT_S
    for host in joined.filter(offline_since=None, silent_s__gte=limit):
        now = timezone.now()
        with transaction.atomic():
            if Host.objects.filter(pk=host.pk, offline_since=None, silent_s__gte=limit).update(offline_since=now):
                HostEvent.objects.create(host=host, kind=HostEventKind.OFFLINE, at=now)
    for host in joined.exclude(offline_since=None).filter(silent_s__lt=limit):
        with transaction.atomic():
            if Host.objects.filter(pk=host.pk, offline_since=host.offline_since).update(offline_since=None):
                HostEvent.objects.create(host=host, kind=HostEventKind.ONLINE)


def remove_left_hosts() -> None:
    """Mark leaving hosts without jobs as left: they disappear from lists and have no periodic work."""
    for host in Host.joined.filter(leaving=True):
        # No new job can claim it: a leaving host is drained, and undraining it cancels its leaving.
        if Job.objects.filter(host=host, status__in=JOB_ACTIVE).exists():
            continue
        if Allocation.objects.filter(host=host).exists():
            continue
        now = timezone.now()
        with transaction.atomic():
            going = Host.objects.filter(pk=host.pk, leaving=True, left_at=None)
            if going.update(left_at=now, offline_since=None):
                HostEvent.objects.create(host=host, kind=HostEventKind.LEFT, at=now)
                PeriodicJob.objects.filter(name__in=PeriodicJob.host_names(host.name)).delete()


def has_unsettled_tasks() -> bool:
    return Scope.objects.filter(Q(ended_ms=None, run_id__gt=0) | Q(ended_ms__isnull=False, settled=False)).exists()


def settle_tasks(now: dt.datetime) -> None:
    """Settle scopes that are due, those that ended first going first."""
    _end_missed_scopes(now)
    began = time.monotonic()
    for scope_id in finalize.due():
        while time.monotonic() - began < SETTLE_S and not finalize.settle(scope_id):
            pass


def _end_missed_scopes(now: dt.datetime) -> None:
    """End scopes of attempts that were over when their first tasks were reported: nothing else would end them."""
    open_scopes = list(Scope.objects.filter(ended_ms=None, run_id__gt=0).values_list("run_id", "attempt"))
    going_on = Run.objects.filter(pk__in={run_id for run_id, _ in open_scopes}).exclude(status__in=ENDED)
    current = dict(going_on.values_list("pk", "attempt"))
    over = [(run_id, attempt) for run_id, attempt in open_scopes if current.get(run_id, attempt + 1) > attempt]
    finalize.end(over, to_ms(now))
