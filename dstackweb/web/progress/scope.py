"""Whose progress an address is about: a project's runs, or the tasks inside one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.urls import reverse

from dstackweb.progress import selectors as progress
from dstackweb.progress.states import TaskState
from dstackweb.runs import selectors
from dstackweb.runs.models import Run
from dstackweb.runs.states import ENDED
from dstackweb.web.common.pages import PageRequest, whole_number
from dstackweb.web.progress.bars import DRAWN, Line
from dstackweb.web.progress.live import POLL_S
from dstackweb.wording.progress import meaning, state

ATTEMPTS = 8
"""Of a run that was tried again, so many of the newest are offered."""


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
        attempt = whole_number(request.GET.get("attempt")) or None
        return cls(request, selectors.find_run(request.project, run), run, attempt)

    def url(self, view: str = "", **query: str) -> str:
        """The address of its page, or of one beneath it: `wall`, `prefix`, `group`."""
        name = "-".join(filter(None, ("run" if self.run else "", "progress", view)))
        args = [self.request.project.name, *([self.called] if self.run else [])]
        query = {key: value for key, value in query.items() if value}
        if self.attempt:
            query["attempt"] = str(self.attempt)
        return reverse(f"web:{name}", args=args) + (f"?{urlencode(query)}" if query else "")

    def line(self, bar: progress.ProgressBar, *, had_failed: bool = False) -> Line:
        """A prefix's row: behind it are its groups, and of its failures what they said, or which runs failed."""
        failures = self.url("prefix", prefix=bar.name, show="failures" if self.run else "failed")
        return Line(bar, bar.name, self.url("prefix", prefix=bar.name), failures=failures, had_failed=had_failed)

    def lines(self, bars: list[progress.ProgressBar]) -> list[Line]:
        """Rows of prefixes; those whose failed tasks are all forgotten lead to what is remembered of them, too."""
        gone = [bar.id for bar in bars if bar.counts[TaskState.FORGOTTEN] and not bar.counts[TaskState.ERRED]]
        failed = progress.with_failures(gone) if self.run else set()
        return [self.line(bar, had_failed=bar.id in failed) for bar in bars]

    def overview(self, now: int) -> progress.ScopeProgress | None:
        """Its counters; None where nothing was told of yet."""
        if self.run is None:
            return progress.of_project(self.request.project.pk, now)
        return progress.of_run(self.run.pk, now, self.attempt)

    @property
    def attempts(self) -> list[tuple[int, str]]:
        """The newest attempts of a run that was tried again, each with its address."""
        if self.run is None or self.run.attempt < 2:
            return []
        last = self.run.attempt
        newest = range(max(1, last - ATTEMPTS + 1), last + 1)
        return [(n, Place(self.request, self.run, self.called, n).url()) for n in newest]

    def ended(self, over: progress.ScopeProgress) -> bool:
        """Whether nothing can change in these counters any more."""
        return over.ended and not over.bar.live and self._is_over(over.attempt)

    @property
    def stays_empty(self) -> bool:
        """Whether an attempt that told of no task can no longer tell of any."""
        return self._is_over(self.attempt)

    def _is_over(self, attempt: int | None) -> bool:
        if self.run is None:
            return False
        return self.run.status in ENDED or (attempt or self.run.attempt) < self.run.attempt

    def context(self) -> dict[str, Any]:
        """What all pages about it show."""
        return {
            "place": self,
            "run": self.run,
            "legend": [(one.value, state(one), meaning(one)) for one in (*DRAWN, TaskState.WAITING)],
            "states": states(),
            "poll_s": POLL_S,
            "waiting": selectors.counts(self.request.project)["submitted"],
        }


def states() -> list[tuple[str, str]]:
    """All states in the order in which a bar's numbers stand, with their words, for scripts."""
    return [(one.value, state(one)) for one in TaskState]
