"""Which runs of a sweep are created next, so that a queue never has more than a few of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dstackweb.spec.array import Array

WAITING_AT_ONCE = 100
"""Runs of a sweep that wait at once. A pass that places all of them is followed by another at once."""


@dataclass(frozen=True)
class Progress:
    """How far a sweep is. `next_index` is the first that was never created, `waiting` and `placed` are its runs now."""

    size: int
    next_index: int
    waiting: int = 0
    placed: int = 0
    max_parallel: int | None = None
    is_stopped: bool = False
    retries: bool = False
    """Whether failed ones may be left that are to be created once more."""
    is_pending: bool = False
    """Whether it waits for others before its first run is created."""

    @property
    def is_complete(self) -> bool:
        """Whether no run is left to be created."""
        return not self.retries and (self.is_stopped or self.next_index >= self.size)

    @property
    def is_over(self) -> bool:
        """Whether all its runs have ended."""
        return self.is_complete and not self.waiting and not self.placed

    @property
    def room(self) -> int:
        """How many runs may be created now."""
        if self.is_pending:
            return 0
        room = WAITING_AT_ONCE - self.waiting
        if self.max_parallel is not None:
            room = min(room, self.max_parallel - self.waiting - self.placed)
        return max(0, room)


def first_runs(array: Array) -> int:
    """How many runs of a sweep are created with it."""
    progress = Progress(array.size, 0, max_parallel=array.max_parallel)
    return len(next_indices(progress, []))


def next_indices(progress: Progress, failed: Sequence[int]) -> list[int]:
    """The indices to create now: those of `failed` ones that are retried, then those that never were created."""
    room = progress.room
    again = list(failed[:room])
    if progress.is_stopped:
        return again
    end = min(progress.size, progress.next_index + room - len(again))
    return again + list(range(progress.next_index, end))


def until_taken(indices: Sequence[int], taken: frozenset[int]) -> tuple[list[int], int | None]:
    """The indices before the first whose name another run has now, and that one: a sweep's order has no gaps."""
    for number, index in enumerate(indices):
        if index in taken:
            return list(indices[:number]), index
    return list(indices), None
