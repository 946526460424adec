"""The statuses of runs and jobs, which moves between them are legal, and what each ending means.

Pure data: `transitions` enforces it, pages and docs/states.md read it.
"""

from __future__ import annotations

from enum import StrEnum


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
    R.PROVISIONING: frozenset({R.RUNNING, R.TERMINATING, R.DONE, R.FAILED, R.TERMINATED, R.PENDING}),
    R.RUNNING: frozenset({R.TERMINATING, R.DONE, R.FAILED, R.TERMINATED, R.PENDING}),
    R.TERMINATING: frozenset({R.DONE, R.FAILED, R.TERMINATED, R.PENDING}),
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
    EXECUTOR_ERROR = "executor_error"
    INSTANCE_UNREACHABLE = "instance_unreachable"
    NO_CAPACITY = "failed_to_start_due_to_no_capacity"
    OUT_OF_CAPACITY = "out_of_capacity"
    INTERRUPTED = "interrupted_by_no_capacity"
    CREATING_CONTAINER_ERROR = "creating_container_error"
    UTILIZATION_POLICY = "terminated_due_to_utilization_policy"
    HOLD_ENDED = "hold_ended"
    GIVEN_BACK = "given_back"

    ALL_JOBS_DONE = "all_jobs_done"
    JOB_FAILED = "job_failed"
    STOPPED_BY_USER = "stopped_by_user"
    ABORTED_BY_USER = "aborted_by_user"
    RETRY_LIMIT_EXCEEDED = "retry_limit_exceeded"
    SERVER_ERROR = "server_error"


# Which event of `retry.on_events` a failed job is. What is not here is never retried.
RETRY_EVENT: dict[str, str] = {
    Reason.NO_CAPACITY: "no-capacity",
    Reason.INSTANCE_UNREACHABLE: "interruption",
    Reason.INTERRUPTED: "interruption",
    Reason.CONTAINER_EXITED_WITH_ERROR: "error",
    Reason.EXECUTOR_ERROR: "error",
    Reason.CREATING_CONTAINER_ERROR: "error",
}

# Nothing of the job was ever executed, for want of a machine: its run waits for one again, with `retry` or without.
WAITS_AGAIN = frozenset({Reason.OUT_OF_CAPACITY.value})

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
    Reason.MAX_DURATION_EXCEEDED: J.TERMINATED,
}


def job_end_status(reason: str) -> JobStatus:
    """The final status of a job that ended for `reason`; anything not known as benign is a failure."""
    return JOB_END.get(reason, J.FAILED)
