"""A queue as it was at a moment."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from ninja import P, Path, QueryEx, Router
from pydantic import Field

from dstackweb.api.app import project_of, ready, refusals
from dstackweb.api.history import zone_called
from dstackweb.api.queue_schemas import QueueSettings
from dstackweb.runs import selectors, services
from dstackweb.runs.queue import past
from dstackweb.runs.queue.past import PastPlacedRow, PastQueueRow
from dstackweb.runs.row_fields import sent
from dstackweb.wording.tables import past_items

router = Router(tags=["queues"])


@dataclass(slots=True, kw_only=True)
class PastQueueItem(PastQueueRow):
    """A run that waited, and why; name, id, user and reason are null if it has been deleted since."""

    reason_detail: str
    then_detail: str


class PastQueueOut(QueueSettings):
    """`items` are a page of the `waiting` runs, `placed` the newest of the `placed_total` placed ones.

    Its settings are those of the moment; of fair share only those of new runs.
    """

    at: dt.datetime
    waiting: int
    deleted: int = Field(description="Of those that waited, how many have been deleted since")
    items: list[PastQueueItem]
    next: str | None
    placed: list[PastPlacedRow]
    placed_total: int


Moment = QueryEx[
    str,
    P(description=f"ISO 8601, at most {past.KEPT.days} days ago; now if empty", examples=["2026-11-26T14:00:00+01:00"]),
]


@router.get("/{name}/at", response={200: PastQueueOut, **refusals(404, 422)}, summary="A queue as it was")
def queue_at(
    request: HttpRequest,
    project: Path[str],
    name: str,
    t: Moment = "",
    tz: QueryEx[str, P(description="The IANA name of the zone of a moment without one")] = "UTC",
    run: QueryEx[str, P(description="Only this run, by name or id; no item if it did not wait here")] = "",
    limit: QueryEx[int, P(ge=1, le=1000)] = 50,
    cursor: QueryEx[int, P(ge=0, le=10**9)] = 0,
) -> HttpResponse:
    """Runs that waited at a moment, in their order then, with their reasons and what came next; and those placed.

    A reason is the one of that moment. Its numbers may be up to five minutes newer. Pending runs are not in the order.
    """
    found, _role = project_of(request, project)
    queue = services.find_queue(found, name)
    now = timezone.now()
    at = past.parse_moment(t, zone_called(tz), now) if t else now
    one = selectors.find_run(found, run) if run else None
    then = past.queue_at(queue, at, limit, cursor, one, alone=one is not None)
    more = one is None and cursor + limit < then.waiting
    answer: dict[str, Any] = {
        **then.settings,
        "name": queue.name,
        "at": then.at,
        "waiting": then.waiting,
        "deleted": then.deleted,
        "items": past_items(then.rows),
        "next": str(cursor + limit) if more else None,
        "placed": sent(then.placed),
        "placed_total": then.placed_total,
    }
    return ready(request, answer)
