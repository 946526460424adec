"""The queue page: what waits, in its true order, and what people do to it."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST

from dstackweb.accounts.access import allows
from dstackweb.backends.models import Gpu
from dstackweb.lib.errors import Stale
from dstackweb.runs import selectors, services
from dstackweb.runs.models import Allocation, Queue, QueueCount, Run
from dstackweb.runs.ordering import PRIORITY_MAX
from dstackweb.runs.states import PLACED, RunStatus
from dstackweb.web import lists
from dstackweb.web.pages import PageRequest, notice, polled, project_page, sentence, shown

PER_PAGE = 50
SHORT_LIST = 8


@project_page()
def queue_page(request: PageRequest, queue: str = "default") -> HttpResponse:
    """The queue in its true order; also what polls of it get."""
    version = selectors.list_version(request.project)
    return polled(
        request, "web/queue.html", "web/queue_list.html", version, lambda: _context(request, _queue(request, queue))
    )


def _queue(request: PageRequest, name: str) -> Queue:
    """The queue asked for. Every project has `default`, even before its first run."""
    return services.ensure_queue(request.project) if name == "default" else selectors.find_queue(request.project, name)


def _context(request: PageRequest, queue: Queue, moved: int | None = None) -> dict[str, Any]:
    page = lists.number(request.GET.get("page"), least=1)
    counts = QueueCount.objects.get(queue=queue)
    rows = selectors.queue_rows(queue, limit=PER_PAGE, offset=(page - 1) * PER_PAGE)
    if not rows and page > 1:  # the queue got shorter than the page that was being looked at
        page = max(1, -(-counts.submitted // PER_PAGE))
        rows = selectors.queue_rows(queue, limit=PER_PAGE, offset=(page - 1) * PER_PAGE)
    head = rows if page == 1 else selectors.queue_rows(queue, limit=PER_PAGE)
    return {
        "queue": queue,
        "queues": Queue.objects.filter(project=request.project),
        "counts": counts,
        "rows": [lists.QueueLine.of(row, request) for row in rows],
        "page": page,
        "pages": max(1, -(-counts.submitted // PER_PAGE)),
        "first": next((row for row in head if row.reason != "impossible"), None),
        "moved": moved,
        "placed": _short(queue, *PLACED),
        "pending": _short(queue, RunStatus.PENDING),
        "gpus_held": Allocation.objects.filter(job__run__queue=queue, gpu__isnull=False).count(),
        "gpus_total": Gpu.objects.filter(present=True).count(),
        "may_pause": allows(request.role, "manager"),
        "may_submit": allows(request.role, "member"),
        "max_priority": PRIORITY_MAX if allows(request.role, "manager") else request.project.member_max_priority,
        "waiting": selectors.counts(request.project)["submitted"],
    }


def _short(queue: Queue, *statuses: RunStatus) -> list[lists.RunLine]:
    runs = Run.objects.filter(project=queue.project_id, queue=queue)
    return [lists.RunLine.of(run) for run in selectors.newest(runs, SHORT_LIST, statuses)]


@require_POST
@project_page("member")
def set_priority(request: PageRequest, run: str) -> HttpResponse:
    """Change a run's priority as its reader saw it; a stale one gets 412, the list as it is, and what changed."""
    found = selectors.find_run(request.project, run)
    before = selectors.position(found)
    try:
        found = services.set_priority(
            found, request.user, request.role, lists.priority(request.POST.get("priority")), request.POST.get("etag")
        )
    except Stale as stale:
        return notice(_fragment(request, found.queue, status=stale.status), sentence(stale.detail), "error")
    response = _fragment(request, found.queue, moved=found.pk)
    after = selectors.position(found)
    numbers = {"run": found.name, "priority": found.priority, "before": before, "after": after}
    if after is None or before == after:
        return notice(response, _("%(run)s has priority %(priority)d now") % numbers)
    return notice(response, _("%(run)s has priority %(priority)d now: from position %(before)d to %(after)d") % numbers)


def _fragment(request: PageRequest, queue: Queue, moved: int | None = None, status: int = 200) -> HttpResponse:
    """The list as it is now, for the page that asked; whoever has no scripts is led back to it."""
    if not request.htmx:
        return HttpResponse(status=303, headers={"Location": queue_url(queue)})
    version = selectors.list_version(request.project)
    return shown(request, "web/queue_list.html", version, _context(request, queue, moved), status)


@require_POST
@project_page("manager")
def set_paused(request: PageRequest, queue: str) -> HttpResponse:
    """Pause or resume a queue."""
    found = services.set_paused(_queue(request, queue), request.user, request.role, request.POST.get("paused") == "yes")
    text = _("Queue %s is paused: nothing starts, running runs go on") if found.paused else _("Queue %s goes on")
    return notice(_fragment(request, found), text % found.name)


def queue_url(queue: Queue) -> str:
    """The address of a queue's page."""
    if queue.name == "default":
        return reverse("web:queue", args=[queue.project.name])
    return reverse("web:queue", args=[queue.project.name, queue.name])
