"""The progress of a project's runs, and of the tasks inside one run: all prefixes, and a screen for the wall."""

from __future__ import annotations

from typing import Any, cast

from django.http import HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _

from dstackweb.lib.errors import Invalid
from dstackweb.progress import selectors as progress
from dstackweb.web.pages import PageRequest, project_page
from dstackweb.web.progress_bars import Line
from dstackweb.web.progress_live import Listing, answer, now_ms
from dstackweb.web.progress_parts import inside_of
from dstackweb.web.progress_place import Place

PER_PAGE = 50
ON_A_WALL = 40
"""Bars for a screen that nobody scrolls."""
ORDERS = ("active", "failed", "name")


def asked_page(request: PageRequest) -> str | None:
    """Where the list begins, if not at its beginning."""
    return request.GET.get("after") or None


def bad_page() -> Invalid:
    """For an address of a page of a list that never was one."""
    return Invalid.at("after", msg=_("there is no such page of the list"))


@project_page()
def progress_page(request: PageRequest, run: str = "", wall: bool = False) -> HttpResponse:
    """All prefixes; also what polls of the page get. On a wall they are large, and nothing is around them."""
    place, now = Place.of(request, run), now_ms()
    over = place.overview(now)
    order = request.GET.get("order", "")
    order = order if order in ORDERS else "active"
    find, after = request.GET.get("q", "").strip(), asked_page(request)
    names = [f"progress/{'wall' if wall else 'overview'}{part}.html" for part in ("", "_body", "_update")]

    theme = "light" if request.GET.get("theme") == "light" else "dark"
    by = "" if order == "active" else order
    if wall and not request.htmx:
        request.session.modified = True  # it lasts as long as somebody has the page open

    def context() -> dict[str, Any]:
        return {
            **place.context(),
            "theme": theme,
            "theme_url": place.url("wall", q=find, order=by, theme="light" if theme == "dark" else ""),
            "order": order,
            "q": find,
            "after": after,
            "wall_url": place.url("wall", q=find, order=by),
            "first_url": place.url(q=find, order=by),
            "orders": [
                (key, label, place.url("wall" if wall else "", q=find, order="" if key == "active" else key))
                for key, label in (("active", _("Active first")), ("failed", _("Failed first")), ("name", _("By name")))
            ],
        }

    def whole_page() -> dict[str, Any]:
        if run or request.htmx:
            return context()
        version, lines = inside_of(request.project)
        inside_url = reverse("web:progress-inside", args=[request.project.name])
        return {**context(), "inside": lines, "inside_version": version, "inside_url": inside_url}

    if over is None:
        if request.htmx:
            return HttpResponse(status=204)
        return render(request, names[0], {**whole_page(), "over": None})
    whole = over

    def listing() -> Listing:
        try:
            bars, following = progress.prefixes(
                whole.scope_id,
                now,
                find=find,
                order=cast(progress.Order, order),
                after=after,
                limit=ON_A_WALL if wall else PER_PAGE,
            )
        except ValueError:
            raise bad_page() from None
        more = {
            "over": whole,
            "whole": Line(whole.bar, failures=place.url(q=find, order="failed")),
            "following": place.url(q=find, order=by, after=following or ""),
            "beyond": 0 if find else max(0, whole.prefixes - len(bars)),
            "has_following": following is not None,
            "ended": place.ended(whole),
        }
        return Listing([place.line(bar) for bar in bars], [bar.id for bar in bars], {**whole_page(), **more})

    return answer(request, names[0], names[1], names[2], whole.bar, now, listing)
