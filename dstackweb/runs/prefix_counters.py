"""A project's runs by the prefix of their names: the counters of its progress page, shifted where statuses are written.

Each run is a task of its project's scope, in the group of its own name.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from dstackweb.lib.times import to_ms
from dstackweb.progress import counters
from dstackweb.progress.counters import Delta
from dstackweb.progress.keys import split
from dstackweb.progress.states import TaskState
from dstackweb.runs.models import Run
from dstackweb.runs.states import RunStatus

STATE: dict[RunStatus, TaskState] = {
    RunStatus.PENDING: TaskState.WAITING,
    RunStatus.SUBMITTED: TaskState.QUEUED,
    RunStatus.PROVISIONING: TaskState.PROCESSING,
    RunStatus.RUNNING: TaskState.PROCESSING,
    RunStatus.TERMINATING: TaskState.PROCESSING,
    RunStatus.DONE: TaskState.MEMORY,
    RunStatus.FAILED: TaskState.ERRED,
    RunStatus.TERMINATED: TaskState.RELEASED,
}
"""What a run is as a task."""

TIMED = (RunStatus.DONE, RunStatus.FAILED)
"""How long a run took counts where it came to its own end."""


def prefix_and_group(name: str) -> tuple[str, str]:
    return split(name).prefix, name


def took_s(started: dt.datetime | None, ended: dt.datetime | None) -> float | None:
    """How long a run took, from its first start, in seconds; None where it never started."""
    return None if started is None or ended is None else max(0.0, (ended - started).total_seconds())


def count_new(runs: Sequence[Run]) -> None:
    """Count runs that were just created. Call in the transaction that created them, behind the queue counters."""
    if runs:
        _shift(runs, lambda run: _delta(None, RunStatus(run.status)), max(run.submitted_at for run in runs))


def count_moved(runs: Sequence[Run], new: RunStatus, now: dt.datetime) -> None:
    """Count a move of `runs`, which still hold the status that they leave. Call likewise."""

    def delta(run: Run) -> Delta:
        found = _delta(RunStatus(run.status), new)
        seconds = took_s(run.started_at, now) if new in TIMED else None
        if seconds is not None:
            found.duration_n, found.duration_s = 1, seconds
        return found

    # Starting and stopping are running, as tasks go: nothing to write.
    _shift([run for run in runs if STATE[RunStatus(run.status)] != STATE[new]], delta, now)


def count_removed(runs: Sequence[Run], now: dt.datetime) -> None:
    """Take ended runs that are being removed out of the counters. Call likewise."""

    def delta(run: Run) -> Delta:
        status = RunStatus(run.status)
        found = Delta({STATE[status]: -1})
        seconds = took_s(run.started_at, run.ended_at) if status in TIMED else None
        if seconds is not None:
            found.duration_n, found.duration_s = -1, -seconds
        return found

    _shift(runs, delta, now)


def _delta(old: RunStatus | None, new: RunStatus) -> Delta:
    delta = Delta()
    delta.move(STATE[old] if old else None, STATE[new])
    return delta


def _shift(runs: Iterable[Run], delta_of: Callable[[Run], Delta], now: dt.datetime) -> None:
    """Each project's scope once, in the order in which everybody takes them."""
    of_project: defaultdict[int, defaultdict[tuple[str, str], Delta]] = defaultdict(lambda: defaultdict(Delta))
    for run in runs:
        of_project[run.project_id][prefix_and_group(run.name)].add(delta_of(run))
    for project_id, deltas in sorted(of_project.items()):
        counters.shift(counters.lock_project_scope(project_id), deltas, to_ms(now))
