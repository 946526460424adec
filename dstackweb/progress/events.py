"""Reports as plain data: events of single tasks, and absolute counts of groups. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dstackweb.progress.states import TaskState

EntryList = Literal["events", "counts", "failures"]
"""Name of a list of a batch."""


@dataclass(frozen=True, slots=True)
class Event:
    """One task entered a state. Per task the event with the highest (seq, reporter) counts; forgotten is final."""

    key: str
    state: TaskState
    seq: int
    prefix: str
    group: str
    duration_s: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Count:
    """Number of a group's tasks in each state now, by one reporter; number of timed tasks and their total seconds."""

    prefix: str
    group: str
    seq: int
    states: Mapping[TaskState, int]
    duration_n: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed task, reported in addition to counts, which have no keys."""

    key: str
    prefix: str
    group: str
    seq: int
    message: str


@dataclass(frozen=True, slots=True)
class Batch:
    """The reports of one request. `ended_seq`: the reporter has ended; its live tasks up to here are released."""

    reporter: str
    events: tuple[Event, ...] = ()
    counts: tuple[Count, ...] = ()
    failures: tuple[Failure, ...] = ()
    ended_seq: int | None = None


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rejected entry: its list and index there, its key (of counts the prefix), the reason's code, and a sentence."""

    list: EntryList
    index: int
    key: str
    reason: str
    detail: str = ""


@dataclass(slots=True)
class Receipt:
    """Result of a batch. `outdated`: number of entries that were known already or older than known ones."""

    applied: int = 0
    outdated: int = 0
    rejected: list[Rejection] = field(default_factory=list)
