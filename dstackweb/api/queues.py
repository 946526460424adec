"""Queues: runs in order, settings, and moving waiting runs: dry run, move and undo."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, QueryDict
from django.utils.translation import gettext as _
from ninja import P, Path, QueryEx, Router, Status

from dstackweb.accounts import saved_views
from dstackweb.accounts.models import Project
from dstackweb.api.app import REFUSALS, IfMatch, StaleOut, caller, project_of, ready, refusals
from dstackweb.api.queue_schemas import (
    FoldedOut,
    MoveIn,
    MoveOut,
    NewQueueIn,
    PatchQueueIn,
    QueueOut,
    QueueSettings,
    QueuesOut,
    QueueSummary,
    ShareOut,
    UndoIn,
)
from dstackweb.lib.errors import Conflict, Invalid, Stale
from dstackweb.runs import concurrency, rows, selectors, services
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.queue import member_shares, queues, reorder, transfer
from dstackweb.runs.queue.listing import folding_of, page_of
from dstackweb.runs.queue.move_preview import MoveTarget
from dstackweb.runs.row_fields import QueueExportRow
from dstackweb.runs.sweeps.selectors import find_sweeps
from dstackweb.scheduler.passes.loading import usage_of
from dstackweb.wording.queue_filters import Filters, Front
from dstackweb.wording.tables import queue_items

router = Router(tags=["queues"])
MOVE_REFUSALS = {**REFUSALS, **refusals(409), 412: StaleOut}


@router.get("/{name}", response={200: QueueOut, **REFUSALS}, summary="A queue in order")
def detail(
    request: HttpRequest,
    project: Path[str],
    name: str,
    limit: QueryEx[int, P(ge=1, le=1000)] = 50,
    cursor: QueryEx[int, P(ge=0, le=10**9)] = 0,
    folded: QueryEx[bool, P(description="The waiting runs of each sweep as one item")] = False,
    view: QueryEx[str, P(max_length=100, description="Only the runs that a saved view shows, by its name")] = "",
) -> HttpResponse:
    """Waiting runs with position and reason; `cursor` is the `next` of the previous page.

    With a `view`, the first 2,000 runs of the queue are searched, runs are in its groups, and none is folded.
    """
    found, _role = project_of(request, project)
    queue = services.find_queue(found, name)
    query = saved_views.find(found, caller(request), view).query if view else ""
    return ready(request, _page(queue, limit, cursor, folded=folded, query=query))


@router.get("", response={200: QueuesOut, **REFUSALS}, summary="List a project's queues")
def index(request: HttpRequest, project: Path[str]) -> dict[str, Any]:
    """By name, with settings and the number of runs in each status."""
    found, _role = project_of(request, project)
    services.ensure_queue(found)
    found_queues = Queue.objects.filter(project=found).select_related("count").order_by("name")
    return {"items": found_queues}


@router.post("", response={201: QueueSummary, **REFUSALS, **refusals(409)}, summary="Create a queue")
def create(request: HttpRequest, project: Path[str], body: NewQueueIn) -> Status[Queue]:
    """For managers. Runs use it with `queue`."""
    found, role = project_of(request, project)
    settings = body.model_dump(exclude_unset=True, exclude={"name"})
    return Status(201, queues.create_queue(found, caller(request), role, body.name, **settings))


@router.patch("/{name}", response={200: QueueOut, **REFUSALS}, summary="Change a queue's settings")
def change(request: HttpRequest, project: Path[str], name: str, body: PatchQueueIn) -> HttpResponse:
    """For managers. A new `ageing_minutes` reorders the queue immediately; running runs continue."""
    found, role = project_of(request, project)
    queue = services.find_queue(found, name)
    settings = body.model_dump(exclude_unset=True)
    if not settings:
        raise Invalid.at("paused", msg=_("send at least one setting to change"))
    return ready(request, _page(queues.change_queue(queue, caller(request), role, **settings), 50, 0))


@router.post("/{name}/move", response={200: MoveOut, **MOVE_REFUSALS}, summary="Move waiting runs")
def move(
    request: HttpRequest,
    response: HttpResponse,
    project: Path[str],
    name: str,
    body: MoveIn,
    if_match: IfMatch = None,
) -> MoveOut:
    """Managers move runs to any position. Members swap the positions of their own runs; other runs keep theirs.

    With `If-Match` (one run) a stale move is refused; the new `ETag` comes back. `dry_run` changes nothing.
    """
    found, role = project_of(request, project, "member")
    runs = _runs(found, name, body)
    target, user = _target(found, body), caller(request)
    if body.dry_run:
        return MoveOut.from_orm(
            transfer.preview(runs, user, role, target)
            if isinstance(target, str)
            else reorder.preview(runs, user, role, target)
        )
    if if_match is not None and len(runs) > 1:
        raise Invalid.at("runs", msg=_("If-Match names one run: send it with `run`"))
    seen = None if if_match is None else {runs[0].pk: if_match}
    done = (
        transfer.transfer(runs, user, role, target, seen)
        if isinstance(target, str)
        else reorder.move(runs, user, role, target, seen)
    )
    if len(runs) == 1:
        response["ETag"] = f'"{concurrency.etag(Run.objects.get(pk=runs[0].pk))}"'
    return MoveOut.from_orm(done)


@router.post("/{name}/undo", response={200: MoveOut, **MOVE_REFUSALS}, summary="Undo a move")
def undo(request: HttpRequest, project: Path[str], name: str, body: UndoIn | None = None) -> MoveOut:
    """By its user, within ten seconds, while its runs are unchanged. Priority changes can be undone too."""
    found, _role = project_of(request, project, "member")
    queue = services.find_queue(found, name)
    move_id = body.move if body else None
    if move_id is None:
        latest = reorder.undoable(queue, caller(request))
        if latest is None:
            raise Conflict(
                _("you moved nothing in queue %(name)s in the last %(seconds)s seconds")
                % {"name": name, "seconds": reorder.UNDO_S}
            )
        move_id = latest.pk
    return MoveOut.from_orm(reorder.undo(move_id, caller(request)))


def _runs(project: Project, queue: str, body: MoveIn) -> list[Run]:
    if sum(given is not None for given in (body.run, body.runs, body.member)) != 1:
        raise Invalid.at("run", msg=_("send one of `run`, `runs` or `member`"))
    if body.member is not None:
        if body.queue is None:
            raise Invalid.at("member", msg=_("`member` is only for moving to another `queue`"))
        return transfer.waiting_of(services.find_queue(project, queue), body.member)
    names = [body.run] if body.run is not None else body.runs or []
    if not names:
        raise Invalid.at("runs", msg=_("name at least one run"))
    runs = selectors.find_runs(project, list(dict.fromkeys(names)))
    services.find_queue(project, queue)
    for run in runs:
        if run.queue.name != queue:
            raise Stale(
                _("run %(run)s is in queue %(queue)s; nothing was moved") % {"run": run.name, "queue": run.queue.name},
                queue=run.queue.name,
            )
    return runs


def _target(project: Project, body: MoveIn) -> MoveTarget | str:
    """The place in the queue, or the name of another queue."""
    given = [where for where in ("before", "after", "top", "bottom", "queue") if getattr(body, where) is not None]
    match given:
        case ["before" | "after" as where]:
            return MoveTarget(where, selectors.find_run(project, getattr(body, where)))
        case ["top" | "bottom" as where]:
            return MoveTarget(where)
        case ["queue"]:
            return body.queue or ""
    raise Invalid.at("before", msg=_("send one of `before`, `after`, `top`, `bottom` or `queue`"))


def _page(queue: Queue, limit: int, offset: int, *, folded: bool = False, query: str = "") -> dict[str, Any]:
    items, more = _items(queue, limit, offset, folded=folded, query=query)
    return {
        **{name: getattr(queue, name) for name in QueueSettings.model_fields},
        "borrowed_gpus": usage_of(queue).borrowed(queue.pk)[0] if queue.cohort else 0,
        "shares": [ShareOut.from_orm(share).model_dump() for share in member_shares.shares(queue)],
        "items": items,
        "next": str(offset + limit) if more else None,
    }


def _items(
    queue: Queue, limit: int, offset: int, *, folded: bool, query: str = ""
) -> tuple[list[dict[str, Any]], bool]:
    """A page of runs, or of lines, or of the runs that a view's `query` shows, and whether there are more."""
    if query:
        items, more = _in_view(queue, limit, offset, query)
        return [item | {"folded": None} for item in items] if folded else items, more
    if folded:
        return _folded(queue, limit, offset)
    found = rows.queue_rows(queue, limit + 1, offset)
    return queue_items(found[:limit]), len(found) > limit


def _in_view(queue: Queue, limit: int, offset: int, query: str) -> tuple[list[dict[str, Any]], bool]:
    filters = Filters.read(QueryDict(query))
    positions = Front.read(queue, filters).positions(queue, filters, limit + 1, offset)
    shown = dict(list(positions.items())[:limit])
    return queue_items(rows.queue_rows_at(queue, shown, kind=QueueExportRow)), len(positions) > limit


def _folded(queue: Queue, limit: int, offset: int) -> tuple[list[dict[str, Any]], bool]:
    folding = folding_of(queue)
    if folding is None:
        items, more = _items(queue, limit, offset, folded=False)
        return [item | {"folded": None} for item in items], more
    positions = page_of(queue, folding, limit + 1, offset)
    shown = rows.queue_rows_at(queue, dict(list(positions.items())[:limit]), kind=QueueExportRow)
    runs = folding.stands_for(row.pk for row in shown)
    sweeps = {one.pk: one for one in find_sweeps({folding.heads[pk].sweep_id for pk, n in runs.items() if n > 1})}
    items = queue_items(shown)
    for item, row in zip(items, shown, strict=True):
        key = folding.heads.get(row.pk)
        sweep = sweeps.get(key.sweep_id) if key is not None and runs[row.pk] > 1 else None
        item["folded"] = FoldedOut.of(sweep, runs[row.pk]).model_dump() if sweep else None
    return items, len(positions) > limit
