"""A project's runs by the prefix of their names: the counters of its progress page, where each run is a task."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict

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


class PrefixDeltas:
    """What a transaction changes of the counters of projects, until `write` writes it."""

    def __init__(self) -> None:
        self._of_project: defaultdict[int, defaultdict[tuple[str, str], Delta]]
        self._of_project = defaultdict(lambda: defaultdict(Delta))
        self._now_ms = 0

    def add_new(self, run: Run) -> None:
        self._add(run, _delta(None, RunStatus(run.status)), run.submitted_at)

    def add_move(self, run: Run, new: RunStatus, now: dt.datetime) -> None:
        """A move of a run, which still holds the status that it leaves."""
        if STATE[RunStatus(run.status)] == STATE[new]:
            return  # starting and stopping are running, as tasks go: nothing to write
        delta = _delta(RunStatus(run.status), new)
        seconds = took_s(run.started_at, now) if new in TIMED else None
        if seconds is not None:
            delta.duration_n, delta.duration_s = 1, seconds
        self._add(run, delta, now)

    def add_removed(self, run: Run, now: dt.datetime) -> None:
        status = RunStatus(run.status)
        delta = Delta({STATE[status]: -1})
        seconds = took_s(run.started_at, run.ended_at) if status in TIMED else None
        if seconds is not None:
            delta.duration_n, delta.duration_s = -1, -seconds
        self._add(run, delta, now)

    def write(self) -> None:
        """Each project's scope once, in the order in which everyone takes them."""
        for project_id, deltas in sorted(self._of_project.items()):
            counters.shift_project(project_id, deltas, self._now_ms)

    def _add(self, run: Run, delta: Delta, now: dt.datetime) -> None:
        self._of_project[run.project_id][prefix_and_group(run.name)].add(delta)
        self._now_ms = max(self._now_ms, to_ms(now))


def _delta(old: RunStatus | None, new: RunStatus) -> Delta:
    delta = Delta()
    delta.move(STATE[old] if old else None, STATE[new])
    return delta
