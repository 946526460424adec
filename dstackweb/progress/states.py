"""The states of a task, as Dask names them, and what people call them. Pure data, without Django."""

from __future__ import annotations

from enum import StrEnum


class TaskState(StrEnum):
    """Where a task is. The values are columns of all counters, in the order in which bars and tables show them."""

    MEMORY = "memory"
    ERRED = "erred"
    RELEASED = "released"
    PROCESSING = "processing"
    QUEUED = "queued"
    NO_WORKER = "no_worker"
    WAITING = "waiting"
    FORGOTTEN = "forgotten"

    __hash__ = str.__hash__  # as its value's, and by C: counting looks up little else


S = TaskState

SHOWN = (S.MEMORY, S.ERRED, S.RELEASED, S.PROCESSING, S.QUEUED, S.NO_WORKER, S.WAITING)
"""What a task that is not forgotten may be."""

LIVE = (S.PROCESSING, S.QUEUED, S.NO_WORKER, S.WAITING)
"""Something is still to come of these; when their reporter ends, they are released."""

FINISHED = (S.MEMORY, S.ERRED, S.RELEASED, S.FORGOTTEN)
"""Nothing more is to come of these. Forgotten ones go on to count in totals, so that bars never shrink."""

CODES: dict[TaskState, int] = {
    S.WAITING: 1, S.QUEUED: 2, S.NO_WORKER: 3, S.PROCESSING: 4, S.MEMORY: 5, S.ERRED: 6, S.RELEASED: 7, S.FORGOTTEN: 8,
}  # fmt: skip
"""How task rows hold a state."""

STATE_OF: dict[int, TaskState] = {code: state for state, code in CODES.items()}

ALIASES: dict[str, TaskState] = {
    **{state.value: state for state in TaskState},
    "no-worker": S.NO_WORKER,
    "done": S.MEMORY,
    "failed": S.ERRED,
    "running": S.PROCESSING,
}
"""What reporters may say: Dask's own words, and people's."""
