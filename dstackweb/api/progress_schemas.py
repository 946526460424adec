"""What the API tells of progress: bars, their groups, the tasks in them, and those that have failed."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

from ninja import Field, Schema

from dstackweb.progress.selectors import Bar, Failed, Overview, TaskRow
from dstackweb.progress.states import SHOWN, TaskState
from dstackweb.runs.models import Run


class StatesOut(Schema):
    """Tasks in each state. In people's words: done, failed, released, running, queued, no worker, waiting."""

    memory: int
    erred: int
    released: int
    processing: int
    queued: int
    no_worker: int
    waiting: int


class GroupOut(Schema):
    """Counters of one group."""

    name: str
    total: int = Field(description="All `states` and `forgotten`")
    states: StatesOut
    forgotten: int = Field(description="Finished, and dropped by who reported them; they go on to count in `total`")
    finished: int = Field(description="`memory`, `erred`, `released` and `forgotten`")
    mean_s: float | None = Field(description="What a task took on average; null where none was timed")
    recent_s: float | None = Field(description="What the latest took: each report weighs as much as all before it")
    changed_at: dt.datetime | None = Field(description="When any of this changed last")


class PrefixOut(GroupOut):
    """Counters of all tasks whose names begin alike, how fast they finish, and when the rest will have."""

    groups: int = Field(description="Those that have tasks which are not forgotten")
    rate_per_s: float | None = Field(description="Tasks that finish per second now; null when none has lately")
    rate_low: float | None
    rate_high: float | None
    left_s: float | None = Field(description="Seconds until all is finished at this rate; null when nobody can say")
    left_low_s: float | None
    left_high_s: float | None = Field(description="Null as well where the rate may be next to nothing")


class ProgressOut(Schema):
    """A page of prefixes, and what all of them come to."""

    run: str | None = Field(description="Null for a project, as the next three are")
    id: str | None
    status: str | None = Field(description="Of the run")
    attempt: int | None = Field(description="Which of the run's; null as well where nothing was told")
    ended: bool = Field(description="That attempt is over: nothing changes any more, or soon")
    version: int = Field(description="Rises with every change")
    count: int = Field(description="How many prefixes there are")
    total: PrefixOut = Field(description="Of all prefixes; its name is empty")
    prefixes: list[PrefixOut]
    next: str | None = Field(description="The `cursor` of the next page")


class GroupsOut(Schema):
    """A page of a prefix's groups."""

    items: list[GroupOut]
    next: str | None


class FailureOut(Schema):
    """A task that has failed."""

    key: str
    prefix: str
    group: str
    message: str
    at: dt.datetime


class FailuresOut(Schema):
    """A page of them, newest first."""

    items: list[FailureOut]
    next: str | None


class TaskOut(Schema):
    """A task that was reported by itself."""

    key: str
    state: TaskState
    since: dt.datetime


class TaskListOut(Schema):
    """A page of a group's tasks; none where they were told as counts."""

    items: list[TaskOut]
    next: str | None


def progress_of(run: Run | None, overview: Overview | None, bars: list[Bar], following: str | None) -> dict[str, Any]:
    """A ProgressOut; all nothing where nothing was told."""
    if overview is None:
        nothing = Bar(0, "", dict.fromkeys(TaskState, 0), 0, 0, 0, 0, None, None, None, 0, 0)
        overview = Overview(0, 0, 0, 0, nothing, ended=False)
    return {
        "run": run and run.name,
        "id": run and str(run.uid),
        "status": run and run.status,
        "attempt": overview.attempt or None,
        "ended": overview.ended,
        "version": overview.version,
        "count": overview.prefixes,
        "total": prefix_of(overview.bar),
        "prefixes": [prefix_of(bar) for bar in bars],
        "next": following,
    }


def prefix_of(bar: Bar) -> dict[str, Any]:
    """A PrefixOut."""
    rate, left = bar.rate, bar.left
    return {
        **group_of(bar),
        "groups": bar.groups,
        "rate_per_s": rate and rate.per_s,
        "rate_low": rate and rate.low,
        "rate_high": rate and rate.high,
        "left_s": left and left.seconds,
        "left_low_s": left and left.low,
        "left_high_s": left.high if left and left.high < math.inf else None,
    }


def group_of(bar: Bar) -> dict[str, Any]:
    """A GroupOut."""
    return {
        "name": bar.name,
        "total": bar.total,
        "states": {state.value: bar.counts[state] for state in SHOWN},
        "forgotten": bar.counts[TaskState.FORGOTTEN],
        "finished": bar.finished,
        "mean_s": bar.mean_s,
        "recent_s": bar.recent_s,
        "changed_at": moment(bar.changed_ms) if bar.changed_ms else None,
    }


def failure_of(failed: Failed) -> dict[str, Any]:
    """A FailureOut."""
    shown = failed._asdict()
    del shown["id"]
    return shown | {"at": moment(shown.pop("at_ms"))}


def task_of(task: TaskRow) -> dict[str, Any]:
    """A TaskOut."""
    return {"key": task.key, "state": task.state, "since": moment(task.since_ms)}


def moment(at_ms: int) -> dt.datetime:
    """Milliseconds since 1970 as a time."""
    return dt.datetime.fromtimestamp(at_ms / 1000, dt.UTC)
