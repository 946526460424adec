"""Queues: runs in order, and settings."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from ninja import P, Path, QueryEx, Router, Status

from dstackweb.api.app import caller, project_of, ready
from dstackweb.api.queue_schemas import NewQueueIn, PatchQueueIn, QueueSettings, QueuesOut, QueueSummary
from dstackweb.api.schemas import ErrorOut, QueueItem, QueueOut
from dstackweb.lib.errors import Invalid
from dstackweb.runs import rows, selectors, services
from dstackweb.runs.models import Queue
from dstackweb.runs.queue import queues

router = Router(tags=["queues"])
REFUSALS = {401: ErrorOut, 403: ErrorOut, 404: ErrorOut, 422: ErrorOut}


@router.get("/{name}", response={200: QueueOut, **REFUSALS}, summary="A queue in order")
def detail(
    request: HttpRequest,
    project: Path[str],
    name: str,
    limit: QueryEx[int, P(ge=1, le=1000)] = 50,
    cursor: QueryEx[int, P(ge=0, le=10**9)] = 0,
) -> HttpResponse:
    """Waiting runs with position and reason; `cursor` is the `next` of the previous page."""
    found, _role = project_of(request, project)
    queue = services.ensure_queue(found) if name == "default" else selectors.find_queue(found, name)
    return ready(request, _page(queue, limit, cursor))


@router.get("", response={200: QueuesOut, **REFUSALS}, summary="List a project's queues")
def index(request: HttpRequest, project: Path[str]) -> QueuesOut:
    """By name, with settings and the number of runs in each status."""
    found, _role = project_of(request, project)
    services.ensure_queue(found)
    found_queues = Queue.objects.filter(project=found).select_related("count").order_by("name")
    return QueuesOut(items=[QueueSummary.of(queue) for queue in found_queues])


@router.post("", response={201: QueueSummary, **REFUSALS, 409: ErrorOut}, summary="Create a queue")
def create(request: HttpRequest, project: Path[str], body: NewQueueIn) -> Status[QueueSummary]:
    """For managers. Runs use it with `queue`."""
    found, role = project_of(request, project)
    settings = body.model_dump(exclude_unset=True, exclude={"name"})
    return Status(201, QueueSummary.of(queues.create_queue(found, caller(request), role, body.name, **settings)))


@router.patch("/{name}", response={200: QueueOut, **REFUSALS}, summary="Change a queue's settings")
def change(request: HttpRequest, project: Path[str], name: str, body: PatchQueueIn) -> HttpResponse:
    """For managers. A new `ageing_minutes` reorders the queue immediately; running runs continue."""
    found, role = project_of(request, project)
    queue = services.ensure_queue(found) if name == "default" else selectors.find_queue(found, name)
    settings = body.model_dump(exclude_unset=True)
    if not settings:
        raise Invalid.at("paused", msg="send at least one setting to change")
    return ready(request, _page(queues.change_queue(queue, caller(request), role, **settings), 50, 0))


def _page(queue: Queue, limit: int, offset: int) -> dict[str, Any]:
    found = rows.queue_rows(queue, limit + 1, offset)
    return {
        **QueueSettings.values(queue),
        "items": QueueItem.listed(found[:limit]),
        "next": str(offset + limit) if len(found) > limit else None,
    }
