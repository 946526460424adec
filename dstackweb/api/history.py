"""How long runs waited, and how many were waiting."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Literal

from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext as _
from ninja import Field, P, Path, QueryEx, Router, Schema

from dstackweb.api.app import project_of, refusals
from dstackweb.lib.errors import Invalid
from dstackweb.runs import history, services, start_estimates, wait_stats
from dstackweb.runs.history import KEPT_DAYS, History, HistoryRange, parse_zone
from dstackweb.runs.start_estimates import Calibration

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
    starts: int
    by_p50: float | None
    by_p90: float | None
    factor_p50: float
    factor_p90: float


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
) -> ProjectHistoryOut:
    """Wait times and lengths of all queues together, and the totals of each."""
    found, _role = project_of(request, project)
    past, each = history.overview(found, view(days, step, tz))
    queues = [QueueTotal(queue=queue.name, total=_total(of_queue)) for queue, of_queue in each]
    expected = [_calibration(one) for one in start_estimates.calibration()[:-1]]
    return ProjectHistoryOut(queues=queues, expected_starts=expected, **_values(past))


def _calibration(one: Calibration) -> CalibrationOut:
    factor_p50, factor_p90 = one.factors
    return CalibrationOut(
        ahead_s=one.ahead_s,
        starts=one.p50.starts,
        by_p50=one.p50.share,
        by_p90=one.p90.share,
        factor_p50=factor_p50,
        factor_p90=factor_p90,
    )


def zone_called(name: str) -> dt.tzinfo:
    """The time zone `tz`. Raises Invalid."""
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
