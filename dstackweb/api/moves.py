"""Moving waiting runs in their queue: dry run, move and undo."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from ninja import Path, Router

from dstackweb.accounts.models import Project
from dstackweb.api.app import IfMatch, caller, project_of
from dstackweb.api.queue_schemas import MoveIn, MoveOut, UndoIn
from dstackweb.api.schemas import ErrorOut, StaleOut
from dstackweb.lib.errors import Conflict, Invalid, Stale
from dstackweb.runs import concurrency, selectors
from dstackweb.runs.models import Run
from dstackweb.runs.queue import reorder

router = Router(tags=["queues"])
REFUSALS = {401: ErrorOut, 403: ErrorOut, 404: ErrorOut, 409: ErrorOut, 412: StaleOut, 422: ErrorOut}


@router.post("/{name}/move", response={200: MoveOut, **REFUSALS}, summary="Move waiting runs")
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
    target = _target(found, body)
    if body.dry_run:
        return MoveOut.of(reorder.preview(runs, caller(request), role, target))
    if if_match is not None and len(runs) > 1:
        raise Invalid.at("runs", msg="If-Match names one run: send it with `run`")
    seen = None if if_match is None else {runs[0].pk: if_match}
    done = reorder.move(runs, caller(request), role, target, seen)
    if len(runs) == 1:
        response["ETag"] = f'"{concurrency.etag(Run.objects.get(pk=runs[0].pk))}"'
    return MoveOut.of(done)


@router.post("/{name}/undo", response={200: MoveOut, **REFUSALS}, summary="Undo a move")
def undo(request: HttpRequest, project: Path[str], name: str, body: UndoIn | None = None) -> MoveOut:
    """By its user, within ten seconds, while its runs are unchanged. Priority changes can be undone too."""
    found, role = project_of(request, project, "member")
    queue = selectors.find_queue(found, name)
    move_id = body.move if body else None
    if move_id is None:
        latest = reorder.undoable(queue, caller(request))
        if latest is None:
            raise Conflict(f"you moved nothing in queue {name} in the last {reorder.UNDO_S} seconds")
        move_id = latest.pk
    return MoveOut.of(reorder.undo(move_id, caller(request), role))


def _runs(project: Project, queue: str, body: MoveIn) -> list[Run]:
    if (body.run is None) == (body.runs is None):
        raise Invalid.at("run", msg="send either `run` or `runs`")
    names = [body.run] if body.run is not None else body.runs or []
    if not names:
        raise Invalid.at("runs", msg="name at least one run")
    runs = [selectors.find_run(project, name) for name in dict.fromkeys(names)]
    selectors.find_queue(project, queue)
    for run in runs:
        if run.queue.name != queue:
            raise Stale(f"run {run.name} is in queue {run.queue.name}; nothing was moved", queue=run.queue.name)
    return runs


def _target(project: Project, body: MoveIn) -> reorder.MoveTarget:
    given = [where for where in ("before", "after", "top", "bottom") if getattr(body, where) is not None]
    match given:
        case ["before" | "after" as where]:
            return reorder.MoveTarget(where, selectors.find_run(project, getattr(body, where)))
        case ["top" | "bottom" as where]:
            return reorder.MoveTarget(where)
    raise Invalid.at("before", msg="send one of `before`, `after`, `top` or `bottom`")
