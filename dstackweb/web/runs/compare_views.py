"""Two runs side by side: settings, times, outcome, and the ends of their logs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.lib.errors import Gone
from dstackweb.lib.text import without_escapes
from dstackweb.runs import comparison, rows, selectors
from dstackweb.runs.models import Run
from dstackweb.runs.row_fields import RunRow
from dstackweb.runs.states import JobStatus
from dstackweb.web.common.pages import PageRequest, project_page, sentence
from dstackweb.wording import statuses, units

RUNS_OFFERED = 50
LOG_LINES = 40
LOG_BYTES = 1 << 16
PARTS = {
    "waited_s": gettext_lazy("Waited"),
    "starting_s": gettext_lazy("Started in"),
    "ran_s": gettext_lazy("Ran"),
    "total_s": gettext_lazy("In all"),
}
"""Durations of a side, in their order."""


class Fact(NamedTuple):
    """A row of both runs; an empty value is shown as a dash."""

    label: str
    left: str
    right: str

    @property
    def differs(self) -> bool:
        return self.left != self.right


@dataclass(frozen=True)
class LogEnd:
    """The last lines of a run's log, of the node that failed first if one did; `trouble` says why there are none."""

    run: Run
    node: int
    text: str
    trouble: str


@project_page()
def compare_page(request: PageRequest) -> HttpResponse:
    """The runs named by `run`, given twice; of one alone also the run before of its name. Otherwise a choice."""
    names = [name for name in request.GET.getlist("run") if name]
    pair = sorted(_pair(request, names), key=lambda run: run.pk)
    context: dict[str, Any] = {
        "chosen": [str(run.uid) for run in pair],
        "offered": _offered(request, pair),
        "too_many": len(names) > 2,
    }
    if len(pair) == 2:
        left, right = pair
        found = comparison.compare(left, right, timezone.now())
        context |= {
            "left": found.left,
            "right": found.right,
            "sides": (found.left, found.right),
            "facts": list(_facts(found)),
            "different": [one for one in found.settings if one.differs],
            "equal": [one for one in found.settings if not one.differs],
            "logs": [_log_end(run) for run in pair],
            "lines": LOG_LINES,
        }
    return render(request, "runs/compare.html", context)


def _pair(request: PageRequest, names: list[str]) -> list[Run]:
    """The first two runs of these names; of one alone also the one before of its name, where there is one."""
    found = selectors.find_runs(request.project, names[:2])
    before = comparison.previous(found[0]) if len(found) == 1 else None
    return [*found, before] if before else found


def _offered(request: PageRequest, chosen: list[Run]) -> list[tuple[str, str]]:
    """The ids and texts of runs to choose from: the newest, and those chosen."""
    newest, _more = rows.newest_rows(request.project, limit=RUNS_OFFERED, kind=RunRow)
    found = {row.id: (row.name, row.status) for row in newest}
    found |= {str(run.uid): (run.name, run.status) for run in chosen}
    return [(uid, f"{name} · {statuses.status(status)} · {uid[:8]}") for uid, (name, status) in found.items()]


def _facts(found: comparison.Comparison) -> Iterator[Fact]:
    sides = found.left, found.right
    yield Fact(_("User"), *(side.run.user.get_username() for side in sides))
    for part, label in PARTS.items():
        seconds = [getattr(side, part) for side in sides]
        yield Fact(str(label), *("" if value is None else units.elapsed(value) for value in seconds))
    yield Fact(_("Outcome"), *(_outcome(side.run) for side in sides))
    yield Fact(_("Attempts"), *(str(side.run.attempt) for side in sides))
    yield Fact(_("Place"), *(side.place for side in sides))
    if any(side.cost for side in sides):
        yield Fact(_("Cost"), *(units.dollars(side.cost) if side.cost else "" for side in sides))


def _outcome(run: Run) -> str:
    return statuses.run_message(run) or statuses.termination(run.termination_reason) or ""


def _log_end(run: Run) -> LogEnd:
    failed = run.jobs.filter(attempt=run.attempt, status=JobStatus.FAILED).order_by("ended_at", "node").first()
    node = failed.node if failed else 0
    try:
        part = selectors.log_part(run, node=node, tail=LOG_LINES, limit=LOG_BYTES)
        if part.next_offset < part.size:  # long lines
            part = selectors.log_part(run, node=node, offset=part.size - LOG_BYTES, limit=LOG_BYTES)
    except Gone as error:
        return LogEnd(run, node, "", sentence(error.detail))
    text = without_escapes(part.data.decode(errors="replace"))
    return LogEnd(run, node, text, "" if text else _("No output."))
