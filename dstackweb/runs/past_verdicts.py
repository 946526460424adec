"""Notes why runs waited, as passes replace or end their verdicts.

The reason is noted whenever it changes. Its numbers may change with each pass: those are noted at most every
LOGGED_EVERY, so that a busy queue doesn't fill the database.
"""

from __future__ import annotations

import datetime as dt
from typing import Any, NamedTuple

from django.db.models import DateTimeField, QuerySet, Value

from dstackweb.lib.sql import insert_from
from dstackweb.runs.models import PastVerdict, Verdict

LOGGED_EVERY = dt.timedelta(minutes=5)


class StoredWait(NamedTuple):
    """A verdict as its row has it; from `logged_at` on its time is not noted yet."""

    reason: str
    data: dict[str, Any]
    logged_at: dt.datetime


def logged_from(before: StoredWait | None, reason: str | None, now: dt.datetime) -> dt.datetime:
    """The `logged_at` of what replaces `before` now (None: nothing does): its own, while nothing is noted yet. Pure."""
    if before is None or reason != before.reason or now - before.logged_at >= LOGGED_EVERY:
        return now
    return before.logged_at


def past(queue_id: int, shape: str, before: StoredWait, now: dt.datetime) -> PastVerdict:
    """The row of a verdict that ends now."""
    return PastVerdict(
        queue_id=queue_id, shape=shape, since=before.logged_at, until=now, reason=before.reason, data=before.data
    )


def close_all(verdicts: QuerySet[Verdict], now: dt.datetime) -> None:
    """Note these verdicts, which are about to be deleted."""
    columns = ("queue_id", "shape", "since", "reason", "data", "until")
    values = ("queue_id", "shape", "logged_at", "reason", "data", Value(now, DateTimeField()))
    insert_from(PastVerdict, columns, verdicts.order_by().values_list(*values))
