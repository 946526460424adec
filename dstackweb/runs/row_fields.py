"""One definition of a row for each list of runs, which pages, the API and the command line show; `rows` reads them.

A field is an attribute of the run, unless COLUMNS or the reader say otherwise; `Hidden` ones are for pages alone.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from pydantic import Field
from pydantic.fields import FieldInfo

from dstackweb.runs.codes import StartBasis
from dstackweb.runs.service_codes import ServiceState

T = TypeVar("T")
Hidden = Annotated[T, Field(exclude=True)]


@dataclass(slots=True)
class Row:
    """The base of all rows."""

    @classmethod
    @functools.cache
    def fields(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    @functools.cache
    def columns(cls) -> tuple[str, ...]:
        """The fields that are read from the database as they are."""
        return tuple(name for name in cls.fields() if name not in COMPUTED)

    @classmethod
    @functools.cache
    def sent_fields(cls) -> tuple[str, ...]:
        """The fields that the API sends, in their order."""
        hints = get_type_hints(cls, include_extras=True)
        fields = {name: [one for one in get_args(hint) if isinstance(one, FieldInfo)] for name, hint in hints.items()}
        hidden = {name for name, found in fields.items() if any(one.exclude is True for one in found)}
        return tuple(name for name in cls.fields() if name not in hidden)

    def values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.fields()}


@dataclass(slots=True)
class Starts:
    """When a waiting run starts: as likely before `p50` as after, nine times in ten by `p90`; null where unknown.

    `basis` is what that rests on, or why it is unknown, and `detail` says it in words.
    """

    p50: dt.datetime | None
    p90: dt.datetime | None
    basis: StartBasis
    detail: str = ""


@dataclass(slots=True)
class QueueRow(Row):
    """A waiting run in its queue."""

    name: str
    id: str
    position: int
    priority: int
    penalty_s: Annotated[int, Field(description="Seconds that it ranks behind by its member's fair share")]
    user: str
    submitted_at: dt.datetime
    moved_by: str | None
    moved_at: dt.datetime | None
    reason: str
    starts: Starts
    reason_data: Hidden[dict[str, Any]]
    """Shared by all runs of the shape."""
    start_data: Hidden[dict[str, Any]]
    """Of the basis (`runs.codes.StartData`); worded as `detail` (`wording.starts`)."""
    shape: Hidden[str]


@dataclass(slots=True)
class QueuePageRow(QueueRow):
    """With what only the page needs: permissions, requirements, waiting time."""

    pk: int
    user_id: int
    queue_id: int
    seniority_us: int
    queued_at: dt.datetime
    spec: dict[str, Any]


@dataclass(slots=True)
class QueueExportRow(QueueRow):
    """With its place in the order, from which the next rows are read."""

    rank: Hidden[int]
    pk: Hidden[int]


@dataclass(slots=True)
class RunRow(Row):
    """A run as lists show it."""

    id: str
    name: str
    status: str
    status_message: Annotated[str, Field(description="Its message, or why it ended unless it is done")]
    termination_reason: str
    priority: int
    queue: str
    user: str
    attempt: int
    exit_code: int | None
    submitted_at: dt.datetime
    started_at: Annotated[dt.datetime | None, Field(description="Of its newest attempt; null while that waits")]
    ended_at: dt.datetime | None
    held_until: Annotated[dt.datetime | None, Field(description="When a hold that has begun gives back what it keeps")]
    next_at: Annotated[
        dt.datetime | None,
        Field(description="When a pending run enters its queue; of an ended run with a schedule, when it recurs"),
    ]
    where: Annotated[
        str | None, Field(description="The host or cloud instance that it is on; null unless it is placed")
    ]
    starts: Annotated[Starts | None, Field(description="When it starts; null unless it waits")]
    health: Annotated[
        ServiceState | None, Field(description="Result of its health checks; null unless it is a running service")
    ]
    pk: Hidden[int]
    start_data: Hidden[dict[str, Any]]
    status_detail: Hidden[dict[str, Any]]
    """Code and data of the server's own message; worded in front of `status_message` (`wording.statuses`)."""


@dataclass(slots=True)
class RunPageRow(RunRow):
    """With what only the page needs."""

    spec: dict[str, Any]


COLUMNS = {
    "id": "uid",
    "pk": "id",
    "user": "user.username",
    "moved_by": "moved_by.username",
    "queue": "queue.name",
    "next_at": "retry_at",
}
"""The run's attribute of a field, if its name differs."""
TABLES = {"user": "accounts_user", "moved_by": "accounts_user", "queue": "runs_queue"}
COMPUTED = {"position", "reason", "reason_data", "held_until", "where", "starts", "start_data", "health"}


def sent(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What the API sends of rows."""
    if not rows:
        return []
    names = rows[0].sent_fields()
    values = attrgetter(*names)
    return [dict(zip(names, values(row), strict=True)) for row in rows]
