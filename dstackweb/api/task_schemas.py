"""The documented form of what is told of tasks (progress/parse.py understands it), and of the answer."""

from __future__ import annotations

from typing import Any

from ninja import Field, Schema

from dstackweb.progress.events import Receipt, Refusal, Where
from dstackweb.progress.models import KEY_MAX, NAME_MAX
from dstackweb.progress.parse import COUNT_MAX, ENTRIES_MAX, REPORTER_MAX, SECONDS_MAX, SEQ_MAX, Refused, Told
from dstackweb.progress.states import ALIASES

_SEQ = {"type": "integer", "minimum": 0, "maximum": SEQ_MAX, "description": "Rises per reporter; else the body's"}
_KEY = {"type": "string", "minLength": 1, "maxLength": KEY_MAX}
_PREFIX = {"type": "string", "maxLength": NAME_MAX, "description": "Else by the key"}
_GROUP = {"type": "string", "maxLength": NAME_MAX, "description": "Else the prefix if that is told, else by the key"}
_SECONDS = {"type": "number", "minimum": 0, "maximum": SECONDS_MAX}
_NUMBER = {"type": "integer", "minimum": 0, "maximum": COUNT_MAX}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


_EVENT = _object(
    ["key", "state"],
    key=_KEY,
    state={"enum": list(ALIASES)},
    seq=_SEQ,
    prefix=_PREFIX,
    group=_GROUP,
    duration_s=_SECONDS,
    message={"type": "string", "description": "Why it failed"},
)
_COUNT = _object(
    ["prefix", "states"],
    prefix=_PREFIX | {"minLength": 1},
    group=_GROUP,
    seq=_SEQ,
    states={"type": "object", "propertyNames": {"enum": list(ALIASES)}, "additionalProperties": _NUMBER},
    duration_n=_NUMBER | {"description": "How many of the finished ones were timed, so far"},
    duration_s=_SECONDS | {"description": "What these have taken, so far"},
)
_FAILURE = _object(["key"], key=_KEY, prefix=_PREFIX, group=_GROUP, seq=_SEQ, message={"type": "string"})


def _entries(item: dict[str, Any], told: str) -> dict[str, Any]:
    return {"type": "array", "items": item, "description": f"{told}; of all entries at most {ENTRIES_MAX}"}


BODY = _object(
    [],
    reporter={"type": "string", "minLength": 1, "maxLength": REPORTER_MAX},
    seq=_SEQ | {"description": "Of all entries that have none; without it the server's time in microseconds"},
    events=_entries(_EVENT, "Tasks that have entered a state"),
    counts=_entries(_COUNT, "How many tasks of a group are in each state now, by this reporter"),
    failures=_entries(_FAILURE, "Tasks that failed, beside counts"),
    ended={
        "type": "boolean",
        "description": "It tells no more: its unfinished tasks are released",
    },
    attempt={"type": "integer", "minimum": 1, "description": "409 unless it is the present one"},
)
REQUEST_BODY = {"required": True, "content": {"application/json": {"schema": BODY}}}

REASONS = {
    "forgotten": "this task is forgotten for good",
    "too_many_tasks": "the run has as many tasks of their own as are kept; tell counts instead",
    "too_many_groups": "the run has as many groups as are kept",
    "too_many_prefixes": "the run has as many prefixes as are kept",
}


class RefusedOut(Schema):
    """An entry that was not taken. All others were."""

    list: Where = Field(description="Where it stands in the request")
    index: int
    key: str = Field(description="The task's key; of counts the prefix")
    reason: str
    detail: str


class TasksOut(Schema):
    """What became of a request."""

    applied: int
    outdated: int = Field(description="Known already, or something newer is")
    refused: list[RefusedOut]

    @classmethod
    def of(cls, told: Told, receipt: Receipt) -> TasksOut:
        """Both what could not be read and what could not be counted."""
        refused = [*map(_unread, told.refused), *(_uncounted(told, refusal) for refusal in receipt.refused)]
        return cls(applied=receipt.applied, outdated=receipt.outdated, refused=refused)


def _unread(refused: Refused) -> RefusedOut:
    return RefusedOut(
        list=refused.list, index=refused.index, key=refused.key, reason=refused.reason, detail=refused.detail
    )


def _uncounted(told: Told, refusal: Refusal) -> RefusedOut:
    return RefusedOut(
        list=refusal.list,
        index=told.places[refusal.list][refusal.index],
        key=refusal.key,
        reason=refusal.reason,
        detail=REASONS[refusal.reason],
    )
