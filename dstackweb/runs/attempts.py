"""What runners report about their jobs, and what follows for the run (docs/design.md#rules).

Each function is one transaction that locks the run's row first, and is safe to repeat.
"""

from __future__ import annotations

import datetime as dt
import random
from typing import Any, TypedDict, Unpack
from uuid import UUID

from django.db import transaction
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.backends.hosts import inventory
from dstackweb.backends.models import StartError
from dstackweb.lib.errors import Conflict
from dstackweb.lib.models import watch_time
from dstackweb.lib.network import full_jitter
from dstackweb.runs import logs, wakeups
from dstackweb.runs.codes import MessageCode, RunEventKind
from dstackweb.runs.models import Job, Run, RunEvent
from dstackweb.runs.recurrence import next_after_end
from dstackweb.runs.shared_rows import count_undone, release_ended, shared_rows_last
from dstackweb.runs.sick_hosts import NOT_EXECUTED, WINDOW, Execution, executes_nothing
from dstackweb.runs.states import (
    HOLD_END,
    JOB_ACTIVE,
    PLACED,
    RETURNS,
    WAITS_AGAIN,
    EndRun,
    JobStatus,
    JobView,
    Reason,
    RetryRun,
    ReturnRun,
    RunStarted,
    RunStatus,
    RunView,
    StopOthers,
    decide,
    job_end_status,
    was_signalled,
)
from dstackweb.runs.transitions import lock_job, move_job, move_run, record
from dstackweb.spec.effective import EffectiveSpec

RETRY_BASE_S, RETRY_CAP_S = 10.0, 600.0
RETURNS_AT_ONCE = 3
"""How often a run that no runner claimed goes back to the queue without delay."""
REQUEUED_AT_ONCE = 500
KILL_MARGIN_S = 15.0
"""How long a stopping job's runner may take beyond its grace before its host kills it."""
RUNNER_GONE_S = 60.0
"""A claimed job ends when its runner is gone, can't be revived, and has been silent this long."""


def claim_job(job_id: UUID, nonce: str, where: str) -> Job:
    """Give a job to the runner with this nonce, for good. Repeatable. Raises Conflict, Job.DoesNotExist."""
    now = timezone.now()
    with transaction.atomic():
        job = lock_job(job_id, "run__project", "host")
        won = Job.objects.filter(pk=job_id, status=JobStatus.PROVISIONING, claim_nonce="").update(
            claim_nonce=nonce, claimed_at=now, heard_at_s=watch_time(), is_ready=not job.run.spec.get("image")
        )
        if won:
            job.claim_nonce, job.claimed_at = nonce, now
            facts = {"where": where}
            record(job.run, RunEventKind.CLAIMED, facts, node=job.node, attempt=job.attempt, at=now, is_locked=True)
    if job.claim_nonce != nonce or job.status not in JOB_ACTIVE:
        raise Conflict(_("another runner has this job, or it has ended"))
    return job


def start_job(job_id: UUID, *, image_digest: str = "") -> None:
    """Record that the runner has started the job's commands, and the image of their container."""
    now = timezone.now()
    with shared_rows_last():
        job = lock_job(job_id, "host")
        if job.status == JobStatus.PROVISIONING:
            move_job(job, JobStatus.RUNNING, now=now, image_digest=image_digest)
            settle_run(job.run)
            if job.host is not None and job.host.start_failures:
                inventory.clear_failed_starts(job.host.pk, now)


class JobEnd(TypedDict, total=False):
    """How a job ended: `message` is text from a program or a cloud, `detail` a code of this server with its data
    (`MessageCode`)."""

    exit_code: int | None
    message: str
    detail: dict[str, Any] | None
    log_size: int | None
    log_missing: int


def report_end(
    job_id: UUID, reason: str, *, signalled: bool = False, by_engine: bool = False, **end: Unpack[JobEnd]
) -> None:
    """A runner's report that its job has ended. `signalled`: the runner itself got SIGTERM before.

    A job that its host could not start ends as one that was not claimed. `by_engine`: because of the container engine,
    for which the host gets no more jobs with an image by itself. Another cloud instance would cost money and may fail
    the same way, so a cloud's job fails.

    Where that may be the end of a cloud's machine, the job stays active until the cloud has said how its machine is
    (`scheduler.cloud.watch`). An own host whose runner got the signal with its commands was shut down.
    """
    with shared_rows_last():
        job = lock_job(job_id)
        if job.status not in JOB_ACTIVE or job.reported_at is not None:
            return
        if not job.stop_reason and reason == Reason.CONTAINER_EXITED_WITH_ERROR:
            killed = was_signalled(end.get("exit_code"))
            if job.instance is not None and (killed or signalled):
                if job.instance.interrupted_at is None:
                    _ask_for_machine(job, end)
                    return
                reason = Reason.INTERRUPTED
            elif job.host_id is not None and killed and signalled:
                reason = Reason.INSTANCE_UNREACHABLE
                end["detail"] = {"code": MessageCode.MACHINE_SHUT_DOWN, "exit_code": end.get("exit_code")}
        if reason == Reason.NOT_CLAIMED and job.host_id is None:
            reason = Reason.CREATING_CONTAINER_ERROR if by_engine else Reason.EXECUTOR_ERROR
        _end(job, reason, end)
        if job.host_id is None:
            return
        if reason == Reason.NOT_CLAIMED and not by_engine:
            inventory.count_failed_start(job.host_id, end.get("message", ""), timezone.now())
        elif end.get("exit_code") in NOT_EXECUTED and _executes_nothing(job.host_id):
            inventory.hold_back(job.host_id, StartError.COMMANDS_FAIL, timezone.now())


def _executes_nothing(host_id: int) -> bool:
    now = timezone.now()
    rows = Job.objects.filter(Q(ended_at__gt=now - WINDOW) | Q(status__in=JOB_ACTIVE), started_at__gt=now - WINDOW)
    columns = ("run_id", "run__user_id", "host_id", "started_at", "ended_at", "exit_code")
    return executes_nothing(host_id, [Execution(*row) for row in rows.values_list(*columns)], now)


def _ask_for_machine(job: Job, end: JobEnd) -> None:
    now = timezone.now()
    values = _values(job, end) | {"detail": {"code": MessageCode.MACHINE_ASKED, "exit_code": end.get("exit_code")}}
    move_job(job, JobStatus.TERMINATING, now=now, event=RunEventKind.MACHINE_ASKED, reported_at=now, **values)
    wakeups.request_job_checks([job])


def end_job(job_id: UUID, reason: str, **end: Unpack[JobEnd]) -> bool:
    """End a job whose processes are gone, for the reason it was stopped for if it was. False if it had ended before."""
    with shared_rows_last():
        job = lock_job(job_id)
        if job.status not in JOB_ACTIVE:
            return False
        if job.reported_at is not None:
            end |= JobEnd(exit_code=job.exit_code, log_size=job.log_size, log_missing=job.log_missing)
        _end(job, reason, end)
    return True


def _end(job: Job, reason: str, end: JobEnd) -> None:
    if job.stop_reason and reason != Reason.DONE_BY_RUNNER:
        reason = job.stop_reason
    if job.run.is_hold and job.started_at is not None:
        reason = HOLD_END.get(reason, reason)
    values = _values(job, end)
    if job.stop_reason and (job.message or job.detail):
        values |= {"message": job.message, "detail": job.detail}  # those of the stop request
    elif reason == Reason.CONTAINER_EXITED_WITH_ERROR and end.get("exit_code") and not end.get("message"):
        values["detail"] = {"code": MessageCode.EXITED, "exit_code": end.get("exit_code")}
    move_job(job, job_end_status(reason), now=timezone.now(), termination_reason=reason, **values)
    if job.host_id is None:
        wakeups.request_job_checks([job])
    settle_run(job.run)


def _values(job: Job, end: JobEnd) -> dict[str, Any]:
    """An end as columns."""
    log_size, log_missing = logs.at_end(job, end.get("log_size"), end.get("log_missing", 0))
    return {
        "exit_code": end.get("exit_code"),
        "message": end.get("message", ""),
        "detail": end.get("detail") or {},
        "log_size": log_size,
        "log_missing": log_missing,
    }


def return_job(
    job_id: UUID, *, message: str = "", detail: dict[str, Any] | None = None, failed_start: bool = False
) -> bool:
    """End a job that no runner has claimed: nothing was executed, and its run goes back to its place in the queue.

    The claim is the fence: a runner that comes later is refused. False if one has claimed it, or it has ended.
    `failed_start` counts against its host.
    """
    now = timezone.now()
    with shared_rows_last():
        job = lock_job(job_id)
        if job.status != JobStatus.PROVISIONING or not move_job(
            job,
            job_end_status(Reason.NOT_CLAIMED),
            now=now,
            unclaimed=True,
            termination_reason=Reason.NOT_CLAIMED,
            message=message,
            detail=detail or {},
        ):
            return False
        settle_run(job.run)
        if failed_start and job.host_id is not None:
            inventory.count_failed_start(job.host_id, message, now)
    return True


def settle_run(run: Run) -> None:
    """Move a run on according to its current attempt's jobs, and free what ended jobs held. Call after `lock_run`."""
    if run.status in PLACED:
        _follow(run)
    release_ended(run)


def _follow(run: Run) -> None:
    now = timezone.now()
    jobs = list(Job.objects.filter(run=run, attempt=run.attempt).order_by("node"))
    if not jobs:
        return
    match decide(_run_view(run), [_job_view(job) for job in jobs], now):
        case RunStarted():
            move_run(run, RunStatus.RUNNING, now=now)
        case StopOthers(because=job):
            move_run(run, RunStatus.TERMINATING, now=now, data={"node": job.node, "job_reason": job.reason})
            stop_jobs(run, Reason.TERMINATED_BY_SERVER, grace_s=None)
            _follow(run)
        case RetryRun() as retry:
            _retry(run, retry, now)
        case ReturnRun(because=job):
            _return(run, job, now)
        case EndRun() as end:
            data = {"reason": end.reason, **end.data}
            if end.exit_code is not None:
                data["exit_code"] = end.exit_code
            moved = move_run(
                run,
                end.status,
                now=now,
                data=data,
                termination_reason=end.reason,
                status_message=end.message,
                status_detail=end.detail,
                exit_code=end.exit_code,
            )
            crons = (run.spec.get("schedule") or {}).get("cron", ())
            # Never at the run's own time again, even if this machine's clock is behind.
            if moved and (again := next_after_end(crons, run.stop_reason, max(now, run.queued_at))):
                # `recurrence` creates the next occurrence from this, under its queue's lock.
                Run.objects.filter(pk=run.pk).update(retry_at=again)


def _retry(run: Run, again: RetryRun, now: dt.datetime, waits: int | None = None) -> None:
    """Let the run wait, with its seniority, for its next attempt: a jittered time that grows with `waits`."""
    because = again.because
    delay = full_jitter(run.attempt if waits is None else waits, RETRY_BASE_S, RETRY_CAP_S, random.random)
    retry_at = now + dt.timedelta(seconds=delay)
    if again.until is not None:
        retry_at = min(retry_at, again.until)
    # The last offer's refusal alone says little: others were refused before it.
    nowhere = because.reason == Reason.OUT_OF_CAPACITY
    move_run(
        run,
        RunStatus.PENDING,
        now=now,
        event=RunEventKind.RETRY,
        data={"job_reason": because.reason, "exit_code": because.exit_code, "retry_at": retry_at.isoformat()},
        attempt=run.attempt + 1,
        retry_at=retry_at,
        first_failed_at=again.first_failed_at,
        status_message=because.message,
        status_detail={"code": MessageCode.OUT_OF_CAPACITY} if nowhere else because.detail,
        stop_reason="",
    )


def _return(run: Run, because: JobView, now: dt.datetime) -> None:
    """Return a run to its place in the queue; one that no runner claims again and again waits a moment first."""
    displaced = because.reason == Reason.PREEMPTED
    if not displaced:
        unclaimed = Job.objects.filter(run=run, termination_reason=Reason.NOT_CLAIMED)
        often = unclaimed.order_by().values("attempt").distinct().count() - RETURNS_AT_ONCE
        if often > 0:
            _retry(run, RetryRun(because, run.first_failed_at), now, often)
            return
    move_run(
        run,
        RunStatus.SUBMITTED,
        now=now,
        event=RunEventKind.RETURNED,
        data={"job_reason": because.reason, "detail": because.detail, "message": because.message},
        attempt=run.attempt + 1,
        status_message="",
        status_detail={},
        stop_reason="",
        queued_at=now if displaced else run.queued_at,
    )


def undo_placement(run: Run, **data: Any) -> bool:
    """Return a run that no cloud launched anything for to its place in the queue, as if it had not been placed: its
    attempt, its jobs and its wait count as before. False if a node may have begun. Call after `lock_run`.

    Its timeline shows the last such round alone, with `data`: there may be one every minute.
    """
    now = timezone.now()
    jobs = Job.objects.filter(run=run, attempt=run.attempt)
    if run.status != RunStatus.PROVISIONING or jobs.exclude(status=JobStatus.PROVISIONING, claim_nonce="").exists():
        return False
    events = RunEvent.objects.filter(run=run, attempt=run.attempt)
    placed = events.filter(kind=RunEventKind.PROVISIONING).order_by("-id").first()
    with shared_rows_last():
        jobs.delete()
        if placed is not None:
            count_undone(run, placed.at)
            before = events.filter(kind=RunEventKind.RETURNED, id__lt=placed.pk, data__code=MessageCode.OUT_OF_CAPACITY)
            if before.exists():
                events.filter(kind=RunEventKind.OFFER_FAILED, id__lt=placed.pk).delete()
                before.delete()
            placed.delete()
        move_run(
            run,
            RunStatus.SUBMITTED,
            now=now,
            event=RunEventKind.RETURNED,
            data={"code": MessageCode.OUT_OF_CAPACITY, **data},
            status_message="",
            status_detail={},
        )
    return True


def requeue_due(now: dt.datetime) -> int:
    """Move pending runs whose time has come into their queue, at their rank. Returns how many."""
    due = Run.objects.filter(status=RunStatus.PENDING, retry_at__lte=now).order_by("retry_at")[:REQUEUED_AT_ONCE]
    moved = 0
    for run in due:
        event = RunEventKind.REQUEUED if run.attempt > 1 else RunEventKind.CAME_ROUND
        moved += move_run(run, RunStatus.SUBMITTED, now=now, event=event, retry_at=None)
    if moved:
        wakeups.request_pass()
    return moved


def stop_jobs(run: Run, reason: str, grace_s: int | None) -> None:
    """Stop the current attempt's active jobs; unclaimed ones end at once, since nothing of them runs.

    `grace_s` None means the run's `stop_duration`; a job that is stopping already never gets more time than it had.
    Call after `lock_run`, and `settle_run` afterwards.
    """
    now = timezone.now()
    grace = EffectiveSpec.model_validate(run.spec).stop_duration_s if grace_s is None else grace_s
    to_check = []
    active = Job.objects.select_related("host").filter(run=run, attempt=run.attempt, status__in=JOB_ACTIVE)
    for job in active.order_by("node"):
        job.run = run
        if job.status == JobStatus.PROVISIONING and move_job(
            job, job_end_status(reason), now=now, unclaimed=True, termination_reason=reason, detail={}
        ):
            if job.host_id is None:
                to_check.append(job)
            continue
        if job.reported_at is not None:
            # Nothing of it runs. If another node has failed, it may be because of this one's machine.
            if reason != Reason.TERMINATED_BY_SERVER:
                move_job(job, job_end_status(reason), now=now, termination_reason=reason, detail={})
                to_check.append(job)
            continue
        if job.status != JobStatus.TERMINATING:
            move_job(job, JobStatus.TERMINATING, now=now, stop_reason=reason, stop_grace_s=grace)
        elif job.stop_grace_s is None or grace < job.stop_grace_s:
            Job.objects.filter(pk=job.pk).update(stop_grace_s=grace, status_at_s=watch_time())
        to_check.append(job)
    wakeups.request_job_checks(to_check)


def _job_view(job: Job) -> JobView:
    status, ended, started = JobStatus(job.status), job.ended_at, job.started_at
    return JobView(job.node, status, job.termination_reason, job.exit_code, job.message, ended, started, job.detail)


def _run_view(run: Run) -> RunView:
    retry = EffectiveSpec.model_validate(run.spec).retry
    return RunView(
        status=RunStatus(run.status),
        stop_reason=run.stop_reason,
        # For all other reasons the reason says everything.
        stop_detail=run.status_detail if run.stop_reason == Reason.UTILIZATION_POLICY else {},
        retry_on=frozenset(retry.on_events) if retry else frozenset(),
        retry_for=dt.timedelta(seconds=retry.duration_s) if retry and retry.duration_s else None,
        first_failed_at=run.first_failed_at,
        max_attempts=retry.max_attempts if retry else None,
        attempts=_attempts_with_a_machine(run) if retry and retry.max_attempts else 1,
    )


def _attempts_with_a_machine(run: Run) -> int:
    """The run's attempts so far, without those for which there was no machine or runner, and displaced ones."""
    nowhere = Job.objects.filter(run=run, termination_reason__in=[*WAITS_AGAIN, *RETURNS, Reason.NOT_CLAIMED])
    return run.attempt - nowhere.order_by().values("attempt").distinct().count()
