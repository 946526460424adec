"""Notes the places that waiting runs had in their queues, and why they waited: `queue.past` computes how a queue was.

Each change of a place is one statement, which copies it from the run's row: so it is what other transactions saw. A
reason's numbers may change with each pass: they are noted every LOGGED_EVERY, so that a busy queue fills no database.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection
from typing import Any, NamedTuple

from django.db.models import CharField, DateTimeField, QuerySet, Value

from dstackweb.lib.sql import insert_from
from dstackweb.runs.codes import PlaceEnd
from dstackweb.runs.models import PastPlace, PastVerdict, Run, Verdict

CHUNK = 5000
LOGGED_EVERY = dt.timedelta(minutes=5)
COLUMNS = ("queue_id", "run_id", "since", "queued_at", "seniority_us", "priority", "penalty_s", "until", "ended_by")
_OF_RUN = ("queue_id", "pk", "place_since", "queued_at", "seniority_us", "priority", "penalty_s")


def close_places(run_ids: Collection[int], now: dt.datetime, ended_by: PlaceEnd) -> None:
    """Note that the places of these runs, which wait or have just left, end now.

    Call in the transaction that ends them: before it changes anything but the status, and after it has locked the runs.
    """
    keys = sorted(run_ids)
    for start in range(0, len(keys), CHUNK):
        close_places_of(Run.objects.filter(pk__in=keys[start : start + CHUNK]), now, ended_by)


def close_places_of(runs: QuerySet[Run], now: dt.datetime, ended_by: PlaceEnd) -> None:
    """`close_places` for the runs of a query."""
    end = Value(now, DateTimeField()), Value(ended_by.value, CharField())
    insert_from(PastPlace, COLUMNS, runs.order_by().values_list(*_OF_RUN, *end))


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


def past_verdict(queue_id: int, shape: str, before: StoredWait, now: dt.datetime) -> PastVerdict:
    return PastVerdict(
        queue_id=queue_id, shape=shape, since=before.logged_at, until=now, reason=before.reason, data=before.data
    )


def close_verdicts(verdicts: QuerySet[Verdict], now: dt.datetime) -> None:
    """Note these verdicts, which are about to be deleted."""
    columns = ("queue_id", "shape", "since", "reason", "data", "until")
    values = ("queue_id", "shape", "logged_at", "reason", "data", Value(now, DateTimeField()))
    insert_from(PastVerdict, columns, verdicts.order_by().values_list(*values))
