"""After a restore, what was started since the backup is taken back before anything is placed.

Each host names the jobs that were started there, by tickets that this deployment has signed, and nothing is placed
until all have (docs/operations.md#restore). A run that waits in the backup gets the rows of such jobs again: their
runners, or new ones that read what these left, then report as those of all jobs do.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import InterfaceError, OperationalError, transaction

from dstackweb.backends.hosts.fit import Fit
from dstackweb.backends.hosts.inventory import ensure_embedded_backend
from dstackweb.backends.models import Host
from dstackweb.lib.errors import Conflict
from dstackweb.lib.models import Watch
from dstackweb.runs import wakeups
from dstackweb.runs.attempts import claim_job, end_job, start_job
from dstackweb.runs.codes import MessageCode, RunEventKind
from dstackweb.runs.launch import read_ticket
from dstackweb.runs.models import Job, Run
from dstackweb.runs.shared_rows import ClaimFailed, claim_all, shared_rows_last
from dstackweb.runs.states import JOB_ACTIVE, WAITING, JobStatus, Reason, RunStatus
from dstackweb.runs.sweeps import creation as sweeps
from dstackweb.runs.transitions import lock_run, move_run
from dstackweb.scheduler.models import RestoredHost
from dstackweb.scheduler.placement.after_restore import StartedJob, Step, decide

log = logging.getLogger(__name__)

WAIT_S = 60.0
"""Longest wait for hosts, in the watcher's time: since the restore, or since the last run was taken back."""
SHARED = ("attempt", "node", "nodes", "cpus", "memory_mib", "nonce", "ended")
"""Fields that a StartedJob has as they are stored."""
REPORTS_AT_ONCE = 100
"""Ended jobs of a host that are taken back before their ends are reported: each needs a runner there."""


@dataclass(frozen=True)
class HeldTicket:
    """A job's ticket as its host has it, the nonce of its runner, and whether its commands have ended."""

    ticket: str
    nonce: str
    ended: bool


def begin() -> int:
    """Have all hosts asked, and nothing placed until then. Returns how many there are."""
    since_s = Watch.now_s()
    with transaction.atomic():
        RestoredHost.objects.all().delete()  # a backup may have been made during a wait
        asked = [RestoredHost(host=host, since_s=since_s) for host in Host.joined.all()]
        RestoredHost.objects.bulk_create(asked)
    return len(asked)


def is_waiting() -> bool:
    return RestoredHost.objects.exists()


def missing_hosts() -> list[str]:
    """The names of the hosts that are waited for."""
    return list(RestoredHost.objects.filter(reported=False).order_by("host__name").values_list("host__name", flat=True))


def take_tickets(host: Host, tickets: Sequence[HeldTicket], *, is_last: bool) -> None:
    """Note what a host names. Repeatable. `is_last`: that is all of it."""
    if not RestoredHost.objects.filter(host=host, reported=False).exists():
        return
    jobs: dict[str, dict[str, Any]] = {}
    for held in tickets:
        ticket = read_ticket(held.ticket)
        if ticket is not None and ticket["host"] == host.name:
            jobs[ticket["job"]] = {**ticket, "nonce": held.nonce, "ended": held.ended}
    for job in Job.objects.filter(pk__in=jobs):
        named = jobs.pop(str(job.pk))
        if job.status == JobStatus.PROVISIONING and not job.claim_nonce:
            # The backup has it as placed only.
            with contextlib.suppress(Conflict):  # another runner was faster
                claim_job(job.pk, named["nonce"], host.name)
                start_job(job.pk)
    with transaction.atomic():
        row = RestoredHost.objects.select_for_update().filter(host=host, reported=False).first()
        if row is None:
            return
        row.jobs |= jobs
        row.reported = is_last
        row.save(update_fields=["jobs", "reported"])
    if is_last:
        wakeups.request_pass()


def settle(now: dt.datetime) -> bool:
    """Take back what hosts have named, once all have or the wait is over. Returns whether runs may be placed.

    Only a pass calls this, and there is one at a time.
    """
    rows = list(RestoredHost.objects.select_related("host").order_by("host__name"))
    if not rows:
        return True
    missing = [row.host.name for row in rows if not row.reported]
    is_last = Watch.now_s() - rows[0].since_s > WAIT_S
    if missing and not is_last:
        return False
    if missing:
        log.warning(
            "restored: not heard from %s within %.0f s. Runs that were started there since the backup start again",
            ", ".join(missing), WAIT_S,
        )  # fmt: skip
        RestoredHost.objects.update(reported=True)
    sweeps.settle(now)  # runs that were created since are created again
    by_run: defaultdict[str, list[StartedJob]] = defaultdict(list)
    for row in rows:
        known = set(map(str, Job.objects.filter(pk__in=row.jobs).values_list("pk", flat=True)))
        for job_id, values in row.jobs.items():
            if job_id not in known:
                by_run[values["run"]].append(
                    StartedJob(
                        id=job_id, host_id=row.host_id, gpus=tuple(values["gpus"]),
                        **{name: values[name] for name in SHARED},
                    )
                )  # fmt: skip
    reporting = Job.objects.filter(status__in=JOB_ACTIVE, exited_at__isnull=False)
    busy = Counter(reporting.values_list("host", flat=True))
    steps: Counter[Step] = Counter()
    for run in Run.objects.filter(uid__in=by_run).order_by("pk"):
        ended = [job.host_id for job in by_run[str(run.uid)] if job.ended]
        if any(busy[host_id] >= REPORTS_AT_ONCE for host_id in ended):
            steps[Step.WAIT] += 1
            continue
        try:
            step = _settle_run(run, by_run[str(run.uid)], now, is_last=is_last)
        except (OperationalError, InterfaceError):
            raise
        except Exception:
            log.exception("%s: the jobs that were started since the backup can't be taken back", run)
            step = Step.WAIT
        steps[step] += 1
        busy.update(ended if step is Step.TAKE else ())
    if steps[Step.TAKE]:
        # Others may wait for these, and there is room now for more runs of their sweeps.
        RestoredHost.objects.update(since_s=Watch.now_s())
        return settle(now)
    if steps[Step.WAIT] and not is_last:
        return False
    RestoredHost.objects.all().delete()
    return True


def _settle_run(run: Run, jobs: Sequence[StartedJob], now: dt.datetime, *, is_last: bool) -> Step:
    """Do what is decided about the unknown jobs of a run, and return what was done."""
    step, taken = decide(run.status, run.attempt, jobs, is_last=is_last)
    if step is Step.END_ATTEMPT:
        for job in Job.objects.filter(run=run, attempt=run.attempt, status__in=JOB_ACTIVE):
            end_job(job.pk, Reason.INSTANCE_UNREACHABLE, detail={"code": MessageCode.RUNNER_GONE})
        run.refresh_from_db()
        step, taken = decide(run.status, run.attempt, jobs, is_last=is_last)
    if step is Step.TAKE:
        try:
            _take(run.pk, taken, now)
        except ClaimFailed:
            # A job that the backup knows holds this still, until its own end is reported.
            if not is_last:
                return Step.WAIT
            step = Step.TAKE_AND_END
    if step is Step.TAKE_AND_END:
        _take(run.pk, taken, now, ends=True)
    return step


def _take(run_id: int, jobs: Sequence[StartedJob], now: dt.datetime, *, ends: bool = False) -> None:
    """Place a waiting run where these nodes of it were started. Raises ClaimFailed, having written nothing.

    With `ends` the attempt ends as interrupted, and what still runs of it as that of any stopped job.
    """
    with shared_rows_last():
        run = lock_run(run_id)
        if run.status not in WAITING or run.attempt > jobs[0].attempt:
            return  # someone stopped it meanwhile
        run.attempt = jobs[0].attempt
        Run.objects.filter(pk=run_id).update(attempt=run.attempt)
        if run.status == RunStatus.PENDING:
            move_run(run, RunStatus.SUBMITTED, now=now, event=RunEventKind.REQUEUED, retry_at=None)
        hosts = Host.objects.in_bulk({job.host_id for job in jobs})
        nodes = [{"node": job.node, "host": hosts[job.host_id].name, "gpus": len(job.gpus)} for job in jobs]
        move_run(run, RunStatus.PROVISIONING, now=now, data={"nodes": nodes, "restored": True})
        backend, now_s = ensure_embedded_backend(), Watch.now_s()
        rows = [
            Job(
                pk=UUID(job.id), run=run, attempt=job.attempt, node=job.node, backend=backend, host_id=job.host_id,
                cpus=job.cpus, memory_mib=job.memory_mib, gpus=list(job.gpus), gpu_count=len(job.gpus),
                placed_at=now, status_at_s=now_s, heard_at_s=now_s,
                claim_nonce=job.nonce, claimed_at=now, is_ready=True, exited_at=now if job.ended else None,
            )
            for job in jobs
        ]  # fmt: skip
        Job.objects.bulk_create(rows)
        if not ends:
            running = [(row, job) for row, job in zip(rows, jobs, strict=True) if not job.ended]
            claim_all([(row, _claim(job, hosts[job.host_id])) for row, job in running])
        for row in rows:
            start_job(row.pk)
        if ends:
            for row in rows:
                end_job(row.pk, Reason.INSTANCE_UNREACHABLE, detail={"code": MessageCode.RUNNER_GONE})
    log.info("restored: %s goes on where it was started since the backup", run)


def _claim(job: StartedJob, host: Host) -> Fit:
    return Fit(host.pk, host.name, job.cpus, job.memory_mib, job.gpus, gpus_left=0, cpus_left=0)
