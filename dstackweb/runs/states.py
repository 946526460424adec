"""The statuses of runs and jobs, their legal transitions, and what follows for a run when its jobs change. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class RunStatus(StrEnum):
    """dstack's run statuses."""

    PENDING = "pending"
    SUBMITTED = "submitted"
    PROVISIONING = "provisioning"
    RUNNING = "running"
    TERMINATING = "terminating"
    DONE = "done"
    FAILED = "failed"
    TERMINATED = "terminated"


class JobStatus(StrEnum):
    """Statuses of one node of one attempt. A job exists only once it is placed."""

    PROVISIONING = "provisioning"
    RUNNING = "running"
    TERMINATING = "terminating"
    DONE = "done"
    FAILED = "failed"
    TERMINATED = "terminated"


R, J = RunStatus, JobStatus

RUN_MOVES: dict[RunStatus, frozenset[RunStatus]] = {
    R.PENDING: frozenset({R.SUBMITTED, R.TERMINATED}),
    R.SUBMITTED: frozenset({R.PROVISIONING, R.TERMINATED, R.FAILED}),
    R.PROVISIONING: frozenset({R.RUNNING, R.TERMINATING, R.DONE, R.FAILED, R.TERMINATED, R.PENDING, R.SUBMITTED}),
    R.RUNNING: frozenset({R.TERMINATING, R.DONE, R.FAILED, R.TERMINATED, R.PENDING}),
    R.TERMINATING: frozenset({R.DONE, R.FAILED, R.TERMINATED, R.PENDING, R.SUBMITTED}),
    R.DONE: frozenset(),
    R.FAILED: frozenset(),
    R.TERMINATED: frozenset(),
}

JOB_MOVES: dict[JobStatus, frozenset[JobStatus]] = {
    J.PROVISIONING: frozenset({J.RUNNING, J.TERMINATING, J.FAILED, J.TERMINATED, J.DONE}),
    J.RUNNING: frozenset({J.TERMINATING, J.DONE, J.FAILED, J.TERMINATED}),
    J.TERMINATING: frozenset({J.DONE, J.FAILED, J.TERMINATED}),
    J.DONE: frozenset(),
    J.FAILED: frozenset(),
    J.TERMINATED: frozenset(),
}

WAITING = (R.PENDING, R.SUBMITTED)
PLACED = (R.PROVISIONING, R.RUNNING, R.TERMINATING)
ACTIVE = WAITING + PLACED
ENDED = (R.DONE, R.FAILED, R.TERMINATED)

JOB_ACTIVE = (J.PROVISIONING, J.RUNNING, J.TERMINATING)
JOB_ENDED = (J.DONE, J.FAILED, J.TERMINATED)


class Reason(StrEnum):
    """Termination reasons, named as in dstack where it has them. The first group ends jobs, the second runs."""

    DONE_BY_RUNNER = "done_by_runner"
    CONTAINER_EXITED_WITH_ERROR = "container_exited_with_error"
    TERMINATED_BY_USER = "terminated_by_user"
    TERMINATED_BY_SERVER = "terminated_by_server"
    MAX_DURATION_EXCEEDED = "max_duration_exceeded"
    OUT_OF_MEMORY = "out_of_memory"
    OUT_OF_DISK = "out_of_disk"
    EXECUTOR_ERROR = "executor_error"
    CODE_REFUSED = "code_refused"
    IMAGE_PULL_FAILED = "image_pull_failed"
    INSTANCE_UNREACHABLE = "instance_unreachable"
    NO_CAPACITY = "failed_to_start_due_to_no_capacity"
    OUT_OF_CAPACITY = "out_of_capacity"
    NOT_CLAIMED = "not_claimed"
    INTERRUPTED = "interrupted_by_no_capacity"
    CREATING_CONTAINER_ERROR = "creating_container_error"
    UTILIZATION_POLICY = "terminated_due_to_utilization_policy"
    INACTIVITY = "inactivity_duration_exceeded"
    PREEMPTED = "preempted"
    HOLD_ENDED = "hold_ended"
    GIVEN_BACK = "given_back"

    ALL_JOBS_DONE = "all_jobs_done"
    JOB_FAILED = "job_failed"
    STOPPED_BY_USER = "stopped_by_user"
    ABORTED_BY_USER = "aborted_by_user"
    RETRY_LIMIT_EXCEEDED = "retry_limit_exceeded"
    DEPENDENCY_NOT_MET = "dependency_not_met"
    SERVER_ERROR = "server_error"


# Which event of `retry.on_events` a failed job is. What is not here is never retried.
RETRY_EVENT: dict[str, str] = {
    Reason.NO_CAPACITY: "no-capacity",
    Reason.NOT_CLAIMED: "no-capacity",
    Reason.INSTANCE_UNREACHABLE: "interruption",
    Reason.INTERRUPTED: "interruption",
    Reason.CONTAINER_EXITED_WITH_ERROR: "error",
    Reason.OUT_OF_MEMORY: "error",
    Reason.OUT_OF_DISK: "error",
    Reason.EXECUTOR_ERROR: "error",
    Reason.CREATING_CONTAINER_ERROR: "error",
    Reason.IMAGE_PULL_FAILED: "error",
}

# Nothing of the job was ever executed, for want of a machine: its run waits for one again, with `retry` or without.
WAITS_AGAIN = frozenset({Reason.OUT_OF_CAPACITY.value})

# No failure of the job: its run goes back to its place in the queue at once, with `retry` or without.
RETURNS = frozenset({Reason.PREEMPTED.value})

# What ends a hold well, though it would cut any other run short: its job and its run end as done, for this reason.
HOLD_END: dict[str, Reason] = {
    Reason.MAX_DURATION_EXCEEDED: Reason.HOLD_ENDED,
    Reason.TERMINATED_BY_USER: Reason.GIVEN_BACK,
}

# How a job ends for each reason its runner (or the watcher) gives.
JOB_END: dict[str, JobStatus] = {
    Reason.DONE_BY_RUNNER: J.DONE,
    Reason.HOLD_ENDED: J.DONE,
    Reason.GIVEN_BACK: J.DONE,
    Reason.TERMINATED_BY_USER: J.TERMINATED,
    Reason.ABORTED_BY_USER: J.TERMINATED,
    Reason.TERMINATED_BY_SERVER: J.TERMINATED,
    Reason.UTILIZATION_POLICY: J.TERMINATED,
    Reason.INACTIVITY: J.TERMINATED,
    Reason.PREEMPTED: J.TERMINATED,
    Reason.MAX_DURATION_EXCEEDED: J.TERMINATED,
}


# SIGHUP, SIGKILL and SIGTERM: what ends processes from outside, and all of them when their machine is shut down.
OUTSIDE_SIGNALS = frozenset({1, 9, 15})


def was_signalled(exit_code: int | None) -> bool:
    """Whether commands were ended by a signal from outside: by their machine's end, or by someone."""
    return (exit_code or 0) - 128 in OUTSIDE_SIGNALS


def job_end_status(reason: str) -> JobStatus:
    """The final status of a job that ended for `reason`; anything not known as benign is a failure."""
    return JOB_END.get(reason, J.FAILED)


@dataclass(frozen=True)
class JobView:
    """What `decide` reads of a job."""

    node: int
    status: JobStatus
    reason: str = ""
    exit_code: int | None = None
    message: str = ""
    ended_at: dt.datetime | None = None
    started_at: dt.datetime | None = None
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunView:
    """What `decide` reads of a run. Without `retry`, `retry_on` is empty and `retry_for` None.

    `attempts` are those for which there was a machine, the current one included; `max_attempts` None: no limit.
    """

    status: RunStatus
    stop_reason: str = ""
    stop_detail: dict[str, Any] = field(default_factory=dict)
    retry_on: frozenset[str] = frozenset()
    retry_for: dt.timedelta | None = None
    first_failed_at: dt.datetime | None = None
    max_attempts: int | None = None
    attempts: int = 1


@dataclass(frozen=True)
class RunStarted:
    """The run is running, because a job of it is."""


@dataclass(frozen=True)
class StopOthers:
    """A node has failed: the rest of the attempt must stop."""

    because: JobView


@dataclass(frozen=True)
class RetryRun:
    """The run gets another attempt: its `retry` covers the failure, or nothing was executed for lack of capacity.

    `first_failed_at` is None if the run has never failed. It is queued again by `until`; None: any time.
    """

    because: JobView
    first_failed_at: dt.datetime | None
    until: dt.datetime | None = None


@dataclass(frozen=True)
class ReturnRun:
    """The run goes back to its place in the queue: no runner claimed the job, or another run has displaced it."""

    because: JobView


@dataclass(frozen=True)
class EndRun:
    status: RunStatus
    reason: str
    message: str = ""
    exit_code: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)


Outcome = RunStarted | StopOthers | RetryRun | ReturnRun | EndRun


STOP_OF_RUN: dict[str, str] = {
    Reason.TERMINATED_BY_USER: Reason.STOPPED_BY_USER,
    Reason.ABORTED_BY_USER: Reason.ABORTED_BY_USER,
}
"""Reason of a stopped run by that of its jobs, which alone say so where a restored database has lost the stop."""


def decide(run: RunView, jobs: Sequence[JobView], now: dt.datetime) -> Outcome | None:
    """What follows for the run from its current attempt's jobs (at least one); None if nothing."""
    culprit = first_failed(jobs)
    if any(job.status not in JOB_ENDED for job in jobs):
        if culprit is not None and run.status != RunStatus.TERMINATING:
            return StopOthers(culprit)
        if run.status == RunStatus.PROVISIONING and any(job.status == JobStatus.RUNNING for job in jobs):
            return RunStarted()
        return None
    if all(job.status == JobStatus.DONE for job in jobs):
        return EndRun(RunStatus.DONE, _good_end(jobs), exit_code=0)
    if run.stop_reason or culprit is None:
        by_people = (STOP_OF_RUN[job.reason] for job in jobs if job.reason in STOP_OF_RUN)
        reason = run.stop_reason or next(by_people, Reason.SERVER_ERROR)
        return EndRun(RunStatus.TERMINATED, reason, exit_code=_exit_code(jobs), detail=run.stop_detail)
    if len(jobs) > 1 and culprit.detail:
        culprit = replace(culprit, detail={**culprit.detail, "failed_node": culprit.node})
    executed = run.status == RunStatus.RUNNING or any(job.started_at for job in jobs)
    return _failed(run, culprit, now, executed=executed)


def first_failed(jobs: Sequence[JobView]) -> JobView | None:
    """The job that failed first, a lost machine before all others, which fail because of it; no stopped one."""
    bad = [
        job
        for job in jobs
        if job.status in (JobStatus.FAILED, JobStatus.TERMINATED)
        and job.reason not in (Reason.TERMINATED_BY_SERVER, Reason.TERMINATED_BY_USER, Reason.ABORTED_BY_USER)
    ]
    latest = dt.datetime.max.replace(tzinfo=dt.UTC)

    def order(job: JobView) -> tuple[bool, dt.datetime, int]:
        return RETRY_EVENT.get(job.reason) != "interruption", job.ended_at or latest, job.node

    return min(bad, key=order, default=None)


def _good_end(jobs: Sequence[JobView]) -> str:
    """The reason of a run whose jobs are all done; a hold's says whether its time was over."""
    return next((job.reason for job in jobs if job.reason in HOLD_END.values()), Reason.ALL_JOBS_DONE)


def _exit_code(jobs: Sequence[JobView]) -> int | None:
    return next((job.exit_code for job in jobs if job.exit_code is not None), None)


def _failed(run: RunView, culprit: JobView, now: dt.datetime, *, executed: bool) -> Outcome:
    """End, retry or return a run whose job `culprit` failed."""
    if culprit.reason in RETURNS or (culprit.reason == Reason.NOT_CLAIMED and not executed):
        return ReturnRun(culprit)
    if culprit.reason in WAITS_AGAIN:
        return RetryRun(culprit, run.first_failed_at)
    since = run.first_failed_at or now
    if run.retry_for and culprit.started_at and now - culprit.started_at >= run.retry_for:
        # It ran for as long as it may be retried: this failure starts a new series.
        since = now
    covered = RETRY_EVENT.get(culprit.reason) in run.retry_on
    until = since + run.retry_for if run.retry_for else None
    in_number = run.max_attempts is None or run.attempts < run.max_attempts
    if covered and in_number and (until is None or now < until):
        return RetryRun(culprit, since, until)
    if culprit.status == JobStatus.TERMINATED:
        return EndRun(RunStatus.TERMINATED, culprit.reason, culprit.message, culprit.exit_code, detail=culprit.detail)
    reason = Reason.RETRY_LIMIT_EXCEEDED if covered else Reason.JOB_FAILED
    return EndRun(
        RunStatus.FAILED,
        reason,
        culprit.message,
        culprit.exit_code,
        {"node": culprit.node, "job_reason": culprit.reason},
        culprit.detail,
    )
