"""Watching what was placed: silence, deadlines, retries whose time has come (DESIGN 3, rule 9).

Silence and time in a status are summed up in the watcher's own monotonic time, between two of its looks and at most
`MAX_STEP` intervals of it at once: an hour of downtime or a jump of the clock declares nothing lost.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from dstackweb.backends.models import Host
from dstackweb.runs import hints
from dstackweb.runs.attempts import ended, requeue_due, settle
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import JOB_ACTIVE, PLACED, JobStatus, Reason
from dstackweb.runs.transitions import lock_run, move_job, record
from dstackweb.scheduler.models import Watch
from dstackweb.spec.effective import EffectiveSpec

log = logging.getLogger(__name__)

MAX_STEP = 3.0
"""Intervals that one look may add at most."""
KILL_MARGIN_S = 15.0
"""How long after its grace a stopping job's own runner may take before its host kills it."""
LOST_MARGIN_S = 60.0
"""On top of `lost_after` and `stop_duration`: by then a runner without contact has stopped its child."""


def boot_id() -> str:
    """Tells one boot of this machine from another; monotonic times compare within one only."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def elapsed_since_last_look(monotonic_s: float, boot: str) -> float:
    """Seconds that count since the last look, which this call makes the present one. Zero for a racing second."""
    Watch.objects.get_or_create(pk=1)
    last = Watch.objects.get(pk=1)
    won = Watch.objects.filter(pk=1, boot_id=last.boot_id, monotonic_s=last.monotonic_s).update(
        boot_id=boot, monotonic_s=monotonic_s
    )
    if not won:
        return 0.0
    return counted(last, monotonic_s, boot, settings.DSTACKWEB_WATCH_EVERY_S)


def counted(last: Watch, monotonic_s: float, boot: str, every_s: float) -> float:
    """How much of the time since `last` counts: none across a boot, and never more than MAX_STEP intervals."""
    if last.boot_id != boot:
        return 0.0
    return min(max(0.0, monotonic_s - last.monotonic_s), MAX_STEP * every_s)


def watch() -> None:
    """One look at everything that is placed or waits for its time."""
    step = elapsed_since_last_look(time.monotonic(), boot_id())
    _add_silence(step)
    requeue_due(timezone.now())
    _end_what_never_started()
    _end_what_is_lost()
    _settle_leftovers()


def _add_silence(step: float) -> None:
    """Four statements, however many hosts and jobs there are."""
    jobs = Job.objects.filter(status__in=JOB_ACTIVE)
    jobs.exclude(beat=F("watched_beat")).update(watched_beat=F("beat"), silent_s=0)
    if step:
        jobs.update(silent_s=F("silent_s") + step, status_s=F("status_s") + step)
    Host.objects.exclude(beat=F("watched_beat")).update(watched_beat=F("beat"), silent_s=0)
    if step:
        Host.objects.update(silent_s=F("silent_s") + step)


def _end_what_never_started() -> None:
    """A start deadline fails the attempt: what no runner claimed ends here, what one did is told to stop."""
    late = Job.objects.select_related("run").filter(
        status=JobStatus.PROVISIONING, status_s__gt=settings.DSTACKWEB_START_DEADLINE_S
    )
    for job in late:
        with transaction.atomic():
            run = lock_run(job.run_id)
            won = Job.objects.filter(pk=job.pk, status=JobStatus.PROVISIONING, claim_nonce="").update(
                claim_nonce="never-started"
            )
            record(run, "start_deadline", {}, node=job.node, attempt=job.attempt)
        message = f"it did not start within {settings.DSTACKWEB_START_DEADLINE_S:.0f} s"
        if won:
            ended(job.pk, Reason.NO_CAPACITY, message=message)
        else:
            _stop_late(job, message)


def _stop_late(job: Job, message: str) -> None:
    """A claimed job that waits at the barrier for nodes that never came: its runner ends it when it asks next."""
    with transaction.atomic():
        job.run = lock_run(job.run_id)
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
    least = settings.DSTACKWEB_LOST_AFTER_S
    silent = Job.objects.select_related("run", "host").filter(
        status__in=JOB_ACTIVE, silent_s__gt=least, host__silent_s__gt=settings.DSTACKWEB_HOST_SILENT_S
    )
    for job in silent:
        spec = EffectiveSpec.model_validate(job.run.spec)
        if not spec.retry or job.silent_s <= least + spec.stop_duration_s + LOST_MARGIN_S:
            continue
        host = job.host.name if job.host else "its host"
        ended(job.pk, Reason.INSTANCE_UNREACHABLE, message=f"{host} has not answered for {job.silent_s / 60:.0f} min")


def _settle_leftovers() -> None:
    """Placed runs none of whose jobs is active: a step between two processes was lost."""
    active = Job.objects.filter(status__in=JOB_ACTIVE)
    for run_id in Run.objects.filter(status__in=PLACED).exclude(jobs__in=active).values_list("pk", flat=True):
        with transaction.atomic():
            settle(lock_run(run_id))
            hints.want_pass()
