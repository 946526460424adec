"""The list of runs, one run, stopping it, and the profiles that runs can name."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from dstackweb.lib import exports
from dstackweb.lib.forms import whole_number
from dstackweb.profiles import services as profiles
from dstackweb.runs import dependencies, removal, rows, run_places, selectors, services
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.row_fields import RunPageRow
from dstackweb.runs.run_places import silent_hosts
from dstackweb.runs.service_health import states_in
from dstackweb.runs.states import ENDED, PLACED, WAITING, RunStatus
from dstackweb.runs.sweeps import selectors as sweep_selectors
from dstackweb.scheduler.cloud.instances import awaits_usage
from dstackweb.spec.effective import value_text
from dstackweb.web.common.pages import (
    PageRequest,
    done,
    done_here,
    fingerprint,
    polled,
    project_action,
    project_page,
    reader_zone,
)
from dstackweb.web.gpus import alerts
from dstackweb.web.gpus.run_panel import Panel, PanelFilters, has_gpu_charts, newest_sample
from dstackweb.web.progress import scope as progress_scope
from dstackweb.web.progress.scope import Card, find_card
from dstackweb.web.queue import past_views
from dstackweb.web.runs import details, interactive_views, output_views, rows as lists
from dstackweb.web.runs.details import dependency_graph, graph_stamp
from dstackweb.web.runs.sweep_views import SWEEPS_SHOWN, sweep_lines
from dstackweb.web.runs.why_views import place_in_queue
from dstackweb.wording import events as event_words, statuses, tables, waiting

PER_PAGE = 50
SHOWN_AT_ONCE = 200
"""Most jobs and events on a run's page: each poll renders them."""
SHOWN = {
    "active": ("pending", "submitted", "provisioning", "running", "terminating"),
    **{status.value: (status.value,) for status in RunStatus if status in ENDED},
}


@project_page()
def runs_page(request: PageRequest) -> HttpResponse:
    """Newest runs first, or oldest, filtered by status, name, member, queue and date; polls get the fragment."""
    version = f"{alerts.list_version(request.project)}.{fingerprint(states_in(request.project))}"
    return polled(request, "runs/runs.html", "runs/runs_list.html", version, lambda: _list(request))


def _list(request: PageRequest) -> dict[str, Any]:
    chosen, filters = request.GET.get("status", ""), _filters(request)
    before = whole_number(request.GET.get("before")) or None
    found, following = rows.newest_rows(request.project, **filters, before=before, limit=PER_PAGE, kind=RunPageRow)
    counts = selectors.counts(request.project)
    narrowing = ("user", "queue", "since", "until")
    return {
        "rows": lists.run_cells(found),
        "following": following,
        "before": before,
        "chosen": chosen,
        "q": filters["text"],
        "member": filters["user"],
        "queue": filters["queue"],
        "oldest_first": filters["oldest_first"],
        "members": selectors.submitters(request.project),
        "queues": list(Queue.objects.filter(project=request.project).order_by("name").values_list("name", flat=True)),
        "narrowed": any(filters[name] for name in ("text", *narrowing)),
        "filtered": any(filters[name] for name in ("oldest_first", *narrowing)),
        "chips": [("", _("All"), sum(counts.values()))]
        + [
            (key, _("active") if key == "active" else statuses.status(key), sum(counts[status] for status in shown))
            for key, shown in SHOWN.items()
        ],
        "waiting": counts["submitted"],
        "sweeps": []
        if before
        else sweep_lines(sweep_selectors.newest_sweeps(request.project, SWEEPS_SHOWN, active=True)),
    }


@require_safe
@project_page()
def export(request: PageRequest, form: str) -> HttpResponseBase:
    found = tables.run_table(request.project, timezone.now(), **_filters(request))
    return exports.response(f"runs-{request.project.name}", form, tables.RUN_COLUMNS, found)


def _filters(request: PageRequest) -> dict[str, Any]:
    """What the address selects, as `rows.newest_rows` takes it."""
    member = request.GET.get("member", "")
    if request.GET.get("mine") == "yes":  # as links made before there was a choice of members say it
        member = request.user.username
    return {
        "statuses": SHOWN.get(request.GET.get("status", ""), ()),
        "user": member,
        "text": request.GET.get("q", "").strip(),
        "queue": request.GET.get("queue", ""),
        "since": _midnight(request, "from"),
        "until": _midnight(request, "to", days_later=1),
        "oldest_first": request.GET.get("sort") == "oldest",
    }


def _midnight(request: PageRequest, name: str, days_later: int = 0) -> dt.datetime | None:
    """When a day of the query, or one after it, begins for the reader; None without one, or for text that is no day."""
    try:
        day = dt.date.fromisoformat(request.GET.get(name, "")) + dt.timedelta(days=days_later)
        return dt.datetime.combine(day, dt.time(), reader_zone(request)).astimezone(dt.UTC)
    except (ValueError, OverflowError):
        return None


@project_page()
def run_page(request: PageRequest, run: str) -> HttpResponse:
    """One run; polls get the fragment. The page of a waiting run also changes with its queue."""
    found = selectors.find_run(request.project, run)
    version = f"{found.pk}.{found.version}"
    if found.status in WAITING:
        version += f".{selectors.list_version(request.project)}"
    elif found.status == RunStatus.PROVISIONING:
        version += f".{details.starting(found)}"
    if found.status in PLACED:
        version += f".{fingerprint(silent_hosts(found))}{interactive_views.stamp(found)}"
    elif found.status in ENDED and awaits_usage(found, timezone.now()):
        version += ".unsettled"
    version += graph_stamp(found)
    card = find_card(request, found)  # it renews itself, once it is there
    if card:
        version += ".tasks"
    context, parts = lambda: _run(request, found, card), lambda: _parts(request, found, card)
    return polled(request, "runs/run.html", "runs/run_body.html", version, context, parts)


def _parts(request: PageRequest, run: Run, card: Card | None) -> dict[str, str]:
    """What changes with the parts of a run's page that renew themselves: its tasks, its GPUs and its log."""
    parts = {"run-log": selectors.log_stamp(run)}
    if card:
        parts["run-tasks"] = str(card.totals.version)
    if has_gpu_charts(run) and request.GET.get("range", "1h") == "1h":
        parts["run-gpus"] = newest_sample(run)
    return parts


def _run(request: PageRequest, run: Run, card: Card | None) -> dict[str, Any]:
    jobs, events = selectors.jobs_of(run), selectors.events_of(run, SHOWN_AT_ONCE + 1)
    blockers = [waiting.reason(*found) for found in selectors.blockers_of(run)]
    stands, now = place_in_queue(run), timezone.now()
    may_change = lists.may_change(run, request.user, request.role)
    steps = details.stages(run, jobs)
    panel = Panel(run, jobs, PanelFilters.of(request), now) if has_gpu_charts(run) else None
    return {
        "run": run,
        "gpus": panel is not None,
        **(card.context() if card else {}),
        "states": progress_scope.states(),
        **(panel.context(may_change) if panel and panel.job else {}),
        **interactive_views.of_run(run, jobs, may_change, request.user.ssh_keys.exists()),
        "recurrence": details.recurrence(run),
        **interactive_views.of_service(run, request.may["member"]),
        **output_views.section(run, jobs),
        "jobs": [details.node_line(job) for job in jobs[:SHOWN_AT_ONCE]],
        "more_jobs": len(jobs) > SHOWN_AT_ONCE,
        "attempts": len({job.attempt for job in jobs}),
        "steps": steps,
        "stage": details.newest(steps),
        "past_url": past_views.address_of(run, jobs, now),
        "graph": dependency_graph(run),
        "waits_text": statuses.run_message(run),
        "end_notice": details.end_notice(run, jobs),
        "silent": statuses.silent(run, silent_hosts(run, jobs)),
        "place": run_places.placement_summary([job for job in jobs if job.attempt == run.attempt]),
        "why": blockers[0] if blockers else None,
        "also": blockers[1:],
        "stands": stands,
        "position": stands.position if stands else None,
        "events": event_words.grouped(events[:SHOWN_AT_ONCE], run.spec["nodes"]),
        "more_events": len(events) > SHOWN_AT_ONCE,
        "shown_at_once": SHOWN_AT_ONCE,
        "settings": details.settings(run),
        "cost": details.cost(run, jobs),
        "now": now,
        "over": run.status in ENDED,
        "settled": run.status in ENDED and not awaits_usage(run, now),
        "waits": run.status in WAITING,
        "has_other_queues": run.status in WAITING
        and Queue.objects.filter(project=request.project).exclude(pk=run.queue_id).exists(),
        "may_change": may_change,
        "etag": services.etag(run),
        "max_priority": lists.max_priority(request),
    }


@project_action("member")
def stop(request: PageRequest, run: str) -> HttpResponse:
    """Stop a run gracefully, or at once with `abort`."""
    abort = request.POST.get("abort") == "yes"
    before = selectors.find_run(request.project, run)
    found = services.stop(before, request.user, request.role, abort=abort)
    if before.status in ENDED:  # its page has no polls any more
        return done(request, _("Schedule of %s ended") % found.name, "web:run", request.project.name, run)
    text = _("%s ended") if found.status in ENDED else _("Stopping %s")
    return done_here(request, text % found.name, "web:run", request.project.name, run)


@project_action("member")
def release(request: PageRequest, run: str) -> HttpResponse:
    """Let a run that waits for others enter its queue."""
    found = dependencies.release(selectors.find_run(request.project, run), request.user, request.role)
    text = _("%s is in its queue") % found.name
    return done_here(request, text, "web:run", request.project.name, run)


@project_action("member")
def delete(request: PageRequest, run: str) -> HttpResponse:
    found = selectors.find_run(request.project, run)
    removal.delete(found, request.user, request.role)
    return done(request, _("%s deleted") % found.name, "web:runs", request.project.name)


@project_page()
def profiles_page(request: PageRequest) -> HttpResponse:
    found = [
        (profile, [(key, value_text(value), isinstance(value, dict)) for key, value in profile.settings.items()])
        for profile in profiles.visible(request.project)
    ]
    context = {"profiles": found, "chosen": profiles.default(request.project)}
    return render(request, "runs/profiles.html", context)
