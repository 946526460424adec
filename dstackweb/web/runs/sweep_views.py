"""The list of sweeps, one sweep with its outcomes, what people do with it, and a sweep on one line, as in the queue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _, ngettext
from django.views.decorators.http import require_safe

from dstackweb.accounts import access
from dstackweb.accounts.models import Project
from dstackweb.lib import exports
from dstackweb.lib.errors import Invalid
from dstackweb.lib.forms import whole_number
from dstackweb.runs.models import Run, Sweep
from dstackweb.runs.queue.folding import Folding, FoldKey
from dstackweb.runs.row_fields import QueuePageRow
from dstackweb.runs.states import RunStatus
from dstackweb.runs.sweeps import selectors, services
from dstackweb.runs.sweeps.creation import failed_runs
from dstackweb.runs.sweeps.selectors import SweepCounts, SweepRun, find_sweeps
from dstackweb.spec.array import Array
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.web.common.pages import PageRequest, done_here, fingerprint, polled, project_action, project_page
from dstackweb.web.gpus import alerts
from dstackweb.web.runs import details, rows
from dstackweb.web.runs.details import dependency_graph, graph_stamp
from dstackweb.wording import statuses, sweeps as words, tables
from dstackweb.wording.queue_filters import ALL, Filters

PER_PAGE = 100
FILTERS = ("submitted", "running", "failed", "done", "terminated")
"""Statuses by which the table is filtered; it has all indices without one."""


@project_page()
def sweeps_page(request: PageRequest) -> HttpResponse:
    version = alerts.list_version(request.project)
    return polled(request, "runs/sweeps.html", "runs/sweeps_list.html", version, lambda: _sweeps(request))


def _sweeps(request: PageRequest) -> dict[str, Any]:
    before = whole_number(request.GET.get("before")) or None
    found = selectors.newest_sweeps(request.project, PER_PAGE + 1, before)
    page = found[:PER_PAGE]
    following = page[-1].pk if len(found) > PER_PAGE else None
    return {"lines": sweep_lines(page), "before": before, "following": following}


@project_page()
def sweep_page(request: PageRequest, sweep: str) -> HttpResponse:
    found = selectors.find_sweep(request.project, sweep)
    version = fingerprint(found.pk, found.count.version, found.priority, found.ended_at)
    version += graph_stamp(found)
    return polled(request, "runs/sweep.html", "runs/sweep_body.html", version, lambda: _sweep(request, found))


def _sweep(request: PageRequest, sweep: Sweep) -> dict[str, Any]:
    chosen = request.GET.get("status", "")
    start = whole_number(request.GET.get("from"))
    if chosen in FILTERS:
        found = selectors.table_of_status(sweep, [RunStatus(chosen)], start, PER_PAGE + 1)
    else:
        chosen, found = "", selectors.table(sweep, start, PER_PAGE + 1)
    line, names = sweep_line(sweep), selectors.parameter_names(sweep)
    array = Array.model_validate(sweep.array)
    spec = EffectiveSpec.model_validate(sweep.spec).model_copy(update={"array": array, "priority": sweep.priority})
    may_change = access.may_change(request.role, sweep.user_id, request.user)
    return {
        "sweep": sweep,
        "line": line,
        "size": words.size(sweep.size, sweep.max_parallel),
        "state": line.state,
        "graph": dependency_graph(sweep),
        "names": names,
        "rows": [_row(row, names) for row in found[:PER_PAGE]],
        "start": start,
        "following": found[PER_PAGE].index if len(found) > PER_PAGE else None,
        "chosen": chosen,
        "chips": [("", _("All"), sweep.size)]
        + [(status, statuses.status(status), getattr(sweep.count, status)) for status in FILTERS],
        "settings": details.settings_of(spec, sweep.provenance),
        "may_change": may_change,
        "may_stop": may_change and sweep.ended_at is None and sweep.stopped_at is None,
        "may_retry": may_change and not sweep.is_stopping and failed_runs(sweep).exists(),
        "active": line.counts.waiting + line.counts.running,
        "max_priority": rows.max_priority(request),
    }


def _row(row: SweepRun, names: tuple[str, ...]) -> dict[str, Any]:
    run = row.run if isinstance(row.run, Run) else None
    return {
        "index": row.index,
        "name": row.name,
        "values": [row.parameters.get(name, "") for name in names],
        "run": run,
        "status": run.status if run else "",
        "outcome": words.outcome(row.status),
        "message": statuses.run_message(run) if run else "",
        "took": row.elapsed_s(timezone.now()),
    }


@project_action("member")
def stop(request: PageRequest, sweep: str) -> HttpResponse:
    found = services.stop(selectors.find_sweep(request.project, sweep), request.user, request.role)
    return done_here(request, _("Stopping %s") % found.name, *_page_of(request, sweep))


@project_action("member")
def release(request: PageRequest, sweep: str) -> HttpResponse:
    """Let a sweep that waits for others enter its queue."""
    found = services.release(selectors.find_sweep(request.project, sweep), request.user, request.role)
    return done_here(request, _("%s is in its queue") % found.name, *_page_of(request, sweep))


@project_action("member")
def retry(request: PageRequest, sweep: str) -> HttpResponse:
    """Create the failed runs once more."""
    found = services.retry(selectors.find_sweep(request.project, sweep), request.user, request.role)
    return done_here(request, _("Failed runs of %s are queued again") % found.name, *_page_of(request, sweep))


@project_action("member")
def set_priority(request: PageRequest, sweep: str) -> HttpResponse:
    try:
        priority = int(request.POST.get("priority", ""))
    except ValueError:
        raise Invalid.at("priority", msg=_("enter a whole number from 0 to 100")) from None
    found = services.set_priority(selectors.find_sweep(request.project, sweep), request.user, request.role, priority)
    active = found.count.pending + found.count.submitted
    text = ngettext("%(name)s: priority %(to)d, %(n)d run moved", "%(name)s: priority %(to)d, %(n)d runs moved", active)
    return done_here(request, text % {"name": found.name, "to": priority, "n": active}, *_page_of(request, sweep))


@require_safe
@project_page()
def export(request: PageRequest, sweep: str, form: str) -> HttpResponseBase:
    found = selectors.find_sweep(request.project, sweep)
    return exports.response(f"sweep-{found.name}", form, tables.sweep_columns(found), tables.sweep_table(found))


def _page_of(request: PageRequest, sweep: str) -> tuple[str, str, str]:
    return "web:sweep", request.project.name, sweep


SWEEPS_SHOWN = 8


class SweepSegment(NamedTuple):
    """A part of a bar: runs that are there, from a run on."""

    kind: str
    start: int
    width: int


class SweepLine(NamedTuple):
    sweep: Sweep
    counts: SweepCounts
    text: str
    state: str
    segments: list[SweepSegment]


def sweep_lines(sweeps: Iterable[Sweep]) -> list[SweepLine]:
    return [sweep_line(sweep) for sweep in sweeps]


def sweep_line(sweep: Sweep) -> SweepLine:
    counts = SweepCounts.of(sweep)
    return SweepLine(sweep, counts, words.counts(counts), words.state(sweep), list(_segments(counts)))


def _segments(counts: SweepCounts) -> Iterator[SweepSegment]:
    """What has ended first, then what runs, then what waits. What is to come is the rest of the bar."""
    start = 0
    ended = counts.terminated + counts.dropped + counts.removed
    for kind, width in (
        ("done", counts.done), ("failed", counts.failed), ("terminated", ended), ("running", counts.running),
        ("submitted", counts.waiting),
    ):  # fmt: skip
        if width:
            yield SweepSegment(kind, start, width)
        start += width


class FoldLine(NamedTuple):
    """A line of the queue that is a fold, or the first of an opened one (`is_open`), whose runs are all lines."""

    key: FoldKey
    runs: int
    line: SweepLine
    is_open: bool
    toggle: str
    """The address of the list with it opened or closed."""

    def cells(self, project: Project) -> dict[str, Any]:
        """What its row shows instead of its first run's values."""
        if self.is_open:
            return {"fold": self}
        sweep, key = self.line.sweep, str(self.key)
        counts = self.line.counts
        return {
            "fold": self,
            "pk": key,
            "token": key,
            "id": sweep.uid,
            "name": sweep.name,
            "url": reverse("web:sweep", args=[project.name, sweep.uid]),
            "stop": words.stops(counts.waiting + counts.running, counts.left),
            "hold": False,
        }


def fold_lines(
    rows: Sequence[QueuePageRow], lines: Mapping[int, int], folding: Folding | None, filters: Filters, page: int
) -> dict[int, FoldLine]:
    """Those among these rows that stand for `lines` runs or begin an opened fold, by run."""
    if folding is None:
        return {}
    keys = {row.pk: folding.key_of[row.pk] for row in rows if _is_fold(row.pk, lines, folding)}
    if not keys:
        return {}
    sweeps = {sweep.pk: sweep_line(sweep) for sweep in find_sweeps({key.sweep_id for key in keys.values()})}
    found, more = {}, {"page": page} if page > 1 else {}
    for pk, key in keys.items():
        if (line := sweeps.get(key.sweep_id)) is not None:  # else removed at this moment
            is_open = key.sweep_id in folding.opened
            runs = folding.sizes[key] if is_open else lines[pk]
            found[pk] = FoldLine(key, runs, line, is_open, filters.toggled(key.sweep_id).address(**more) or f"?{ALL}")
    return found


def _is_fold(pk: int, lines: Mapping[int, int], folding: Folding) -> bool:
    key = folding.key_of.get(pk)
    if key is not None and key.sweep_id in folding.opened:
        return pk in folding.heads and folding.sizes[key] > 1
    return lines[pk] > 1
