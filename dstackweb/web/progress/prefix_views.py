"""One prefix: its groups, the tasks that failed and what they said, and the tasks of one group."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlencode

from django.http import HttpResponse
from django.urls import reverse
from django.utils.translation import gettext as _

from dstackweb.lib.errors import NotFound
from dstackweb.progress import selectors as progress
from dstackweb.progress.selectors import ProgressBar
from dstackweb.web.common.pages import PageRequest, project_page
from dstackweb.web.progress.bars import Line
from dstackweb.web.progress.live import Listing, answer, now_ms
from dstackweb.web.progress.scope import Place
from dstackweb.web.progress.views import asked_find, asked_page, bad_page
from dstackweb.wording.progress import state

PER_PAGE = 100


def _gone(request: PageRequest, error: NotFound) -> HttpResponse:
    """What was shown is no longer there: a page that polls is opened anew, and then says so."""
    if request.htmx:
        return HttpResponse(headers={"HX-Refresh": "true"})
    raise error


def _found(place: Place, now: int) -> tuple[progress.ScopeProgress, ProgressBar]:
    """The prefix that the address names. Raises NotFound."""
    name, over = place.request.GET.get("prefix", ""), place.overview(now)
    bar = progress.prefix(over.scope_id, name, now) if over and name else None
    if over is None or bar is None:
        raise NotFound(_("there is no task prefix %s here") % name)
    return over, bar


def _page(read: Callable[[], Listing]) -> Listing:
    try:
        return read()
    except ValueError:
        raise bad_page() from None


@project_page()
def prefix_page(request: PageRequest, run: str = "") -> HttpResponse:
    """One prefix and its groups, or its failures; also what polls of the page get."""
    place, now = Place.of(request, run), now_ms()
    try:
        over, bar = _found(place, now)
    except NotFound as error:
        return _gone(request, error)
    shown = request.GET.get("show", "")
    shown = shown if shown in ("running", "failed") or (shown == "failures" and place.run) else ""
    find, after = asked_find(request), asked_page(request)

    def url(**query: str) -> str:
        return place.url("prefix", prefix=bar.name, **query)

    def context(following: str | None) -> dict[str, Any]:
        tabs = [("", _("all groups")), ("running", _("with running ones")), ("failed", _("with failed ones"))]
        if place.run:
            tabs.append(("failures", _("what failed, and why")))
        return {
            **place.context(),
            "over": over,
            "whole": place.line(bar),
            "ended": place.ended(over),
            "shown": shown,
            "q": find,
            "after": after,
            "tabs": [(key, label, url(show=key, q="" if key == "failures" else find)) for key, label in tabs],
            "first_url": url(show=shown, q=find),
            "following": url(show=shown, q=find, after=following or ""),
            "has_following": following is not None,
        }

    def failures() -> Listing:
        found, following = progress.failures(over.scope_id, bar.id, after, PER_PAGE)
        lines = [(one, _moment(one.at_ms), place.url("group", prefix=bar.name, group=one.group)) for one in found]
        return Listing([], [(one.id, one.at_ms) for one in found], {**context(following), "failures": lines})

    def groups() -> Listing:
        only = cast(progress.GroupFilter, shown)
        found, following = progress.groups(bar.id, only=only, find=find, after=after, limit=PER_PAGE)
        said = place.line(bar).failures if place.run else ""
        lines = [Line(one, bar.name, _group_url(place, bar.name, one.name), failures=said) for one in found]
        return Listing(lines, [one.id for one in found], context(following))

    return answer(
        request,
        "progress/prefix.html",
        "progress/prefix_body.html",
        "progress/prefix_update.html",
        bar,
        now,
        lambda: _page(failures if shown == "failures" else groups),
    )


def _moment(ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC)


def _group_url(place: Place, prefix: str, group: str) -> str:
    """A group's tasks; in a project the runs of this name, which are what its group counts."""
    if place.run is None:
        return reverse("web:runs", args=[place.request.project.name]) + f"?{urlencode({'q': group})}"
    return place.url("group", prefix=prefix, group=group)


@project_page()
def group_page(request: PageRequest, run: str) -> HttpResponse:
    """The tasks of one group; also what polls of the page get."""
    place, now = Place.of(request, run), now_ms()
    name, after = request.GET.get("group", ""), asked_page(request)
    try:
        over, bar = _found(place, now)
        group = progress.group(bar.id, name)
        if group is None:
            raise NotFound(_("there is no group %s here; all its tasks may be forgotten") % name)
    except NotFound as error:
        return _gone(request, error)

    def tasks() -> Listing:
        found, following = progress.tasks(group.id, after, PER_PAGE)
        context = {
            **place.context(),
            "over": over,
            "prefix": bar,
            "whole": Line(group, bar.name, failures=place.line(bar).failures),
            "tasks": [(one, state(one.state), _moment(one.since_ms)) for one in found],
            "after": after,
            "ended": place.ended(over),
            "prefix_url": place.url("prefix", prefix=bar.name),
            "first_url": place.url("group", prefix=bar.name, group=name),
            "following": place.url("group", prefix=bar.name, group=name, after=following or ""),
            "has_following": following is not None,
        }
        return Listing([], found, context)

    return answer(
        request,
        "progress/group.html",
        "progress/group_body.html",
        "progress/group_update.html",
        group,
        now,
        lambda: _page(tasks),
    )
