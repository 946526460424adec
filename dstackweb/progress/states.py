"""The states of a task, as Dask names them, and their aliases. Without Django."""

from __future__ import annotations

from enum import StrEnum


class TaskState(StrEnum):
    """State of a task. The values are the columns of all counters, in the order of bars and tables."""

    MEMORY = "memory"
    ERRED = "erred"
    RELEASED = "released"
    PROCESSING = "processing"
    QUEUED = "queued"
    NO_WORKER = "no_worker"
    WAITING = "waiting"
    FORGOTTEN = "forgotten"

    __hash__ = str.__hash__  # the string's hash, which C computes: counting looks up states all the time


class NoReports(StrEnum):
    """Why tasks of a run can't be reported now: the `reason` of a 409."""

    NOT_YET = "not_yet"
    """The run waits to start, or for its next attempt. Try again later."""
    ATTEMPT_OVER = "attempt_over"
    """The attempt that was named, or that the token is for, has ended."""
    RUN_OVER = "run_over"
    """The run has ended. Nothing will be accepted any more."""


S = TaskState

SHOWN = (S.MEMORY, S.ERRED, S.RELEASED, S.PROCESSING, S.QUEUED, S.NO_WORKER, S.WAITING)
"""States of tasks that are not forgotten."""

LIVE = (S.PROCESSING, S.QUEUED, S.NO_WORKER, S.WAITING)
"""Unfinished. Released when their reporter ends."""

FINISHED = (S.MEMORY, S.ERRED, S.RELEASED, S.FORGOTTEN)
"""Forgotten tasks stay counted in totals, so that bars never shrink."""

CODES: dict[TaskState, int] = {
    S.WAITING: 1, S.QUEUED: 2, S.NO_WORKER: 3, S.PROCESSING: 4, S.MEMORY: 5, S.ERRED: 6, S.RELEASED: 7, S.FORGOTTEN: 8,
}  # fmt: skip
"""States as stored in task rows."""

STATE_OF: dict[int, TaskState] = {code: state for state, code in CODES.items()}

ALIASES: dict[str, TaskState] = {
    **{state.value: state for state in TaskState},
    "no-worker": S.NO_WORKER,
    "done": S.MEMORY,
    "failed": S.ERRED,
    "running": S.PROCESSING,
}
"""States that reports can contain: Dask's names and plain ones."""
