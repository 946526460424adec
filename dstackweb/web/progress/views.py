"""The progress of a project's runs, and of the tasks inside one run: all prefixes, and a screen for the wall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from django.http import HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _

from dstackweb.lib.errors import Invalid
from dstackweb.progress import selectors as progress
from dstackweb.progress.selectors import ScopeProgress
from dstackweb.web.common.pages import PageRequest, project_page
from dstackweb.web.progress.bars import Line
from dstackweb.web.progress.cards import inside_of
from dstackweb.web.progress.live import Listing, answer, now_ms
from dstackweb.web.progress.scope import Place

PER_PAGE = 50
ON_A_WALL = 40
"""Bars for a screen that nobody scrolls."""
ORDERS = ("active", "failed", "name")


@dataclass(frozen=True)
class Asked:
    """What an address asks for: prefixes with `find` in their names, in which order and from where on.

    `light` is the theme of a wall; all other pages have their reader's.
    """

    order: progress.Order
    find: str
    after: str | None
    light: bool

    @classmethod
    def of(cls, request: PageRequest) -> Asked:
        """Whatever an address says that is not known is left out."""
        order = request.GET.get("order", "")
        known = cast(progress.Order, order if order in ORDERS else "active")
        return cls(known, asked_find(request), asked_page(request), request.GET.get("theme") == "light")

    @property
    def query(self) -> dict[str, str]:
        """Of the list's other pages and of its wall; what goes without saying is empty."""
        return self.ordered(self.order)

    def ordered(self, order: str) -> dict[str, str]:
        """Of the same list in another order."""
        return {"q": self.find, "order": "" if order == "active" else order}


def asked_find(request: PageRequest) -> str:
    """The part of names that is looked for."""
    return request.GET.get("q", "").strip()


def asked_page(request: PageRequest) -> str | None:
    """Where the list begins, if not at its beginning."""
    return request.GET.get("after") or None


def bad_page() -> Invalid:
    """For an address of a page of a list that never was one."""
    return Invalid.at("after", msg=_("there is no such page of the list"))


@project_page()
def progress_page(request: PageRequest, run: str = "", wall: bool = False) -> HttpResponse:
    """All prefixes; also what polls of the page get. On a wall they are large, and nothing is around them."""
    place, asked, now = Place.of(request, run), Asked.of(request), now_ms()
    page, body, update = (f"progress/{'wall' if wall else 'overview'}{part}.html" for part in ("", "_body", "_update"))
    if wall and not request.htmx:
        request.session.modified = True  # it lasts as long as somebody has the page open
    over = place.overview(now)
    if over is not None:
        limit = ON_A_WALL if wall else PER_PAGE
        return answer(request, page, body, update, over.bar, now, lambda: _listing(place, over, asked, now, limit))
    if request.htmx:
        return HttpResponse(status=204)
    return render(request, page, {**_context(place, asked), "over": None})


def _listing(place: Place, over: ScopeProgress, asked: Asked, now: int, limit: int) -> Listing:
    try:
        bars, following = progress.prefixes(
            over.scope_id, now, find=asked.find, order=asked.order, after=asked.after, limit=limit
        )
    except ValueError:
        raise bad_page() from None
    context = {
        **_context(place, asked),
        "over": over,
        "whole": Line(over.bar, failures=place.url(**asked.ordered("failed"))),
        "following": place.url(**asked.query, after=following or ""),
        "has_following": following is not None,
        "beyond": 0 if asked.find else max(0, over.prefixes - len(bars)),
        "ended": place.ended(over),
    }
    return Listing(place.lines(bars), [bar.id for bar in bars], context)


def _context(place: Place, asked: Asked) -> dict[str, Any]:
    """What the page shows beside its counters."""
    labels = (("active", _("Active first")), ("failed", _("Failed first")), ("name", _("By name")))
    return {
        **place.context(),
        **_inside(place),
        "theme": "light" if asked.light else "dark",
        "theme_url": place.url("wall", **asked.query, theme="" if asked.light else "light"),
        "order": asked.order,
        "q": asked.find,
        "after": asked.after,
        "wall_url": place.url("wall", **asked.query),
        "first_url": place.url(**asked.query),
        "orders": [(order, label, place.url(**asked.ordered(order))) for order, label in labels],
    }


def _inside(place: Place) -> dict[str, Any]:
    """The tasks inside a project's runs, for a page that is opened: afterwards it asks for them by themselves."""
    if place.run or place.request.htmx:
        return {}
    project = place.request.project
    version, lines = inside_of(project)
    url = reverse("web:progress-inside", args=[project.name])
    return {"inside": lines, "inside_version": version, "inside_url": url}
