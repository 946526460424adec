"""Queues: the line in its true order, and its switch."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from ninja import P, Path, QueryEx, Router

from dstackweb.api.app import caller, project_of, ready
from dstackweb.api.schemas import ErrorOut, PatchQueueIn, QueueItem, QueueOut
from dstackweb.runs import selectors, services
from dstackweb.runs.models import Queue

router = Router(tags=["queues"])
REFUSALS = {401: ErrorOut, 403: ErrorOut, 404: ErrorOut, 422: ErrorOut}


@router.get("/{name}", response={200: QueueOut, **REFUSALS}, summary="The queue in its true order")
def detail(
    request: HttpRequest,
    project: Path[str],
    name: str,
    limit: QueryEx[int, P(ge=1, le=1000)] = 50,
    cursor: QueryEx[int, P(ge=0, le=10**9)] = 0,
) -> HttpResponse:
    """Who waits, in which place and why; `cursor` is the `next` of the page before."""
    found, _role = project_of(request, project)
    queue = services.ensure_queue(found) if name == "default" else selectors.find_queue(found, name)
    return ready(request, _page(queue, limit, cursor))


@router.patch("/{name}", response={200: QueueOut, **REFUSALS}, summary="Pause or resume a queue")
def change(request: HttpRequest, project: Path[str], name: str, body: PatchQueueIn) -> QueueOut:
    """Managers only. Nothing leaves a paused queue; what runs goes on."""
    found, role = project_of(request, project, "member")
    queue = services.ensure_queue(found) if name == "default" else selectors.find_queue(found, name)
    return _page(services.set_paused(queue, caller(request), role, body.paused), 50, 0)


def _page(queue: Queue, limit: int, offset: int) -> QueueOut:
    lines = selectors.queue_lines(queue, limit + 1, offset)
    return QueueOut.model_construct(
        name=queue.name,
        paused=queue.paused,
        ageing_minutes=queue.ageing_minutes,
        items=QueueItem.listed(lines[:limit]),
        next=str(offset + limit) if len(lines) > limit else None,
    )
