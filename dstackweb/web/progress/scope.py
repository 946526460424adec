"""The subject of a progress page: a project's runs, or the tasks of one run. Also its cards on other pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from urllib.parse import urlencode

from django.http import HttpResponse
from django.urls import reverse

from dstackweb.accounts.models import Project
from dstackweb.lib.forms import whole_number
from dstackweb.lib.times import to_moment
from dstackweb.progress import selectors as progress, task_lists
from dstackweb.progress.states import TaskState
from dstackweb.runs import learned_durations, selectors
from dstackweb.runs.models import Run
from dstackweb.runs.states import ENDED
from dstackweb.runs.stuck import stuck_runs
from dstackweb.web.common.pages import PageRequest, fingerprint, polled, project_page
from dstackweb.web.progress.bars import DRAWN, Durations, ProgressRow
from dstackweb.web.progress.live import POLL_S, PageVersion, now_ms, rate_tick
from dstackweb.wording.progress import meaning, state

ATTEMPTS_LINKED = 8
CARD_POLL_S = 15
"""Only its rates change by themselves: the run's own polls say when its counters have."""
PREFIXES_ON_A_CARD = 6
SHARES = (0.5, 0.95)
"""Of the durations that are shown beside the mean."""
RUNS_SHOWN = 12


@dataclass(frozen=True)
class PageScope:
    """The subject of a page: a project's runs, or the tasks of a run's attempt (None: the latest with reports)."""

    request: PageRequest
    run: Run | None = None
    run_ref: str = ""
    attempt: int | None = None

    @classmethod
    def of(cls, request: PageRequest, run: str = "") -> PageScope:
        """The subject of a request. Raises NotFound for an unknown run."""
        if not run:
            return cls(request)
        attempt = whole_number(request.GET.get("attempt")) or None
        return cls(request, selectors.find_run(request.project, run), run, attempt)

    def url(self, view: str = "", **query: str) -> str:
        """The address of the page, or of its `wall`, `prefix`, `group` or `card`."""
        name = "-".join(filter(None, ("run" if self.run else "", "progress", view)))
        args = [self.request.project.name, *([self.run_ref] if self.run else [])]
        query = {key: value for key, value in query.items() if value}
        if self.attempt:
            query["attempt"] = str(self.attempt)
        return reverse(f"web:{name}", args=args) + (f"?{urlencode(query)}" if query else "")

    @cached_property
    def stuck(self) -> progress.StuckOf:
        """Which tasks of a bar cannot go on: of a project, waiting runs."""
        return progress.no_stuck if self.run else stuck_runs(self.request.project).of

    def row(
        self, bar: progress.ProgressBar, *, has_stored_failures: bool = False, durations: Durations | None = None
    ) -> ProgressRow:
        """A prefix's row, with links to its groups and to its failures (of runs: to the failed groups)."""
        return ProgressRow(
            bar,
            bar.name,
            self.url("prefix", prefix=bar.name),
            failures_url=self.url("prefix", prefix=bar.name, show="failures" if self.run else "failed"),
            has_stored_failures=has_stored_failures,
            durations=durations,
        )

    def durations(self, bars: Sequence[progress.ProgressBar]) -> dict[str, Durations]:
        """By prefix, how long its tasks took, or a project's runs."""
        if self.run:
            of_tasks = progress.duration_quantiles([bar.id for bar in bars if bar.mean_s is not None], SHARES)
            return {bar.name: Durations(*of_tasks[bar.id]) for bar in bars if bar.id in of_tasks}
        names = [bar.name for bar in bars if bar.mean_s is not None]
        found = learned_durations.quantiles(self.request.project.pk, names, SHARES)
        return {name: Durations(*each) for name, each in found.items()}

    def rows(self, bars: list[progress.ProgressBar]) -> list[ProgressRow]:
        """Rows of prefixes. Those whose failed tasks are all forgotten link to the stored failures."""
        gone = [bar.id for bar in bars if bar.counts[TaskState.FORGOTTEN] and not bar.counts[TaskState.ERRED]]
        failed = task_lists.with_failures(gone) if self.run else set()
        known = self.durations(bars)
        return [self.row(bar, has_stored_failures=bar.id in failed, durations=known.get(bar.name)) for bar in bars]

    def totals(self, now: int) -> progress.ScopeProgress | None:
        """Its totals. None without reports."""
        if self.run is None:
            found = progress.of_project(self.request.project.pk, now)
            return found and replace(found, bar=replace(found.bar, stuck=self.stuck(found.bar)))
        return progress.of_run(self.run.pk, now, self.attempt)

    @property
    def attempts(self) -> list[tuple[int, str]]:
        """The latest attempts of a retried run, with their addresses."""
        if self.run is None or self.run.attempt < 2:
            return []
        last = self.run.attempt
        newest = range(max(1, last - ATTEMPTS_LINKED + 1), last + 1)
        return [(n, PageScope(self.request, self.run, self.run_ref, n).url()) for n in newest]

    def ended(self, totals: progress.ScopeProgress) -> bool:
        return totals.ended and not totals.bar.live and self._has_ended(totals.attempt)

    @property
    def stays_empty(self) -> bool:
        """Whether the attempt has ended, so that it cannot report tasks any more."""
        return self._has_ended(self.attempt)

    def _has_ended(self, attempt: int | None) -> bool:
        if self.run is None:
            return False
        return self.run.status in ENDED or (attempt or self.run.attempt) < self.run.attempt

    def context(self, totals: progress.ScopeProgress | None = None) -> dict[str, Any]:
        return {
            "totals": totals,
            **silence_context(totals),
            "ended": totals is not None and self.ended(totals),
            "scope": self,
            "run": self.run,
            "legend": [(one.value, state(one), meaning(one)) for one in (*DRAWN, TaskState.WAITING)],
            "states": states(),
            "poll_s": POLL_S,
        }


def pager(first_url: str, after: str | None, following: str | None) -> dict[str, str | None]:
    """Template context of `pages.html`; `after` and `following` are the cursors of this page and the next."""
    more = f"{'&' if '?' in first_url else '?'}{urlencode({'after': following})}"
    return {"after": after, "first_url": first_url, "following": first_url + more if following else ""}


def states() -> list[tuple[str, str]]:
    """All states in the order of a bar's counts, with their labels, for scripts."""
    return [(one.value, state(one)) for one in TaskState]


def silence_context(totals: progress.ScopeProgress | None) -> dict[str, Any]:
    """Template context of `silence.html`: how many reporters are silent, and since when."""
    if totals is None or totals.silence is None:
        return {"silent": 0}
    return {"silent": totals.silence.reporters, "silent_since": to_moment(totals.silence.since_ms)}


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
        current, bars, _ = progress.prefixes(self.totals.scope_id, self.now, limit=PREFIXES_ON_A_CARD)
        totals = current or self.totals
        card = {
            "version": self.version,
            "ended": self.ended,
            "poll_s": CARD_POLL_S,
            "url": self.scope.url("card"),
            "page": self.scope.url(),
            **silence_context(totals),
            "prefixes": totals.prefixes,
            "summary": ProgressRow(totals.bar, failures_url=self.scope.url(order="failed")),
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
    found = progress.running_runs(project.pk, now, RUNS_SHOWN)
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
def running_runs(request: PageRequest) -> HttpResponse:
    version, rows = running_run_rows(request.project)
    template = "progress/running_runs.html"
    return polled(request, template, template, version, lambda: {"running_runs": rows})
