"""What a server's own workers do on its machine; others have an agent (`host_agents`). Safe to repeat: a runner decides
from its own files whether to start, to salvage or to do nothing, and the API lets only one runner claim a job."""

from __future__ import annotations

import datetime as dt
import logging
import math
import os
import time
from uuid import UUID, uuid4

from django.conf import settings
from django.db import DatabaseError
from django.utils import timezone

from dstackweb.backends import registry
from dstackweb.backends.contract import Hosts, LaunchSpec, Presence, StartFailed
from dstackweb.backends.hosts import inventory, local
from dstackweb.backends.models import Host
from dstackweb.gpus import intake
from dstackweb.lib.process import try_lock
from dstackweb.lib.sql import for_each
from dstackweb.lib.times import to_ms
from dstackweb.runner import nvml
from dstackweb.runs import removal, wakeups
from dstackweb.runs.attempts import KILL_MARGIN_S, RUNNER_GONE_S, end_job, return_job
from dstackweb.runs.codes import MessageCode
from dstackweb.runs.launch import job_token
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE, JobStatus, Reason
from dstackweb.scheduler import restored
from dstackweb.scheduler.models import Retention, RetentionKind
from dstackweb.scheduler.restored import HeldTicket

log = logging.getLogger(__name__)

FILES_BUDGET_S = 5.0
"""How long one tick removes old files."""


def _presence(backend: Hosts, job: Job) -> Presence:
    """What is left of a job here. A search of all processes is what a start would cost most, so an unclaimed job, of
    which nothing can run but a runner, is not searched for."""
    if not job.claim_nonce and not local.runner_alive(job.pk):
        return Presence.GONE
    return backend.observe(job.pk)


def check_job(job_id: str) -> None:
    """Advance one job of this host: start or revive its runner, or stop it."""
    active = Job.objects.timed().select_related("host", "backend", "run").filter(status__in=JOB_ACTIVE)
    job = active.filter(pk=job_id).first()
    if job is None or job.host is None:
        return
    if job.host.name != settings.DSTACKWEB_HOST_NAME:
        log.warning("%s belongs to host %s, this is %s", job, job.host.name, settings.DSTACKWEB_HOST_NAME)
        return
    backend = registry.hosts(job.backend)
    overdue = job.status == JobStatus.TERMINATING and job.status_s > (job.stop_grace_s or 0) + KILL_MARGIN_S
    if overdue and not backend.stop(job.pk, grace_s=None):
        log.warning("%s: processes still alive after kill, will retry", job)
        return
    try:
        presence = _presence(backend, job)
    except OSError as error:
        # Without a claim nothing runs: whatever is wrong here, another host may start it.
        if job.claim_nonce or not _return(job, error):
            raise
        return
    if presence == Presence.ALIVE:
        if job.status == JobStatus.TERMINATING:
            backend.stop(job.pk, job.stop_grace_s or 0)
        return
    if presence == Presence.GONE and job.claim_nonce and job.silent_s > RUNNER_GONE_S:
        end_job(job.pk, Reason.INSTANCE_UNREACHABLE, detail={"code": MessageCode.RUNNER_GONE})
        return
    try:
        url, image = settings.DSTACKWEB_API_URL, job.run.spec.get("image")
        backend.start(LaunchSpec(job.pk, job.run.uid, job.node, url, job_token(job.pk), image), job.host.pk)
    except DatabaseError:
        raise
    except Exception as error:
        log.error("%s: cannot start: %s", job, error, exc_info=not isinstance(error, StartFailed))
        _return(job, error)


def _return(job: Job, error: Exception) -> bool:
    """Return the run of a job that can't start here to the queue; False if a runner has claimed the job."""
    return return_job(job.pk, message=_why(error), failed_start=True)


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, StartFailed) else f"{type(error).__name__}: {error}"


def probe_start(name: str) -> None:
    """Try a start without a job on a host that is held back: if it works, the host takes jobs again."""
    host = Host.joined.exclude(held_back_at=None).filter(name=name).first()
    if host is None:
        return
    try:
        job_id = uuid4()
        local.probe_runner(host.runs_dir, job_id, job_token(job_id))
    except Exception as error:
        log.warning("host %s: a start still fails: %s", name, error)
        inventory.note_failed_probe(host.pk, _why(error))
        return
    if inventory.clear_failed_starts(host.pk, timezone.now(), after_probe=True):
        wakeups.request_pass()


def is_held_back(name: str) -> bool:
    return Host.joined.exclude(held_back_at=None).filter(name=name).exists()


def check_jobs(host: str) -> None:
    """Check every active job of a host. A healthy running job costs one flock.

    After a restore, name those that were started here.
    """
    if (asked := Host.joined.filter(name=host, restored__reported=False).first()) is not None:
        tickets = [HeldTicket(**ticket) for ticket in local.here().tickets()]
        restored.take_tickets(asked, tickets, is_last=True)
    for_each(Job.objects.filter(host__name=host, status__in=JOB_ACTIVE), _check_unless_healthy)


def _check_unless_healthy(job: Job) -> None:
    try:
        healthy = job.status != JobStatus.TERMINATING and local.runner_alive(job.pk)
    except OSError:
        healthy = False
    if not healthy:
        check_job(str(job.pk))


def sample_gpus(name: str) -> None:
    """Store a sample of each GPU of this host."""
    host = Host.joined.filter(name=name).first()
    if host is None:
        return
    # One worker at a time: a broken driver can hang only that one.
    lock = try_lock(settings.DSTACKWEB_HOME / "locks" / f"gpus-{host.pk}")
    if lock is None:
        return
    with lock:
        # Dated before reading: a GPU that a job gets meanwhile was not the job's yet.
        began = timezone.now()
        intake.add_snapshot(host, nvml.read(), to_ms(began))


def remove_old_files(host: str, budget_s: float | None = FILES_BUDGET_S) -> bool:
    """Remove what ended jobs left here, for `budget_s` seconds (None: all of it); returns whether some remains."""
    ends = time.monotonic() + (math.inf if budget_s is None else budget_s)
    jobs, (runs_dir, runs) = old_job_files(host), old_run_dirs(host)
    forgotten, removed = local.forget_all(jobs, ends), local.remove_run_dirs(runs_dir, runs, ends)
    now = timezone.now()
    for kind, found, gone in ((RetentionKind.JOB_FILES, jobs, forgotten), (RetentionKind.RUN_DIRS, runs, removed)):
        Retention.note(kind, host, waiting=len(found) - gone, pruned=gone, now=now)
    # What can't be removed, such as files of living processes, is tried with the next tick.
    return time.monotonic() >= ends and forgotten + removed < len(jobs) + len(runs)


def old_job_files(host: str) -> list[UUID]:
    """Ended jobs of this host whose runner files are to be removed."""
    if restored.is_waiting():
        return []  # a restored database does not know yet which of them it needs
    active = {str(pk) for pk in Job.objects.filter(host__name=host, status__in=JOB_ACTIVE).values_list("pk", flat=True)}
    return local.old_job_files(active, settings.DSTACKWEB_JOB_FILES_HOURS * 3600)


def old_run_dirs(host: str) -> tuple[str, list[str]]:
    """The parent of runs' directories on this host, and the runs (uids) whose directories are to be removed."""
    here = Host.objects.filter(name=host).exclude(runs_dir="").first()
    if here is None:
        return "", []
    kept = dt.timedelta(days=settings.DSTACKWEB_RUN_DIRS_DAYS)
    before = timezone.now() - kept
    old = local.old_run_dirs(here.runs_dir, lambda uids: removal.over(uids, before), kept.total_seconds())
    removed = removal.removed_lately(before)
    return here.runs_dir, old + [uid for uid in removed if os.path.isdir(os.path.join(here.runs_dir, uid))]
