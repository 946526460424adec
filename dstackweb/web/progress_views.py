"""The progress of a project's runs, and of the tasks inside one run: all prefixes, and a screen for the wall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlencode

from django.http import HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _

from dstackweb.lib.errors import Invalid
from dstackweb.progress import selectors as progress
from dstackweb.progress.states import TaskState
from dstackweb.progress.wording import meaning, state
from dstackweb.runs import selectors
from dstackweb.runs.models import Run
from dstackweb.runs.states import ENDED
from dstackweb.web import lists
from dstackweb.web.pages import PageRequest, project_page
from dstackweb.web.progress_bars import DRAWN, Line
from dstackweb.web.progress_live import POLL_S, Listing, answer, now_ms

PER_PAGE = 50
ON_A_WALL = 40
"""Bars for a screen that nobody scrolls."""
ORDERS = ("active", "failed", "name")


@dataclass(frozen=True)
class Place:
    """Whose progress: of a project's runs, or of the tasks inside a run, as its address says."""

    request: PageRequest
    run: Run | None = None
    called: str = ""
    attempt: int | None = None

    @classmethod
    def of(cls, request: PageRequest, run: str = "") -> Place:
        """What an address is about. Raises NotFound where there is no such run."""
        if not run:
            return cls(request)
        attempt = lists.number(request.GET.get("attempt")) or None
        return cls(request, selectors.find_run(request.project, run), run, attempt)

    def url(self, view: str = "", **query: str) -> str:
        """The address of its page, or of one beneath it: `wall`, `prefix`, `group`."""
        name = "-".join(filter(None, ("run" if self.run else "", "progress", view)))
        args = [self.request.project.name, *([self.called] if self.run else [])]
        query = {key: value for key, value in query.items() if value}
        if self.attempt:
            query["attempt"] = str(self.attempt)
        return reverse(f"web:{name}", args=args) + (f"?{urlencode(query)}" if query else "")

    def overview(self, now: int) -> progress.Overview | None:
        """Its counters; None where nothing was told of yet."""
        if self.run is None:
            return progress.of_project(self.request.project.pk, now)
        return progress.of_run(self.run.pk, now, self.attempt)

    @property
    def attempts(self) -> list[tuple[int, str]]:
        """The attempts of a run that was tried again, each with its address."""
        if self.run is None or self.run.attempt < 2:
            return []
        place = [Place(self.request, self.run, self.called, n) for n in range(1, self.run.attempt + 1)]
        return [(one.attempt or 0, one.url()) for one in place[-8:]]

    def context(self) -> dict[str, Any]:
        """What all pages about it show."""
        return {
            "place": self,
            "run": self.run,
            "legend": [(one.value, state(one), meaning(one)) for one in (*DRAWN, TaskState.WAITING)],
            "states": [(one.value, state(one)) for one in TaskState],
            "poll_s": POLL_S,
            "waiting": selectors.counts(self.request.project)["submitted"],
        }


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
    if wall:
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

    if over is None:
        if request.htmx:
            return HttpResponse(status=204)
        return render(request, names[0], {**context(), "over": None})
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
            "whole": Line(whole.bar),
            "following": place.url(q=find, order=by, after=following or ""),
            "beyond": 0 if find else max(0, whole.prefixes - len(bars)),
            "has_following": following is not None,
            "ended": _ended(place, whole),
        }
        return Listing(_lines(place, bars), [bar.id for bar in bars], {**context(), **more})

    return answer(request, names[0], names[1], names[2], whole.bar, now, listing)


def _lines(place: Place, bars: Sequence[progress.Bar]) -> list[Line]:
    return [Line(bar, bar.name, place.url("prefix", prefix=bar.name)) for bar in bars]


def _ended(place: Place, over: progress.Overview) -> bool:
    """Whether nothing can change here any more."""
    if place.run is None or not over.ended or over.bar.live:
        return False
    return place.run.status in ENDED or over.attempt < place.run.attempt
