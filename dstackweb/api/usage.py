"""Usage per member, queue or project, and tables as files."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

from django.http import HttpRequest, StreamingHttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from ninja import Field, P, Path, QueryEx, Router, Schema

from dstackweb.accounts.models import Project
from dstackweb.api.app import FILE, REFUSALS, Format, Since, Until, admin, project_of
from dstackweb.api.history import Days, Zone, view as history_range
from dstackweb.api.run_schemas import RunStatusName
from dstackweb.lib import exports
from dstackweb.lib.errors import Invalid
from dstackweb.runs import services, usage_report
from dstackweb.runs.usage_report import MOST_DAYS, By, Period
from dstackweb.wording import tables

router = Router(tags=["usage"])
deployment_router = Router(tags=["usage"])
export_router = Router(tags=["exports"])
UsageDays = QueryEx[int, P(ge=1, le=MOST_DAYS, description="Number of days (UTC), including today")]
Month = QueryEx[str, P(description="A month instead, such as `2026-11`", pattern=r"^(\d{4}-\d\d)?$")]
Groups = QueryEx[By, P(description="What usage is added up by")]


class UsedOut(Schema):
    """Hours and USD. `idle_share` is the idle part of the measured GPU time; null where no sample measured any.

    GPU and CPU time counts from a job's placement to its end. A GPU is idle below 5 % utilization. GPU time that is not
    measured is neither idle nor used, but unknown.
    """

    gpu_hours: float
    measured_gpu_hours: float
    idle_gpu_hours: float
    idle_share: float | None
    cpu_hours: float
    usd: float
    done: Annotated[int, Field(description="Runs that ended in this status")]
    failed: int
    terminated: int


class UsageLineOut(UsedOut):
    name: str
    gpu_hours_by_day: list[float]


class UsageOut(Schema):
    """Usage from `first` to `last`, both included; days are UTC's. The most GPU-hours come first."""

    first: dt.date
    last: dt.date
    by: By
    items: list[UsageLineOut]
    total: UsedOut


@router.get("", response={200: UsageOut, **REFUSALS}, summary="Usage of a project")
def of_project(
    request: HttpRequest, project: Path[str], days: UsageDays = 30, month: Month = "", by: Groups = By.MEMBER
) -> dict[str, Any]:
    """GPU time, idle time, cost and ended runs, by member or queue. What runs now is included up to this moment."""
    found, _role = project_of(request, project)
    return _report(found, days, month, by)


@deployment_router.get("", response={200: UsageOut, **REFUSALS}, summary="Usage of all projects")
def of_deployment(
    request: HttpRequest, days: UsageDays = 30, month: Month = "", by: Groups = By.PROJECT
) -> dict[str, Any]:
    """For deployment admins."""
    admin(request, _("the usage of all projects"))
    return _report(None, days, month, by)


@deployment_router.get(
    "/export", response={200: None, **REFUSALS}, summary="Usage of all projects as a file", openapi_extra=FILE
)
def export_deployment(
    request: HttpRequest, days: UsageDays = 30, month: Month = "", by: Groups = By.PROJECT, form: Format = "json"
) -> StreamingHttpResponse:
    """For deployment admins: a row per month, project and member or queue."""
    admin(request, _("the usage of all projects"))
    return _usage_file(None, days, month, by, form)


@export_router.get("/usage", response={200: None, **REFUSALS}, summary="Usage as a file", openapi_extra=FILE)
def export_usage(
    request: HttpRequest, project: Path[str], days: UsageDays = 30, month: Month = "", by: Groups = By.MEMBER,
    form: Format = "json",
) -> StreamingHttpResponse:  # fmt: skip
    """A row per month and member or queue."""
    found, _role = project_of(request, project)
    return _usage_file(found, days, month, by, form)


@export_router.get("/runs", response={200: None, **REFUSALS}, summary="Runs as a file", openapi_extra=FILE)
def export_runs(
    request: HttpRequest,
    project: Path[str],
    status: QueryEx[list[RunStatusName] | None, P(description="Repeatable")] = None,
    user: str = "",
    q: str = "",
    queue: str = "",
    since: Since = None,
    until: Until = None,
    form: Format = "json",
) -> StreamingHttpResponse:
    """All runs of a filter, newest first, with the GPU-hours, CPU-hours and USD of each so far."""
    found, _role = project_of(request, project)
    runs = tables.run_table(
        found,
        timezone.now(),
        statuses=status or (),
        user=user,
        text=q,
        queue=queue,
        since=since,
        until=until,
    )
    return exports.response(f"runs-{found.name}", form, tables.RUN_COLUMNS, runs)


@export_router.get("/queues/{name}", response={200: None, **REFUSALS}, summary="A queue as a file", openapi_extra=FILE)
def export_queue(request: HttpRequest, project: Path[str], name: str, form: Format = "json") -> StreamingHttpResponse:
    """All waiting runs in order, with their reasons."""
    found, _role = project_of(request, project)
    queue = services.find_queue(found, name)
    return exports.response(f"queue-{queue.name}", form, tables.QUEUE_COLUMNS, tables.queue_table(queue))


@export_router.get("/history", response={200: None, **REFUSALS}, summary="Waits as a file", openapi_extra=FILE)
def export_history(
    request: HttpRequest, project: Path[str], queue: str = "", days: Days = 7, tz: Zone = "UTC", form: Format = "json"
) -> StreamingHttpResponse:
    """Waits and queue lengths per queue, priority band and hour (up to a week) or day."""
    found, _role = project_of(request, project)
    one = services.find_queue(found, queue) if queue else None
    rows = tables.history_table(found, history_range(days, None, tz), one)
    return exports.response(f"history-{queue or found.name}", form, tables.HISTORY_COLUMNS, rows)


def _period(days: int, month: str) -> Period:
    try:
        return Period.of_month(month) if month else Period.up_to(timezone.now(), days)
    except ValueError:
        raise Invalid.at("month", msg=_("%(month)s is not a month such as 2026-11") % {"month": repr(month)}) from None


def _by(project: Project | None, by: By) -> By:
    if project is not None and by == By.PROJECT:
        raise Invalid.at("by", msg=_("a project's usage is added up by `member` or `queue`"))
    return by


def _report(project: Project | None, days: int, month: str, by: By) -> dict[str, Any]:
    found = usage_report.report(project, _period(days, month), _by(project, by), timezone.now())
    return {
        "first": found.period.first,
        "last": found.period.last,
        "by": found.by,
        "items": [
            {"name": line.name, "gpu_hours_by_day": line.gpu_hours} | line.used._asdict() for line in found.lines
        ],
        "total": found.total._asdict(),
    }


def _usage_file(project: Project | None, days: int, month: str, by: By, form: str) -> StreamingHttpResponse:
    period, by = _period(days, month), _by(project, by)
    rows = usage_report.rows(project, period, by, timezone.now())
    return exports.response("usage", form, usage_report.columns(by), rows)
