"""How long runs waited and how many were waiting, and a queue as it was at a moment."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from ninja import Field, P, Path, QueryEx, Router, Schema

from dstackweb.api.app import project_of, ready, refusals
from dstackweb.api.queue_schemas import QueueSettings
from dstackweb.lib.errors import Invalid
from dstackweb.runs import history, selectors, services, start_estimates, wait_stats
from dstackweb.runs.history import KEPT_DAYS, History, HistoryRange, parse_zone
from dstackweb.runs.queue import past
from dstackweb.runs.queue.past import PastPlacedRow, PastQueueRow
from dstackweb.runs.row_fields import sent
from dstackweb.wording.tables import past_items

router = Router(tags=["history"])
of_queues = Router(tags=["history"])
REFUSALS = refusals(404, 422)
HOURLY_DAYS = 31
"""The most days by hour."""

Days = QueryEx[int, P(ge=1, le=KEPT_DAYS, description="Number of days in the time zone, including today")]
Step = QueryEx[
    Literal["hour", "day"] | None,
    P(description=f"`hour` up to a week, else `day`; `hour` for at most {HOURLY_DAYS} days"),
]
Zone = QueryEx[str, P(description="The IANA name of the time zone", examples=["Europe/Berlin"])]


class SpanOut(Schema):
    """A span: waits in seconds, lengths in runs; null if unknown.

    The median and the 90th percentile are estimated from counts per range of waits (up to 1, 5 and 15 minutes, 1, 4
    and 12 hours, 1 day, longer): each is in the same range as the exact value.
    """

    placed: int
    wait_median_s: int | None
    wait_p90_s: int | None
    wait_max_s: int | None
    length: float | None
    length_max: int | None


class ColumnsOut(Schema):
    """The numbers of the spans: lists with one entry per time."""

    placed: list[int]
    wait_median_s: list[int | None]
    wait_p90_s: list[int | None]
    wait_max_s: list[int | None]
    length: list[float | None]
    length_max: list[int | None]


class BandOut(ColumnsOut):
    """One quarter of the priorities."""

    low: int
    high: int
    total: SpanOut


class HistoryOut(Schema):
    """Spans that start at `times`; the last one has not ended."""

    days: int
    step: Literal["hour", "day"]
    zone: str
    times: list[dt.datetime]
    bands: Annotated[list[BandOut], Field(description="From the lowest priorities to the highest")]
    all: ColumnsOut
    today: SpanOut
    total: SpanOut


class QueueTotal(Schema):
    queue: str
    total: SpanOut


class CalibrationOut(Schema):
    """Starts of the deployment beside what was expected so far ahead (up to `ahead_s` seconds; null: longer).

    `by_p50` and `by_p90` are the shares that had started by the two times shown: 0.5 and 0.9 would be right. Later
    times ahead are multiplied with the factors.
    """

    ahead_s: int | None
    starts: int = Field(validation_alias="p50.starts")
    by_p50: float | None = Field(validation_alias="p50.share")
    by_p90: float | None = Field(validation_alias="p90.share")
    factor_p50: float = Field(validation_alias="factors.0")
    factor_p90: float = Field(validation_alias="factors.1")


class QueueHistoryOut(HistoryOut):
    queue: str


class ProjectHistoryOut(HistoryOut):
    queues: list[QueueTotal]
    expected_starts: list[CalibrationOut]


@of_queues.get("/{name}/history", response={200: QueueHistoryOut, **REFUSALS}, summary="History of a queue")
def of_queue(
    request: HttpRequest, project: Path[str], name: str, days: Days = 7, step: Step = None, tz: Zone = "UTC"
) -> QueueHistoryOut:
    """Wait times and queue lengths by priority band."""
    found, _role = project_of(request, project)
    queue = services.find_queue(found, name)
    past = history.series(queue, view(days, step, tz))
    return QueueHistoryOut(queue=queue.name, **_values(past))


@router.get("", response={200: ProjectHistoryOut, **REFUSALS}, summary="History of all queues of a project")
def of_project(
    request: HttpRequest, project: Path[str], days: Days = 7, step: Step = None, tz: Zone = "UTC"
) -> dict[str, Any]:
    """Wait times and lengths of all queues together, and the totals of each."""
    found, _role = project_of(request, project)
    past, each = history.overview(found, view(days, step, tz))
    queues = [{"queue": queue.name, "total": _total(of_queue)} for queue, of_queue in each]
    return {"queues": queues, "expected_starts": start_estimates.calibration()[:-1], **_values(past)}


def zone_called(name: str) -> dt.tzinfo:
    try:
        return parse_zone(name)
    except ValueError as error:
        raise Invalid.at("tz", msg=str(error)) from None


def view(days: int, step: str | None, tz: str) -> HistoryRange:
    zone = zone_called(tz)
    if step == "hour" and days > HOURLY_DAYS:
        raise Invalid.at("step", msg=_("at most %(days)s days by hour") % {"days": HOURLY_DAYS})
    return HistoryRange(timezone.now(), days, hourly=step == "hour" if step else days <= 7, zone=zone)


def _values(past: History) -> dict[str, Any]:
    columns = past.columns()
    for band, numbers in enumerate(columns["bands"]):
        numbers["total"] = wait_stats.numbers(past.since(past.times[0], band))
    today = wait_stats.numbers(past.since(past.today))
    return {**columns, "all": wait_stats.columns(past.all), "today": today, "total": _total(past)}


def _total(past: History) -> SpanOut:
    return SpanOut(**wait_stats.numbers(past.since(past.times[0])))


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


@of_queues.get(
    "/{name}/at",
    response={200: PastQueueOut, **REFUSALS},
    summary="A queue as it was",
    tags=["queues"],
    operation_id="dstackweb_api_queue_past_queue_at",
)
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
