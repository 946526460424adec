"""The list of sweeps, one sweep with its runs' parameters and outcomes, and what people do with it."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_POST, require_safe

from dstackweb.accounts import access
from dstackweb.lib import exports
from dstackweb.lib.errors import Invalid
from dstackweb.lib.forms import whole_number
from dstackweb.runs.models import Run, Sweep
from dstackweb.runs.states import RunStatus
from dstackweb.runs.sweeps import selectors, services
from dstackweb.runs.sweeps.creation import failed_runs
from dstackweb.runs.sweeps.selectors import SweepRun
from dstackweb.spec.array import Array
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.web.common.pages import PageRequest, done_here, fingerprint, polled, project_page
from dstackweb.web.gpus import alerts
from dstackweb.web.runs import details, rows
from dstackweb.web.runs.dependency_graph import dependency_graph, graph_stamp
from dstackweb.web.runs.sweep_lines import sweep_line, sweep_lines
from dstackweb.wording import statuses, tables
from dstackweb.wording import sweeps as words

PER_PAGE = 100
FILTERS = ("submitted", "running", "failed", "done", "terminated")
"""Statuses by which the table is filtered; it has all indices without one."""


@project_page()
def sweeps_page(request: PageRequest) -> HttpResponse:
    """All sweeps, newest first; polls get the fragment."""
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
    """One sweep; polls get the fragment."""
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


@require_POST
@project_page("member")
def stop(request: PageRequest, sweep: str) -> HttpResponse:
    found = services.stop(selectors.find_sweep(request.project, sweep), request.user, request.role)
    return done_here(request, _("Stopping %s") % found.name, _address(request, sweep))


@require_POST
@project_page("member")
def release(request: PageRequest, sweep: str) -> HttpResponse:
    """Let a sweep that waits for others enter its queue."""
    found = services.release(selectors.find_sweep(request.project, sweep), request.user, request.role)
    return done_here(request, _("%s is in its queue") % found.name, _address(request, sweep))


@require_POST
@project_page("member")
def retry(request: PageRequest, sweep: str) -> HttpResponse:
    """Create the failed runs once more."""
    found = services.retry(selectors.find_sweep(request.project, sweep), request.user, request.role)
    return done_here(request, _("Failed runs of %s are queued again") % found.name, _address(request, sweep))


@require_POST
@project_page("member")
def set_priority(request: PageRequest, sweep: str) -> HttpResponse:
    try:
        priority = int(request.POST.get("priority", ""))
    except ValueError:
        raise Invalid.at("priority", msg=_("enter a whole number from 0 to 100")) from None
    found = services.set_priority(selectors.find_sweep(request.project, sweep), request.user, request.role, priority)
    active = found.count.pending + found.count.submitted
    text = ngettext("%(name)s: priority %(to)d, %(n)d run moved", "%(name)s: priority %(to)d, %(n)d runs moved", active)
    return done_here(request, text % {"name": found.name, "to": priority, "n": active}, _address(request, sweep))


@require_safe
@project_page()
def export(request: PageRequest, sweep: str, form: str) -> HttpResponseBase:
    """All runs of a sweep with their parameters."""
    found = selectors.find_sweep(request.project, sweep)
    return exports.response(f"sweep-{found.name}", form, tables.sweep_columns(found), tables.sweep_table(found))


def _address(request: PageRequest, sweep: str) -> str:
    return reverse("web:sweep", args=[request.project.name, sweep])
