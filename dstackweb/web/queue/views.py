"""The queue page: waiting runs in order, usage of the limits, members' shares, and announcements for screen readers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from django.db.models import Exists, OuterRef
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils import timezone
from django.utils.safestring import SafeString
from django.utils.translation import get_language, gettext as _
from django.views.decorators.http import require_safe

from dstackweb.accounts import saved_views
from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Gpu
from dstackweb.lib import exports
from dstackweb.lib.forms import whole_number
from dstackweb.runs import rows as run_rows, selectors, services
from dstackweb.runs.codes import RunEventKind, WaitReason
from dstackweb.runs.models import Queue, QueueCount, Run, RunEvent, Sweep
from dstackweb.runs.queue import member_shares
from dstackweb.runs.queue.folding import Folding
from dstackweb.runs.queue.listing import FRONT, folding_of, page_of
from dstackweb.runs.queue.ordering import HOUR_MS
from dstackweb.runs.row_fields import QueuePageRow, RunPageRow
from dstackweb.runs.states import PLACED, RunStatus
from dstackweb.runs.sweeps.selectors import newest_sweeps
from dstackweb.scheduler.models import Reservation
from dstackweb.scheduler.passes.loading import usage_of
from dstackweb.scheduler.placement.limits import QueueUsage
from dstackweb.web.cloud import instance_views
from dstackweb.web.common.pages import PageRequest, polled, project_page, queue_url, shown
from dstackweb.web.gpus import alerts
from dstackweb.web.queue.snapshot import snapshot
from dstackweb.web.runs import rows as lists
from dstackweb.web.runs.sweep_views import SWEEPS_SHOWN, fold_lines, sweep_lines
from dstackweb.wording import events as event_words, fair_share as words, tables
from dstackweb.wording.queue import borrowed, setting
from dstackweb.wording.queue_filters import ALL, COLUMNS, EVERY, NAME, SHOWN, Filters, Front, Page
from dstackweb.wording.units import duration

PER_PAGE = 25
SHORT_LIST = 8
ANNOUNCED_HEADER = "DW-Announced"
ANNOUNCED_MOST = 5
LOOK_BACK = 5000
"""Events searched at most; after a long absence only the newest are announced."""
ANNOUNCED_KINDS = (
    *(status.value for status in RunStatus if status != RunStatus.SUBMITTED),
    RunEventKind.RETRY,
    RunEventKind.REQUEUED,
    RunEventKind.DISPLACED,
    RunEventKind.RETURNED,
    RunEventKind.UTILIZATION_NOTICE,
    RunEventKind.INACTIVITY_NOTICE,
)


@project_page()
def queue_page(request: PageRequest, queue: str = "default") -> HttpResponse:
    """The waiting runs in order; polls get the fragment. Without any filter, the reader's default view."""
    views = [] if request.htmx else saved_views.seen(request.project, request.user)
    default = next((view for view in views if view.is_default), None)
    if default and not request.GET:
        return redirect(f"{queue_url(request.project, queue)}?{default.query}")
    version = alerts.list_version(request.project)

    def context() -> dict[str, Any]:
        return {**_context(request, queue, version), "views": views, "default_view": default}

    return polled(request, "queue/queue.html", "queue/list.html", version, context)


@require_safe
@project_page()
def export(request: PageRequest, queue: str, form: str) -> HttpResponseBase:
    found = services.find_queue(request.project, queue)
    return exports.response(f"queue-{found.name}", form, tables.QUEUE_COLUMNS, tables.queue_table(found))


def fragment(request: PageRequest, queue: Queue, moved: Collection[int] = (), status: int = 200) -> HttpResponse:
    """The current list as a fragment; without scripts, a redirect to the page."""
    if not request.htmx:
        page, filters = whole_number(request.GET.get("page"), least=1), Filters.read(request.GET)
        query = filters.address(page=page) if page > 1 else filters.address() or f"?{ALL}"
        return HttpResponse(status=303, headers={"Location": queue_url(request.project, queue.name) + query})
    version = alerts.list_version(request.project)
    return shown(request, "queue/list.html", version, _context(request, queue.name, version, moved), status)


def _counts(project: Project, name: str) -> tuple[QueueCount, list[QueueCount]]:
    """The counters of this queue and of all queues of the project by name, each with its queue."""
    sweeps = {"has_sweeps": Exists(Sweep.objects.filter(queue=OuterRef("pk"), ended_at=None))}
    counts = QueueCount.objects.select_related("queue").annotate(**sweeps)
    every = list(counts.filter(queue__project=project).order_by("queue__name"))
    found = next((one for one in every if one.queue.name == name), None)
    if found is None:
        found = counts.get(queue=services.find_queue(project, name))
        every.append(found)
    return found, every


def _context(request: PageRequest, name: str, version: str, moved: Collection[int] = ()) -> dict[str, Any]:
    """What the list and its page need. Polls share what they read; pages, and what an action answers, are read anew."""
    page, filters = whole_number(request.GET.get("page"), least=1), Filters.read(request.GET)
    news = announcements(request)  # before the list, so that the next poll has what happens in between
    mine: dict[str, Any] = {"announcements": news, "max_priority": lists.max_priority(request)}
    if moved or not request.htmx:
        values = _values(request.project, name, page, filters)
        return {**values, **mine, "body": _body(request, values, moved)}
    key = request.project.pk, name, page, filters, get_language()
    found = snapshot(key, version, lambda: _values(request.project, name, page, filters))
    own = request.user.pk if any(row.user_id == request.user.pk for row in found.values["queue_rows"]) else None
    reader = request.role, own, tuple(_limits(request, found.values))
    return {**found.values, **mine, "body": found.body(reader, lambda: _body(request, found.values))}


def _body(request: PageRequest, values: dict[str, Any], moved: Collection[int] = ()) -> SafeString:
    """The list for readers like this one; forms around it have what is theirs alone."""
    cells = lists.queue_cells(values["queue_rows"], request, values["reserved"], moved)
    for row, cell in zip(values["queue_rows"], cells, strict=True):
        cell["heading"] = values["headings"].get(row.pk)
        if (fold := values["folds"].get(row.pk)) is not None:
            cell.update(first=row.id, **fold.cells(request.project))
    mine = {
        "rows": cells,
        "span": 3 + request.may["member"] + len(values["shown"].keys() - {"reason"}),
        "may_choose": any(row["may_change"] for row in cells),
        "limits": _limits(request, values),
        "max_priority": lists.max_priority(request),
    }
    return render_to_string("queue/body.html", {**values, **mine}, request)


def _limits(request: PageRequest, values: dict[str, Any]) -> list[Limit]:
    return [limit for limit in usage(values["queue"], request.user, values["held"]) if limit.most is not None]


def _values(project: Project, name: str, page: int, filters: Filters) -> dict[str, Any]:
    """What all readers of a queue see."""
    counts, of_all = _counts(project, name)
    queue = counts.queue
    front = Front.read(queue, filters)
    has_sweeps = any(one.has_sweeps for one in of_all)  # whose runs may be in any queue
    folding = folding_of(queue, filters.opened) if has_sweeps and filters.folds else None
    rows, total, lines, headings, stands_for = _page(queue, front, filters, page, counts.submitted, folding)
    if not rows and page > 1:  # the list got shorter than the page that was being looked at
        page = max(1, -(-lines // PER_PAGE))
        rows, total, lines, headings, stands_for = _page(queue, front, filters, page, counts.submitted, folding)
    head = rows if page == 1 and not filters.arranges else run_rows.queue_rows(queue, limit=PER_PAGE)
    held = usage_of(queue)
    folds = fold_lines(rows, stands_for, folding, filters, page)
    in_list = {fold.key.sweep_id for fold in folds.values()}
    active = newest_sweeps(project, SWEEPS_SHOWN, active=True, queue=queue) if counts.has_sweeps else []
    now = timezone.now()
    change = reverse("web:change", args=[project.name, queue.name])
    pause = reverse("web:pause", args=[project.name, queue.name])
    return {
        "queue": queue,
        "queues": [one.queue for one in of_all],
        "counts": counts,
        "queue_rows": rows,
        "sweeps": [line for line in sweep_lines(active) if line.sweep.pk not in in_list],
        "reserved": {row.run_id: row for row in Reservation.kept()},
        "filters": filters,
        "filter_query": filters.saved.address().removeprefix("?"),
        "folds": folds,
        "fold_all_url": filters._replace(expand=() if filters.expand else (EVERY,)).address() or f"?{ALL}",
        "may_fold": folding is not None or bool(filters.expand),
        "fields": front.fields(filters),
        "shown": filters.shown,
        "columns": COLUMNS,
        "usual_columns": ",".join((NAME, *SHOWN)),
        "chips": front.chips(filters),
        "headings": headings,
        "searched": FRONT if counts.submitted > FRONT else None,
        "page": page,
        "pages": max(1, -(-lines // PER_PAGE)),
        "total": total,
        "lines": lines,
        "previous_page": filters.address(page=page - 1),
        "next_page": filters.address(page=page + 1),
        "first_shown": (page - 1) * PER_PAGE + 1,
        "last_shown": (page - 1) * PER_PAGE + len(rows),
        "first": next((row for row in head if row.reason != WaitReason.IMPOSSIBLE), None),
        "placed": _newest_cells(queue, counts, *PLACED),
        "pending": _newest_cells(queue, counts, RunStatus.PENDING),
        "held": held,
        "borrowed": borrowed_text(queue, held),
        "gpus_held": held.gpus[queue.pk, None],
        "gpus_total": Gpu.objects.filter(present=True).count(),
        "shares": share_bars(queue, most=SHORT_LIST),
        "month": instance_views.this_month(project, now) if project.monthly_budget is not None else None,
        "now": now,
        "runs_url": reverse("web:runs", args=[project.name]),
        "queue_url": queue_url(project, queue.name),
        "columns_address": filters.cleared.address(),
        "all_url": f"{queue_url(project, queue.name)}?{ALL}",
        "cleared_url": queue_url(project, queue.name) + (filters.cleared.address() or f"?{ALL}"),
        "change_url": change + filters.address(page=page),
        "pause_url": pause + filters.address(page=page),
        "waiting": sum(one.submitted for one in of_all),
    }


def _page(queue: Queue, front: Front, filters: Filters, page: int, waiting: int, folding: Folding | None) -> Page:
    offset = (page - 1) * PER_PAGE
    if filters.arranges:
        return front.page(queue, filters, PER_PAGE, offset, folding)
    if folding is None:
        return Page(run_rows.queue_page_rows(queue, PER_PAGE, offset, front.reasons), waiting, waiting, {}, {})
    positions = page_of(queue, folding, PER_PAGE, offset)
    rows = run_rows.queue_rows_at(queue, positions, front.reasons, kind=QueuePageRow)
    return Page(rows, waiting, waiting - len(folding.hidden), {}, folding.stands_for(positions))


def _newest_cells(queue: Queue, counts: QueueCount, *statuses: RunStatus) -> list[dict[str, Any]]:
    """The newest runs in these statuses. Statuses with a count of 0 are not queried."""
    there = [status for status in statuses if getattr(counts, status.value)]
    runs = Run.objects.filter(project=queue.project_id, queue=queue)
    found = selectors.newest(runs, SHORT_LIST, there) if there else []
    return lists.run_cells(run_rows.run_rows(found, RunPageRow))


def borrowed_text(queue: Queue, held: QueueUsage) -> str:
    """`2 GPUs borrowed from eval`, of a queue in a cohort; empty without any."""
    gpus, lenders = held.borrowed(queue.pk)
    names = Queue.objects.filter(pk__in=lenders).order_by("name").values_list("name", flat=True) if lenders else ()
    return borrowed(gpus, list(names))


class Limit(NamedTuple):
    """One limit and its usage; `most` None means no limit."""

    name: str
    used: int
    most: int | None
    text: str

    @property
    def label(self) -> str:
        return setting(self.name)

    @property
    def full(self) -> bool:
        return self.most is not None and self.used >= self.most


def usage(queue: Queue, user: User, placed: QueueUsage) -> list[Limit]:
    """All four limits, set or not; the per-member ones with the reader's usage."""
    everyone, own = (queue.pk, None), (queue.pk, user.pk)
    each = (
        ("max_running", placed.runs[everyone], _("%(used)d of %(most)d running")),
        ("max_gpus", placed.gpus[everyone], _("%(used)d of %(most)d GPUs")),
        ("max_running_per_user", placed.runs[own], _("you: %(used)d of %(most)d running")),
        ("max_gpus_per_user", placed.gpus[own], _("you: %(used)d of %(most)d GPUs")),
    )
    return [_limit(name, used, getattr(queue, name), text) for name, used, text in each]


def _limit(name: str, used: int, most: int | None, text: str) -> Limit:
    return Limit(name, used, most, str(used) if most is None else text % {"used": used, "most": most})


class Announcements(NamedTuple):
    """`last` is the newest event there is; `lines` those that the reader does not know yet."""

    last: int
    lines: Sequence[str]


def announcements(request: PageRequest) -> Announcements:
    """What others or the scheduler did to the reader's runs in this project, and policy warnings."""
    last = RunEvent.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
    since = request.headers.get(ANNOUNCED_HEADER, "")
    if not request.htmx or not since.isdecimal() or whole_number(since) >= last:
        return Announcements(last, [])
    events = (
        RunEvent.objects.filter(
            pk__gt=max(whole_number(since), last - LOOK_BACK), pk__lte=last, kind__in=ANNOUNCED_KINDS
        )
        .filter(run__user=request.user, run__project=request.project)
        .exclude(actor=request.user)
        .select_related("run")
        .only("pk", "kind", "data", "node", "run__name", "run__spec")
        .order_by("-pk")[:ANNOUNCED_MOST]
    )
    lines = [f"{event.run.name}: " + event_words.event_text(event, event.run.spec.get("nodes", 1)) for event in events]
    return Announcements(last, lines[::-1])


class ShareBar(NamedTuple):
    """A member's load in GPU-hours: what was used, is held and is queued, with where each begins."""

    user: str
    detail: str
    used: float
    held: float
    queued_from: float
    queued: float
    penalty: str


class ShareBars(NamedTuple):
    """The bars of a queue, the longest first; `more` members have none. `most` and `median` are in GPU-hours, too."""

    bars: list[ShareBar]
    more: int
    most: float
    median: float
    detail: str


def share_bars(queue: Queue, most: int | None = None) -> ShareBars | None:
    """The bars of the members with the highest loads, or of all. None where fair share is off, or no one has a load."""
    shares = member_shares.shares(queue)
    if not shares:
        return None
    bars = []
    for share in shares[:most]:
        used, held, queued = round(share.load.used_ms / HOUR_MS, 2), share.load.held_gpus, share.load.queued_gpus
        behind = duration(share.penalty.seconds) if share.penalty.seconds else ""
        detail = words.load(used, held, queued)
        bars.append(ShareBar(share.user, detail, used, held, used + held, queued, behind))
    median = shares[0].penalty.median_ms / HOUR_MS
    longest = max(shares[0].load.total_ms / HOUR_MS, median)
    return ShareBars(
        bars, len(shares) - len(bars), longest, round(median, 2),
        words.settings(queue.max_penalty_s, queue.fair_share_half_life_days, median),
    )  # fmt: skip
