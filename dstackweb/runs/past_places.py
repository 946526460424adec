"""Notes the places that waiting runs had in their queues, from which `queue.past` computes how a queue was.

Each change of a place is one statement, which copies it from the run's row: so it is what other transactions saw.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection

from django.db.models import CharField, DateTimeField, QuerySet, Value

from dstackweb.lib.sql import insert_from
from dstackweb.runs.codes import PlaceEnd
from dstackweb.runs.models import PastPlace, Run

CHUNK = 5000
COLUMNS = (
    *("queue_id", "run_id", "since", "queued_at", "seniority_us", "priority", "penalty_s"),
    *("until", "ended_by"),
)
_OF_RUN = ("queue_id", "pk", "place_since", "queued_at", "seniority_us", "priority", "penalty_s")


def close(run_ids: Collection[int], now: dt.datetime, ended_by: PlaceEnd) -> None:
    """Note that the places of these runs, which wait or have just left, end now.

    Call in the transaction that ends them: before it changes anything but the status, and after it has locked the runs.
    """
    keys = sorted(run_ids)
    for start in range(0, len(keys), CHUNK):
        close_all(Run.objects.filter(pk__in=keys[start : start + CHUNK]), now, ended_by)


def close_all(runs: QuerySet[Run], now: dt.datetime, ended_by: PlaceEnd) -> None:
    """`close` for the runs of a query."""
    end = Value(now, DateTimeField()), Value(ended_by.value, CharField())
    insert_from(PastPlace, COLUMNS, runs.order_by().values_list(*_OF_RUN, *end))
