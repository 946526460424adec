"""The queue page: what waits, in its true order. What people do to it is in `move_views` and `queue_settings_views`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.http import HttpResponse
from django.urls import reverse
from django.utils.translation import gettext as _

from dstackweb.accounts.access import allows
from dstackweb.backends.models import Gpu
from dstackweb.runs import selectors, services
from dstackweb.runs.models import Allocation, Queue, QueueCount, Run
from dstackweb.runs.ordering import PRIORITY_MAX
from dstackweb.runs.states import PLACED, RunStatus
from dstackweb.scheduler.models import Reservation
from dstackweb.web import lists
from dstackweb.web.heard import heard
from dstackweb.web.pages import PageRequest, polled, project_page, shown
from dstackweb.web.queue_limits import limits

PER_PAGE = 50
SHORT_LIST = 8


@project_page()
def queue_page(request: PageRequest, queue: str = "default") -> HttpResponse:
    """The queue in its true order; also what polls of it get."""
    version = selectors.list_version(request.project)
    return polled(
        request,
        "web/queue.html",
        "web/queue_list.html",
        version,
        lambda: _context(request, queue_called(request, queue)),
    )


def queue_called(request: PageRequest, name: str) -> Queue:
    """The queue asked for. Every project has `default`, even before its first run."""
    return services.ensure_queue(request.project) if name == "default" else selectors.find_queue(request.project, name)


def fragment(request: PageRequest, queue: Queue, moved: Collection[int] = (), status: int = 200) -> HttpResponse:
    """The list as it is now, for the page that asked; whoever has no scripts is led back to it."""
    if not request.htmx:
        page = lists.number(request.GET.get("page"), least=1)
        return HttpResponse(status=303, headers={"Location": queue_url(queue) + (f"?page={page}" if page > 1 else "")})
    version = selectors.list_version(request.project)
    return shown(request, "web/queue_list.html", version, _context(request, queue, moved), status)


def _context(request: PageRequest, queue: Queue, moved: Collection[int] = ()) -> dict[str, Any]:
    page = lists.number(request.GET.get("page"), least=1)
    told = heard(request)  # before the list: what happens in between is told by the next poll
    counts = QueueCount.objects.get(queue=queue)
    rows = selectors.queue_rows(queue, limit=PER_PAGE, offset=(page - 1) * PER_PAGE)
    if not rows and page > 1:  # the queue got shorter than the page that was being looked at
        page = max(1, -(-counts.submitted // PER_PAGE))
        rows = selectors.queue_rows(queue, limit=PER_PAGE, offset=(page - 1) * PER_PAGE)
    head = rows if page == 1 else selectors.queue_rows(queue, limit=PER_PAGE)
    reserved = Reservation.objects.filter(run__queue=queue).first()
    lines = [lists.QueueLine.of(row, request, reserved) for row in rows]
    placed = counts.provisioning + counts.running + counts.terminating
    gpus_held = Allocation.objects.filter(job__run__queue=queue, gpu__isnull=False).count()
    return {
        "queue": queue,
        "queues": Queue.objects.filter(project=request.project),
        "counts": counts,
        "rows": lines,
        "says": _says(),
        "page": page,
        "pages": max(1, -(-counts.submitted // PER_PAGE)),
        "first_shown": (page - 1) * PER_PAGE + 1,
        "last_shown": (page - 1) * PER_PAGE + len(rows),
        "first": next((row for row in head if row.reason != "impossible"), None),
        "moved": moved,
        "placed": _short(queue, *PLACED),
        "pending": _short(queue, RunStatus.PENDING),
        "gpus_held": gpus_held,
        "gpus_total": Gpu.objects.filter(present=True).count(),
        "limits": limits(queue, request.user, placed, gpus_held),
        "heard": told,
        "runs_url": reverse("web:runs", args=[request.project.name]),
        "change_url": reverse("web:change", args=[request.project.name, queue.name]) + f"?page={page}",
        "may_pause": allows(request.role, "manager"),
        "may_submit": allows(request.role, "member"),
        "may_choose": any(line.may_change for line in lines),
        "max_priority": PRIORITY_MAX if allows(request.role, "manager") else request.project.member_max_priority,
        "waiting": selectors.counts(request.project)["submitted"],
    }


def _says() -> dict[str, str]:
    """What the controls of a row are called, once for all rows; `%s` is the run's name."""
    return {
        "choose": _("Select %s"),
        "move": _("Move %s"),
        "lower": _("Lower the priority of %s"),
        "priority": _("Priority of %s"),
        "raise": _("Raise the priority of %s"),
        "stop": _("Stop %s"),
        "stop_word": _("Stop"),
        "as_above": _("as above"),
        "priority_word": _("priority"),
    }


def _short(queue: Queue, *statuses: RunStatus) -> list[lists.RunLine]:
    runs = Run.objects.filter(project=queue.project_id, queue=queue)
    return [lists.RunLine.of(run) for run in selectors.newest(runs, SHORT_LIST, statuses)]


def queue_url(queue: Queue) -> str:
    """The address of a queue's page."""
    if queue.name == "default":
        return reverse("web:queue", args=[queue.project.name])
    return reverse("web:queue", args=[queue.project.name, queue.name])
