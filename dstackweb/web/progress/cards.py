"""Progress on other pages: a run's tasks on its page, and running runs on the project's progress page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from django.http import HttpResponse
from django.urls import reverse

from dstackweb.accounts.models import Project
from dstackweb.progress import selectors as progress
from dstackweb.runs import selectors
from dstackweb.runs.models import Run
from dstackweb.runs.states import ENDED
from dstackweb.web.common.pages import PageRequest, fingerprint, polled, project_page
from dstackweb.web.progress.bars import ProgressRow
from dstackweb.web.progress.live import POLL_S, PageVersion, now_ms, rate_tick
from dstackweb.web.progress.scope import PageScope

ON_A_CARD = 6
"""Prefixes on a run's page."""
RUNS = 12
"""Running runs on a project's page."""


@dataclass(frozen=True)
class Card:
    """A run's tasks on its page: the totals and the first prefixes. `ended`: the counters are final."""

    scope: PageScope
    totals: progress.ScopeProgress
    now: int

    @property
    def version(self) -> str:
        totals = self.totals
        return str(PageVersion(totals.scope_id, totals.version, rate_tick(totals.bar, self.now), str(int(self.ended))))

    @property
    def ended(self) -> bool:
        return self.scope.ended(self.totals)

    def context(self) -> dict[str, Any]:
        """The template's context, with the prefixes that have unfinished tasks first."""
        bars, _ = progress.prefixes(self.totals.scope_id, self.now, limit=ON_A_CARD)
        card = {
            "version": self.version,
            "ended": self.ended,
            "poll_s": POLL_S,
            "url": self.scope.url("card"),
            "page": self.scope.url(),
            "prefixes": self.totals.prefixes,
            "summary": ProgressRow(self.totals.bar, failures_url=self.scope.url(order="failed")),
            "rows": [self.scope.row(bar) for bar in bars],
        }
        return {"card": card}


def find_card(request: PageRequest, run: Run) -> Card | None:
    """The card of the latest attempt that reported tasks. None without reports."""
    scope, now = PageScope(request, run, str(run.uid)), now_ms()
    totals = scope.totals(now)
    return Card(scope, totals, now) if totals else None


@project_page()
def card(request: PageRequest, run: str) -> HttpResponse:
    """The card on a run's page, for its polls."""
    found = find_card(request, selectors.find_run(request.project, run))
    if found is None:
        return HttpResponse(status=204)  # its counters are no longer kept
    return polled(request, "progress/card.html", "progress/card.html", found.version, found.context)


def running_run_rows(project: Project) -> tuple[str, list[ProgressRow]]:
    """A row for each running run that reports tasks, and a hash that identifies what they show."""
    now = now_ms()
    found = progress.running_runs(project.pk, now, RUNS)
    runs = {run.pk: run for run in Run.objects.filter(pk__in=[pk for pk, _ in found]).only("name", "uid", "status")}
    rows, shown = [], []
    for pk, totals in found:
        run = runs.get(pk)
        if run is not None and run.status not in ENDED:
            url = reverse("web:run-progress", args=[project.name, run.uid])
            rows.append(ProgressRow(replace(totals.bar, name=run.name), run.name, url, "run-", f"{url}?order=failed"))
            shown.append((totals.scope_id, totals.version, rate_tick(totals.bar, now)))
    return fingerprint(shown), rows


@project_page()
def inside(request: PageRequest) -> HttpResponse:
    """The running runs on the project's page, for its polls."""
    version, rows = running_run_rows(request.project)
    template = "progress/running_runs.html"
    return polled(request, template, template, version, lambda: {"inside": rows})
