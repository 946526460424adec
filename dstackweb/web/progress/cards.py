"""Progress as a part of other pages: of the tasks on a run's page, and of all runs that go on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from django.http import HttpResponse
from django.urls import reverse

from dstackweb.accounts.models import Project
from dstackweb.progress import selectors as progress
from dstackweb.runs import selectors
from dstackweb.runs.models import Run
from dstackweb.runs.states import ENDED
from dstackweb.web.common.pages import PageRequest, polled, project_page
from dstackweb.web.progress.bars import Line, named
from dstackweb.web.progress.live import POLL_S, Stamp, moment, now_ms
from dstackweb.web.progress.scope import Place

ON_A_CARD = 6
"""Prefixes on a run's page."""
RUNS = 12
"""Of a project, with the tasks inside them."""


@dataclass(frozen=True)
class Card:
    """The tasks of a run: all of them, and the first prefixes."""

    place: Place
    over: progress.ScopeProgress
    now: int
    poll_s: int = POLL_S

    @property
    def version(self) -> str:
        """Another one whenever something else is shown."""
        return str(Stamp(self.over.scope_id, self.over.version, moment(self.over.bar, self.now), str(int(self.ended))))

    @property
    def ended(self) -> bool:
        """Whether nothing changes here any more."""
        return self.place.ended(self.over)

    @property
    def url(self) -> str:
        """Where it is asked for again."""
        return self.place.url("card")

    @property
    def page(self) -> str:
        """Where all of it is."""
        return self.place.url()

    @property
    def prefixes(self) -> int:
        """How many there are."""
        return self.over.prefixes

    @property
    def whole(self) -> Line:
        """All tasks."""
        return Line(self.over.bar, failures=self.place.url(order="failed"))

    @property
    def lines(self) -> list[Line]:
        """The first prefixes, those first to which something is still to come."""
        bars, _ = progress.prefixes(self.over.scope_id, self.now, limit=ON_A_CARD)
        return [self.place.line(bar) for bar in bars]


def card_of(request: PageRequest, run: Run) -> Card | None:
    """Of the newest attempt that told of any task; None for a run without."""
    place, now = Place(request, run, str(run.uid)), now_ms()
    over = place.overview(now)
    return Card(place, over, now) if over else None


@project_page()
def card(request: PageRequest, run: str) -> HttpResponse:
    """The tasks on a run's page; what polls of it get."""
    found = card_of(request, selectors.find_run(request.project, run))
    if found is None:
        return HttpResponse(status=204)  # its counters are no longer kept
    return polled(request, "progress/card.html", "progress/card.html", found.version, lambda: {"card": found})


def inside_of(project: Project) -> tuple[str, list[Line]]:
    """What changes with it, and the tasks of the runs that go on: a line for each."""
    now = now_ms()
    found = progress.running_runs(project.pk, now, RUNS)
    runs = {run.pk: run for run in Run.objects.filter(pk__in=[pk for pk, _ in found]).only("name", "uid", "status")}
    lines, shown = [], []
    for pk, over in found:
        run = runs.get(pk)
        if run is not None and run.status not in ENDED:
            url = reverse("web:run-progress", args=[project.name, run.uid])
            lines.append(Line(named(over.bar, run.name), run.name, url, "run-", f"{url}?order=failed"))
            shown.append((over.scope_id, over.version, moment(over.bar, now)))
    return hashlib.sha256(repr(shown).encode()).hexdigest()[:16], lines


@project_page()
def inside(request: PageRequest) -> HttpResponse:
    """The tasks of all runs that go on; what polls of the project's page get."""
    version, lines = inside_of(request.project)
    context: dict[str, Any] = {"inside": lines}
    return polled(request, "progress/inside.html", "progress/inside.html", version, lambda: context)
