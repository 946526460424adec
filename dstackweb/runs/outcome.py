"""What follows for a run when jobs of its attempt change: a pure decision (docs/design.md, rule 3)."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dstackweb.runs.states import HOLD_END, JOB_ENDED, RETRY_EVENT, WAITS_AGAIN, JobStatus, Reason, RunStatus


@dataclass(frozen=True)
class JobView:
    """A job as the decision sees it."""

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
    """A run as the decision sees it. Without `retry`, `retry_on` is empty and `retry_for` None.

    `stop_detail`: more about `stop_reason`, where there is more.
    """

    status: RunStatus
    stop_reason: str = ""
    stop_detail: dict[str, Any] = field(default_factory=dict)
    retry_on: frozenset[str] = frozenset()
    retry_for: dt.timedelta | None = None
    first_failed_at: dt.datetime | None = None


@dataclass(frozen=True)
class NoChange:
    """Nothing to do."""


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

    `first_failed_at` is None if the run has never failed.
    """

    because: JobView
    first_failed_at: dt.datetime | None


@dataclass(frozen=True)
class EndRun:
    """The run has ended."""

    status: RunStatus
    reason: str
    message: str = ""
    exit_code: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)


Outcome = NoChange | RunStarted | StopOthers | RetryRun | EndRun


def decide(run: RunView, jobs: Sequence[JobView], now: dt.datetime) -> Outcome:
    """What follows for the run from its current attempt's jobs (at least one)."""
    culprit = first_failed(jobs)
    if any(job.status not in JOB_ENDED for job in jobs):
        if culprit is not None and run.status != RunStatus.TERMINATING:
            return StopOthers(culprit)
        if run.status == RunStatus.PROVISIONING and any(job.status == JobStatus.RUNNING for job in jobs):
            return RunStarted()
        return NoChange()
    if all(job.status == JobStatus.DONE for job in jobs):
        return EndRun(RunStatus.DONE, _good_end(jobs), exit_code=0)
    if run.stop_reason or culprit is None:
        reason = run.stop_reason or Reason.SERVER_ERROR
        return EndRun(RunStatus.TERMINATED, reason, exit_code=_exit_code(jobs), detail=run.stop_detail)
    return _failed(run, culprit, now)


def first_failed(jobs: Sequence[JobView]) -> JobView | None:
    """The job that failed first, not counting jobs stopped by people or because of another node."""
    bad = [
        job
        for job in jobs
        if job.status in (JobStatus.FAILED, JobStatus.TERMINATED)
        and job.reason not in (Reason.TERMINATED_BY_SERVER, Reason.TERMINATED_BY_USER, Reason.ABORTED_BY_USER)
    ]
    return min(bad, key=lambda job: (job.ended_at or dt.datetime.max.replace(tzinfo=dt.UTC), job.node), default=None)


def _good_end(jobs: Sequence[JobView]) -> str:
    """The reason of a run whose jobs are all done; a hold's says whether its time was over."""
    return next((job.reason for job in jobs if job.reason in HOLD_END.values()), Reason.ALL_JOBS_DONE)


def _exit_code(jobs: Sequence[JobView]) -> int | None:
    return next((job.exit_code for job in jobs if job.exit_code is not None), None)


def _failed(run: RunView, culprit: JobView, now: dt.datetime) -> Outcome:
    """End or retry a run whose job `culprit` failed."""
    if culprit.reason in WAITS_AGAIN:
        return RetryRun(culprit, run.first_failed_at)
    since = run.first_failed_at or now
    if run.retry_for and culprit.started_at and now - culprit.started_at >= run.retry_for:
        # It ran for as long as it may be retried: this failure starts a new series.
        since = now
    covered = RETRY_EVENT.get(culprit.reason) in run.retry_on
    if covered and (run.retry_for is None or now - since < run.retry_for):
        return RetryRun(culprit, since)
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
