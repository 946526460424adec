"""How single tasks ended that are released or forgotten: done, failed or neither, by their newest other report.

Which report is the newest does not depend on the order in which they arrive. Only rows of tasks that were reported as
released or forgotten store it (`before`); of all other tasks it is the newest report itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from dstackweb.progress.reports import Event
from dstackweb.progress.states import AS_REPORTED, DROPPED, STATE_OF, TaskState

HOW: dict[TaskState, int] = {TaskState.MEMORY: 1, TaskState.ERRED: 2}
"""How a task had ended; 0 for all other states."""
_DROPPED_AS = {
    (TaskState.RELEASED, 1): TaskState.RELEASED_DONE, (TaskState.RELEASED, 2): TaskState.RELEASED_FAILED,
    (TaskState.FORGOTTEN, 1): TaskState.FORGOTTEN_DONE, (TaskState.FORGOTTEN, 2): TaskState.FORGOTTEN_FAILED,
}  # fmt: skip
_BITS = 2


class StoredTask(NamedTuple):
    """The row of a task that was reported before."""

    id: int
    key: str
    state: int
    seq: int
    since_ms: int
    group_id: int | None
    reporter_id: int
    before: int | None
    before_by: int | None


class Before(NamedTuple):
    """A task's newest report other than released and forgotten, by (seq, reporter's name).

    `how`: as in HOW; `by`: the reporter's id.
    """

    seq: int
    reporter: str
    how: int
    by: int

    @property
    def stored(self) -> tuple[int, int]:
        """The columns `before` and `before_by`."""
        return (self.seq << _BITS) + self.how, self.by

    def dropped(self, state: TaskState) -> TaskState:
        """RELEASED or FORGOTTEN, by how the task had ended."""
        return _DROPPED_AS.get((state, self.how), state)


NEVER = Before(-1, "", 0, 0)
"""No other report is known."""


class Endings:
    """How those tasks of a batch had ended that it releases or forgets, or that are released or forgotten already.

    `known`: rows of its tasks, by key; `names`: of reporters, by id.
    """

    def __init__(
        self, events: Sequence[Event], reporter: int, known: Mapping[str, StoredTask], names: Mapping[int, str]
    ) -> None:
        self._known, self._names = known, names
        self._stored = {key for key, row in known.items() if row.before is not None}
        keys = self._stored | {event.key for event in events if event.state in DROPPED}
        self._reported: dict[str, Before] = {}
        for event in events if keys else ():
            if event.key in keys and event.state not in DROPPED:
                earlier = self._reported.get(event.key)
                if earlier is None or event.seq >= earlier.seq:
                    how = HOW.get(event.state, 0)
                    self._reported[event.key] = Before(event.seq, names[reporter], how, reporter)

    def of(self, key: str) -> Before:
        """By the batch and the task's row."""
        before, row = self._reported.get(key, NEVER), self._known.get(key)
        return before if row is None else max(before, self._of_row(row))

    def late(self, moved: Collection[str]) -> Iterator[tuple[StoredTask, Before]]:
        """Tasks, other than the `moved` ones, of which the batch says more than their rows, and what that is."""
        for key in sorted(self._stored.intersection(self._reported).difference(moved)):
            row, before = self._known[key], self._reported[key]
            if before > self._of_row(row):
                yield row, before

    def _of_row(self, row: StoredTask) -> Before:
        if row.before is None:
            return Before(row.seq, self._names[row.reporter_id], HOW.get(STATE_OF[row.state], 0), row.reporter_id)
        by = row.before_by or 0
        return Before(row.before >> _BITS, self._names.get(by, ""), row.before & (1 << _BITS) - 1, by)


def as_reported(state: int) -> TaskState:
    """The state that was reported, without how the task had ended."""
    found = STATE_OF[state]
    return AS_REPORTED.get(found, found)
