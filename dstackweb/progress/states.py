"""The states of a task, as Dask names them, and their aliases. Without Django."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class TaskState(StrEnum):
    """State of a task. The values are the columns of all counters, in the order of bars and tables.

    Released and forgotten tasks are counted apart by how they ended: done, failed, or neither (`released`,
    `forgotten`: stopped, or not known).
    """

    MEMORY = "memory"
    RELEASED_DONE = "released_done"
    FORGOTTEN_DONE = "forgotten_done"
    ERRED = "erred"
    RELEASED_FAILED = "released_failed"
    FORGOTTEN_FAILED = "forgotten_failed"
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

SHOWN = (
    S.MEMORY, S.RELEASED_DONE, S.ERRED, S.RELEASED_FAILED, S.RELEASED, S.PROCESSING, S.QUEUED, S.NO_WORKER, S.WAITING,
)  # fmt: skip
"""States of tasks that are not forgotten."""

LIVE = (S.PROCESSING, S.QUEUED, S.NO_WORKER, S.WAITING)
"""Unfinished. Released when their reporter ends."""

FINISHED = tuple(state for state in S if state not in LIVE)
"""Forgotten tasks stay counted in totals, so that bars never shrink."""

GONE = frozenset((S.FORGOTTEN, S.FORGOTTEN_DONE, S.FORGOTTEN_FAILED))
"""Forgotten, however they ended."""

FAILED = (S.ERRED, S.RELEASED_FAILED, S.FORGOTTEN_FAILED)
"""Failed, whatever has become of them since."""

ENDED = (S.MEMORY, S.RELEASED_DONE, S.FORGOTTEN_DONE, *FAILED)
"""Done or failed, whatever has become of them since."""

DROPPED = frozenset((S.RELEASED, S.FORGOTTEN))
"""Reported without saying how the task ended."""

AS_ENDED: dict[TaskState, TaskState] = {
    S.RELEASED_DONE: S.MEMORY, S.FORGOTTEN_DONE: S.MEMORY,
    S.RELEASED_FAILED: S.ERRED, S.FORGOTTEN_FAILED: S.ERRED,
}  # fmt: skip
"""The state in which released and forgotten tasks had ended."""

AS_REPORTED: dict[TaskState, TaskState] = {
    S.RELEASED_DONE: S.RELEASED, S.RELEASED_FAILED: S.RELEASED,
    S.FORGOTTEN_DONE: S.FORGOTTEN, S.FORGOTTEN_FAILED: S.FORGOTTEN,
}  # fmt: skip
"""The state that was reported of them."""

PLAIN = tuple(state for state in S if state not in AS_ENDED)
"""Dask's own states."""


def folded(counts: Mapping[TaskState, int], into: Mapping[TaskState, TaskState]) -> dict[TaskState, int]:
    """Counts of PLAIN states, with the others added `into` one of them: AS_ENDED or AS_REPORTED."""
    plain = {state: counts.get(state, 0) for state in PLAIN}
    for state, target in into.items():
        plain[target] += counts.get(state, 0)
    return plain


CODES: dict[TaskState, int] = {
    S.WAITING: 1, S.QUEUED: 2, S.NO_WORKER: 3, S.PROCESSING: 4, S.MEMORY: 5, S.ERRED: 6, S.RELEASED: 7, S.FORGOTTEN: 8,
    S.RELEASED_DONE: 9, S.RELEASED_FAILED: 10, S.FORGOTTEN_DONE: 11, S.FORGOTTEN_FAILED: 12,
}  # fmt: skip
"""States as stored in task rows."""

LIVE_CODES = tuple(sorted(CODES[state] for state in LIVE))
GONE_CODES = tuple(sorted(CODES[state] for state in GONE))

STATE_OF: dict[int, TaskState] = {code: state for state, code in CODES.items()}

ALIASES: dict[str, TaskState] = {
    **{state.value: state for state in PLAIN},
    "no-worker": S.NO_WORKER,
    "done": S.MEMORY,
    "failed": S.ERRED,
    "running": S.PROCESSING,
}
"""States that reports can contain: Dask's names and plain ones."""

COUNTED: dict[str, TaskState] = {**ALIASES, **{state.value: state for state in AS_ENDED}}
"""States that counts can contain. Of single tasks the server knows how they ended."""
