"""Pages of progress: prefixes (also as a wall screen), the groups of a prefix, and the tasks of a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast
from urllib.parse import urlencode

from django.http import HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _

from dstackweb.lib.errors import NotFound
from dstackweb.lib.times import to_moment
from dstackweb.progress import selectors as progress, task_lists
from dstackweb.progress.selectors import ProgressBar, ScopeProgress
from dstackweb.progress.states import AS_ENDED
from dstackweb.web.common.pages import PageRequest, project_page
from dstackweb.web.progress.bars import ProgressRow
from dstackweb.web.progress.live import PageRows, live_response, now_ms
from dstackweb.web.progress.scope import PageScope, pager, running_run_rows
from dstackweb.wording.progress import state

PREFIXES_PER_PAGE = 50
GROUPS_PER_PAGE = 100
"""Groups, failures, or tasks."""
ON_A_WALL = 40
"""Prefixes on a wall screen, which does not scroll."""
ORDERS = ("active", "failed", "name")


@dataclass(frozen=True)
class PrefixFilters:
    """Query of a page of prefixes: `find` is a part of the name, `after` a cursor, `light` a wall screen's theme."""

    order: progress.Order
    find: str
    after: str | None
    light: bool

    @classmethod
    def of(cls, request: PageRequest) -> PrefixFilters:
        """Parse a request. Unknown values are ignored."""
        order = request.GET.get("order", "")
        known = cast(progress.Order, order if order in ORDERS else "active")
        query = request.GET
        return cls(known, query.get("q", "").strip(), query.get("after") or None, query.get("theme") == "light")

    @property
    def query(self) -> dict[str, str]:
        """The query without the cursor; defaults are empty."""
        return self.ordered(self.order)

    def ordered(self, order: str) -> dict[str, str]:
        return {"q": self.find, "order": "" if order == "active" else order}


@project_page()
def progress_page(request: PageRequest, run: str = "", wall: bool = False) -> HttpResponse:
    """All prefixes, as a page or as a wall screen, and its polls."""
    scope, filters, now = PageScope.of(request, run), PrefixFilters.of(request), now_ms()
    page = "wall" if wall else "overview"
    totals = scope.totals(now)
    if totals is not None:
        limit = ON_A_WALL if wall else PREFIXES_PER_PAGE
        return live_response(request, page, totals.bar, now, lambda: _prefix_rows(scope, totals, filters, now, limit))
    if request.htmx:
        return HttpResponse(status=204)
    return render(request, f"progress/{page}.html", _context(scope, filters))


def _prefix_rows(scope: PageScope, totals: ScopeProgress, filters: PrefixFilters, now: int, limit: int) -> PageRows:
    current, bars, following = progress.prefixes(
        totals.scope_id, now, find=filters.find, order=filters.order, after=filters.after, limit=limit,
        stuck=scope.stuck,
    )  # fmt: skip
    totals = current or totals
    context = {
        **_context(scope, filters, totals),
        **pager(scope.url(**filters.query), filters.after, following),
        "summary": ProgressRow(totals.bar, failures_url=scope.url(**filters.ordered("failed"))),
        "beyond": 0 if filters.find else max(0, totals.prefixes - len(bars)),
    }
    return PageRows(scope.rows(bars), [(bar.id, bar.stuck) for bar in bars], context)


def _context(scope: PageScope, filters: PrefixFilters, totals: ScopeProgress | None = None) -> dict[str, Any]:
    """The context without rows; on page loads with a project's running runs, which the page polls separately."""
    labels = (("active", _("Active first")), ("failed", _("Failed first")), ("name", _("By name")))
    context = {
        **scope.context(totals),
        "theme": "light" if filters.light else "dark",
        "theme_url": scope.url("wall", **filters.query, theme="" if filters.light else "light"),
        "order": filters.order,
        "q": filters.find,
        "wall_url": scope.url("wall", **filters.query),
        "orders": [(order, label, scope.url(**filters.ordered(order))) for order, label in labels],
    }
    if not scope.run and not scope.request.htmx:
        context["running_version"], context["running_runs"] = running_run_rows(scope.request.project)
    return context


def _gone(request: PageRequest, error: NotFound) -> HttpResponse:
    """A prefix or group was deleted: reload a polling page, which then shows the error."""
    if request.htmx:
        return HttpResponse(headers={"HX-Refresh": "true"})
    raise error


def _found(scope: PageScope, now: int) -> tuple[progress.ScopeProgress, ProgressBar]:
    """The prefix that the request names. Raises NotFound."""
    name, totals = scope.request.GET.get("prefix", ""), scope.totals(now)
    bar = progress.prefix(totals, name, now) if totals and name else None
    if totals is None or bar is None:
        raise NotFound(_("there is no task prefix %s") % name)
    return totals, replace(bar, stuck=scope.stuck(bar))


@project_page()
def prefix_page(request: PageRequest, run: str = "") -> HttpResponse:
    """The groups or the failures of a prefix, and its polls."""
    scope, now = PageScope.of(request, run), now_ms()
    try:
        totals, bar = _found(scope, now)
    except NotFound as error:
        return _gone(request, error)
    shown = request.GET.get("show", "")
    shown = shown if shown in ("running", "failed") or (shown == "failures" and scope.run) else ""
    find, after = request.GET.get("q", "").strip(), request.GET.get("after") or None

    def url(**query: str) -> str:
        return scope.url("prefix", prefix=bar.name, **query)

    def context(following: str | None) -> dict[str, Any]:
        tabs = [("", _("All groups")), ("running", _("Running")), ("failed", _("Failed"))]
        if scope.run:
            tabs.append(("failures", _("Errors")))
        return {
            **scope.context(totals),
            **pager(url(show=shown, q=find), after, following),
            "summary": scope.row(bar, durations=scope.durations([bar]).get(bar.name)),
            "of_prefix": True,
            "shown": shown,
            "q": find,
            "tabs": [(key, label, url(show=key, q="" if key == "failures" else find)) for key, label in tabs],
        }

    def failures() -> PageRows:
        found, following = task_lists.failures(totals.scope_id, bar.id, after, GROUPS_PER_PAGE)
        rows = [(one, to_moment(one.at_ms), scope.url("group", prefix=bar.name, group=one.group)) for one in found]
        return PageRows([], [(one.id, one.at_ms) for one in found], {**context(following), "failures": rows})

    def groups() -> PageRows:
        only = cast(progress.GroupFilter, shown)
        found, following = progress.groups(bar.id, only=only, find=find, after=after, limit=GROUPS_PER_PAGE)
        errors = scope.row(bar).failures_url if scope.run else ""
        rows = [ProgressRow(one, bar.name, _group_url(scope, bar.name, one.name), failures_url=errors) for one in found]
        return PageRows(rows, [one.id for one in found], context(following))

    return live_response(request, "prefix", bar, now, failures if shown == "failures" else groups)


def _group_url(scope: PageScope, prefix: str, group: str) -> str:
    """The tasks of a group. For a project: the runs with this name."""
    if scope.run is None:
        return reverse("web:runs", args=[scope.request.project.name]) + f"?{urlencode({'q': group})}"
    return scope.url("group", prefix=prefix, group=group)


@project_page()
def group_page(request: PageRequest, run: str) -> HttpResponse:
    """The tasks of a group, and its polls."""
    scope, now = PageScope.of(request, run), now_ms()
    name, after = request.GET.get("group", ""), request.GET.get("after") or None
    try:
        totals, bar = _found(scope, now)
        group = progress.group(bar.id, name)
        if group is None:
            raise NotFound(_("there is no group %s; its tasks may all be forgotten") % name)
    except NotFound as error:
        return _gone(request, error)

    def tasks() -> PageRows:
        found, following = task_lists.tasks(group.id, after, GROUPS_PER_PAGE)
        context = {
            **scope.context(totals),
            **pager(scope.url("group", prefix=bar.name, group=name), after, following),
            "prefix": bar,
            "summary": ProgressRow(group, bar.name, failures_url=scope.row(bar).failures_url),
            "tasks": [
                (one, AS_ENDED.get(one.state, one.state), state(one.state), to_moment(one.since_ms)) for one in found
            ],
            "prefix_url": scope.url("prefix", prefix=bar.name),
        }
        return PageRows([], found, context)

    return live_response(request, "group", group, now, tasks)
