"""The usage page: GPU time, idle time and cost by member, queue or project."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.db.models import Min
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from dstackweb.accounts.models import Project
from dstackweb.lib import exports
from dstackweb.runs import usage_report
from dstackweb.runs.models import UsageDay
from dstackweb.runs.usage_report import DAYS, By, Period, Report, UsageLine
from dstackweb.web.common.pages import PageRequest, SortHeader, project_page

DEFAULT_DAYS = 30
COLOURS = (0, 4, 6, 2, 7, 1, 5, 3)
"""Of the chart, neighbours unlike each other: the most used lines have one each, all others the last."""
MONTHS_OFFERED = 24
SORTS = ("name", "gpu_hours", "idle_share", "cpu_hours", "usd", "runs")


@dataclass(frozen=True)
class UsageFilters:
    """What the address selects. `project` is None for the whole deployment, which only its admins see."""

    project: Project | None
    period: Period
    by: By
    sort: str

    @classmethod
    def of(cls, request: PageRequest) -> UsageFilters:
        whole = request.user.is_superuser and request.GET.get("all") == "yes"
        given = request.GET.get("by", "")
        by = By(given) if given in list(By) else By.MEMBER
        if not whole and by == By.PROJECT:
            by = By.MEMBER
        sort = request.GET.get("sort", "")
        return cls(
            project=None if whole else request.project,
            period=_period(request.GET.get("month", ""), request.GET.get("days", ""), timezone.now()),
            by=by,
            sort=sort if sort.removeprefix("-") in SORTS else "-gpu_hours",
        )

    def query(self, **changes: Any) -> str:
        period = {"month": self.period.month} if self.period.month else {"days": self.period.days}
        chosen = {**period, "by": self.by.value, "all": "" if self.project else "yes", "sort": self.sort} | changes
        return "?" + urlencode({name: value for name, value in chosen.items() if value})

    def sorted(self, lines: Sequence[UsageLine]) -> list[UsageLine]:
        name = self.sort.removeprefix("-")

        def key(line: UsageLine) -> Any:
            value = getattr(line.used, name)
            return -1.0 if value is None else value

        by_name = sorted(lines, key=lambda line: line.name.lower(), reverse=self.sort == "-name")
        return by_name if name == "name" else sorted(by_name, key=key, reverse=self.sort.startswith("-"))

    def header(self, name: str) -> SortHeader:
        """Of a column: numbers have the most first."""
        return SortHeader.of(name, self.sort, self.query, first="" if name == "name" else f"-{name}")


def _period(month: str, days: str, now: dt.datetime) -> Period:
    try:
        return Period.of_month(month)
    except ValueError:
        return Period.up_to(now, int(days) if days in map(str, DAYS) else DEFAULT_DAYS)


class BarPart(NamedTuple):
    """A rectangle of a bar: place and height as SVG has them, in percent, and its line's colour, name and hours."""

    y: str
    height: str
    colour: int
    name: str
    hours: float


class Bar(NamedTuple):
    """A day."""

    day: dt.date
    hours: float
    parts: list[BarPart]


class Chart(NamedTuple):
    """A stacked bar per day. `of_gpus` is false where no GPU was used: then it shows CPU-hours."""

    bars: list[Bar]
    most: float
    of_gpus: bool
    legend: list[tuple[int, str]]


@require_safe
@project_page()
def usage_page(request: PageRequest) -> HttpResponse:
    """Usage of the project; of the whole deployment for its admins, with `all=yes`."""
    filters = UsageFilters.of(request)
    report = usage_report.report(filters.project, filters.period, filters.by, timezone.now())
    chart = _chart(report)
    colours = {name: colour for colour, name in chart.legend}
    values: dict[str, Any] = {
        "filters": filters,
        "report": report,
        "chart": chart,
        "width": 10 * len(chart.bars),
        "lines": [(colours.get(line.name, COLOURS[-1]), line) for line in filters.sorted(report.lines)],
        "headers": {name: filters.header(name) for name in SORTS},
        "ranges": [(days, filters.query(days=days, month="")) for days in DAYS],
        "months": _months(filters.project, timezone.now()),
        "scopes": [(by, label, filters.query(by=by.value)) for by, label in _scopes(filters)],
        "whole_query": filters.query(all="yes"),
        "project_query": filters.query(all="", by="" if filters.by == By.PROJECT else filters.by.value),
    }
    return render(request, "usage/usage.html", values)


@require_safe
@project_page()
def export(request: PageRequest, form: str) -> HttpResponseBase:
    """Usage per month, as the page adds it up."""
    filters = UsageFilters.of(request)
    found = usage_report.rows(filters.project, filters.period, filters.by, timezone.now())
    return exports.response("usage", form, usage_report.columns(filters.by), found)


def _scopes(filters: UsageFilters) -> list[tuple[By, str]]:
    each = [(By.MEMBER, _("Members")), (By.QUEUE, _("Queues"))]
    return each if filters.project else [*each, (By.PROJECT, _("Projects"))]


def _months(project: Project | None, now: dt.datetime) -> list[str]:
    """Those with data, the newest first."""
    rows = UsageDay.objects.all() if project is None else UsageDay.objects.filter(project=project)
    month = now.date().replace(day=1)
    first = rows.aggregate(first=Min("day"))["first"] or month
    found: list[str] = []
    while len(found) < MONTHS_OFFERED and (not found or month >= first.replace(day=1)):
        found.append(f"{month:%Y-%m}")
        month = (month - dt.timedelta(days=1)).replace(day=1)
    return found


def _chart(report: Report) -> Chart:
    of_gpus = report.total.gpu_hours > 0 or not report.total.cpu_hours
    hours = [(line.name, line.gpu_hours if of_gpus else line.cpu_hours) for line in report.lines]
    if not of_gpus:
        hours.sort(key=lambda each: -sum(each[1]))
    most_lines = len(COLOURS)
    shown = hours if len(hours) <= most_lines else hours[: most_lines - 1]
    if rest := hours[len(shown) :]:
        shown = [*shown, (_("others"), [sum(day) for day in zip(*(each for _name, each in rest), strict=True)])]
    totals = [sum(each[index] for _name, each in shown) for index in range(len(report.period.dates))]
    most = max(totals, default=0.0)
    bars = []
    for index, day in enumerate(report.period.dates):
        parts, y = [], 100.0
        for colour, (name, each) in zip(COLOURS, shown, strict=False):
            if each[index] > 0:
                height = 100 * each[index] / most
                y -= height
                parts.append(BarPart(f"{max(0.0, y):.2f}", f"{height:.2f}", colour, name, each[index]))
        bars.append(Bar(day, totals[index], parts))
    return Chart(bars, most, of_gpus, [(colour, name) for colour, (name, _each) in zip(COLOURS, shown, strict=False)])
