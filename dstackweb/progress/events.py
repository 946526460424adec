"""What reporters tell, as plain data: events of single tasks, and absolute counts of groups. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dstackweb.progress.states import TaskState

Where = Literal["events", "counts", "failures"]
"""A list of a batch."""


@dataclass(frozen=True, slots=True)
class Event:
    """One task entered a state. Per task the highest (seq, reporter) counts, but forgotten is for good."""

    key: str
    state: TaskState
    seq: int
    prefix: str
    group: str
    duration_s: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Count:
    """How many tasks of a group a reporter has in each state now, and what all its finished ones have taken so far."""

    prefix: str
    group: str
    seq: int
    states: Mapping[TaskState, int]
    duration_n: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A task that failed, told beside counts, which have no keys."""

    key: str
    prefix: str
    group: str
    seq: int
    message: str


@dataclass(frozen=True, slots=True)
class Batch:
    """What one reporter told in one request. `ended_seq`: all that it told up to here is over."""

    reporter: str
    events: tuple[Event, ...] = ()
    counts: tuple[Count, ...] = ()
    failures: tuple[Failure, ...] = ()
    ended_seq: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An entry that was not taken: its place in its list of the batch, its key (or prefix), and why (a code)."""

    index: int
    key: str
    reason: str
    list: Where = "events"


@dataclass(slots=True)
class Receipt:
    """What became of a batch: `outdated` entries were known already, or something newer was."""

    applied: int = 0
    outdated: int = 0
    refused: list[Refusal] = field(default_factory=list)
