"""Queues: runs in order, settings, and moving waiting runs: dry run, move and undo."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from ninja import Field, P, Path, QueryEx, Router, Schema, Status

from dstackweb.accounts import saved_views
from dstackweb.accounts.models import Project
from dstackweb.api.app import (
    Id,
    IfMatch,
    Name,
    StaleOut,
    Username,
    caller,
    project_of,
    ready,
    refusals,
)
from dstackweb.api.queue_items import QueueItem, read_items
from dstackweb.lib.errors import Conflict, Invalid, Stale
from dstackweb.runs import concurrency, selectors, services
from dstackweb.runs.codes import WaitReason
from dstackweb.runs.models import MAX_LIMIT, Queue, Run
from dstackweb.runs.queue import member_shares, queues, reorder, transfer
from dstackweb.runs.queue.ordering import PRIORITY_MAX
from dstackweb.runs.queue.transfer import Transfer
from dstackweb.runs.rows import Starts, starts_of
from dstackweb.scheduler.passes.decision import foresee_waits
from dstackweb.scheduler.passes.loading import usage_of
from dstackweb.wording import starts, waiting

router = Router(tags=["queues"])
REFUSALS = refusals(403, 404, 422)
MOVE_REFUSALS = {**REFUSALS, **refusals(409), 412: StaleOut}
ReclaimChoice = Literal["never", "lower_priority", "any"]
Limit = Annotated[int, Field(ge=0, le=MAX_LIMIT, strict=True)]


class PatchQueueIn(Schema):
    """Changes by managers; missing fields stay. A limit of null is no limit; 0 starts nothing."""

    model_config = {"extra": "forbid"}

    paused: bool = Field(False, description="No run starts; running runs continue", strict=True)
    draining: bool = Field(False, description="New runs are refused; waiting runs still start", strict=True)
    ageing_minutes: int | None = Field(
        None, strict=True, description="Minutes of waiting for +1 priority; null: strict"
    )
    fair_share_minutes: int | None = Field(
        None, strict=True, description="Most minutes that a run ranks behind by its member's share; null: off"
    )
    fair_share_half_life_days: int = Field(
        7, strict=True, description="Days after which past usage counts half for the fair share"
    )
    max_running: Limit | None = None
    max_gpus: Limit | None = None
    max_running_per_user: Limit | None = None
    max_gpus_per_user: Limit | None = None
    cohort: str = Field(
        "", description="Queues of the same cohort lend each other unused GPUs; empty: none", strict=True
    )
    borrow_gpus: Limit | None = None
    lend_gpus: Limit | None = None
    reclaim: ReclaimChoice = Field("never", description="Whether its runs displace those that hold its lent GPUs")
    preempt_points: int | None = Field(
        None,
        ge=1,
        le=PRIORITY_MAX,
        strict=True,
        description="How many points of priority less a preemptible run must have to be displaced; null: none is",
    )
    preempt_gpu_hours: int | None = Field(
        None,
        ge=1,
        le=MAX_LIMIT,
        strict=True,
        description="GPU-hours of others' work that a member's runs may displace within 24 hours; null: no limit",
    )


class NewQueueIn(PatchQueueIn):
    """A new queue, with optional settings."""

    name: str


class QueueSettings(Schema):
    """The settings of a queue. A limit of null is no limit."""

    name: str
    paused: bool
    draining: bool
    ageing_minutes: int | None
    fair_share_minutes: int | None
    fair_share_half_life_days: int
    max_running: int | None
    max_gpus: int | None
    max_running_per_user: int | None
    max_gpus_per_user: int | None
    cohort: str
    borrow_gpus: int | None
    lend_gpus: int | None
    reclaim: str
    preempt_points: int | None
    preempt_gpu_hours: int | None


class QueueSummary(QueueSettings):
    """A queue in a list: its settings, and the number of its runs in each active status."""

    pending: int = Field(validation_alias="count.pending")
    submitted: int = Field(validation_alias="count.submitted")
    provisioning: int = Field(validation_alias="count.provisioning")
    running: int = Field(validation_alias="count.running")
    terminating: int = Field(validation_alias="count.terminating")


class QueuesOut(Schema):
    items: list[QueueSummary]
    next: str | None = None


class MoveIn(Schema):
    """The runs (`run` or `runs`, names or ids, or all waiting ones of a `member`), and one of `before`, `after`, `top`,
    `bottom` or `queue`."""

    model_config = {"extra": "forbid"}

    run: str | None = None
    runs: list[str] | None = Field(None, description="They keep their order", max_length=1000)
    member: str | None = Field(None, description="All waiting runs of this member, only with `queue`")
    before: str | None = Field(None, description="Move directly before this run")
    after: str | None = Field(None, description="Move directly after this run")
    top: Literal[True] | None = None
    bottom: Literal[True] | None = None
    queue: str | None = Field(None, description="To this queue of the project, at the place of their seniority there")
    dry_run: bool = Field(False, description="Return the effect without changing anything")


class RunChangeOut(Schema):
    """The effect on a run. Positions start at 1; null without a position.

    Positions after the first thousand may be null after a move; a `dry_run` counts all.
    """

    run: Name
    id: Id = Field(validation_alias="run.uid")
    user: Username = Field(validation_alias="run.user")
    priority_before: int
    priority_after: int
    position_before: int | None
    position_after: int | None
    penalty_s: int | None = Field(description="Behind by its member's share in the new queue; null in the same queue")


class WaitThereOut(Schema):
    """Why the first run of each kind would wait in the new queue; `reason` is `starting` if what it needs is free."""

    run: Name
    reason: str
    reason_detail: str


class NewQueueOut(Schema):
    """Where runs go in another queue. `starts`: the estimate of `beside`, which waits there now in the first one's
    place. `reordered`: their order changes."""

    name: str
    reordered: bool
    waits: list[WaitThereOut]
    beside: Name | None
    starts: Starts | None


class MoveOut(Schema):
    """`changes`: the runs moved; `slips`: the nearest of the `slips_total` other runs that change position (or null).

    To another `queue`, `slips_total` counts the runs there that move back, and there is no undo. `exact` is false if a
    member's run moved to their nearest own position instead. `move` is what `undo` takes, for `undo_s` seconds; null
    for a preview, and where nothing changed.
    """

    changes: list[RunChangeOut]
    slips: list[RunChangeOut]
    slips_total: int | None
    exact: bool
    move: int | None
    undo_s: int
    queue: NewQueueOut | None = None

    @staticmethod
    def resolve_queue(moved: reorder.MoveEffect) -> NewQueueOut | None:
        return _new_queue(moved) if isinstance(moved, Transfer) else None

    @staticmethod
    def resolve_move(moved: reorder.MoveEffect) -> int | None:
        return moved.move_id

    @staticmethod
    def resolve_undo_s(moved: reorder.MoveEffect) -> int:
        return reorder.UNDO_S


class UndoIn(Schema):
    """`move`: the number in the answer to the move. Default: your latest move in this queue."""

    model_config = {"extra": "forbid"}

    move: int | None = None


class ShareOut(Schema):
    """A member's load in GPU-hours: what was used, halved for each half-life since, and an hour for each GPU held or
    queued. Their next run ranks behind by about `penalty_s`."""

    user: Username
    gpu_hours: float
    used_gpu_hours: float
    held_gpus: int = Field(validation_alias="load.held_gpus")
    queued_gpus: int = Field(validation_alias="load.queued_gpus")
    penalty_s: int = Field(validation_alias="penalty.seconds")


class QueueOut(QueueSettings):
    """A queue with a page of its runs. `shares` are the members' with fair share, the highest first."""

    borrowed_gpus: int = Field(description="GPUs above its limit that the queue's runs hold, lent by its cohort")
    shares: list[ShareOut]
    items: list[QueueItem]
    next: str | None


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


def _target(project: Project, body: MoveIn) -> reorder.MoveTarget | str:
    """The place in the queue, or the name of another queue."""
    given = [where for where in ("before", "after", "top", "bottom", "queue") if getattr(body, where) is not None]
    match given:
        case ["before" | "after" as where]:
            return reorder.MoveTarget(where, selectors.find_run(project, getattr(body, where)))
        case ["top" | "bottom" as where]:
            return reorder.MoveTarget(where)
        case ["queue"]:
            return body.queue or ""
    raise Invalid.at("before", msg=_("send one of `before`, `after`, `top`, `bottom` or `queue`"))


def _new_queue(moved: Transfer) -> NewQueueOut | None:
    """Where runs go, with what holds them up there; None if they are there already."""
    if moved.target is None or not moved.entries:
        return None
    estimate, data = starts_of(moved.beside) if moved.beside else (None, {})
    if estimate is not None:
        starts.add_words([(estimate, data)])
    waits = foresee_waits([run for run, _share in moved.entries])
    reasons = [
        (run.name, wait.reason, wait.data) if wait else (run.name, WaitReason.STARTING, {}) for run, wait in waits
    ]
    return NewQueueOut(
        name=moved.target.name,
        reordered=moved.is_reordered,
        waits=[
            WaitThereOut(run=name, reason=reason, reason_detail=str(waiting.reason(reason, data).text))
            for name, reason, data in reasons
        ],
        beside=moved.beside.name if moved.beside else None,
        starts=estimate,
    )


def _page(queue: Queue, limit: int, offset: int, *, folded: bool = False, query: str = "") -> dict[str, Any]:
    items, more = read_items(queue, limit, offset, folded=folded, query=query)
    return {
        **{name: getattr(queue, name) for name in QueueSettings.model_fields},
        "borrowed_gpus": usage_of(queue).borrowed(queue.pk)[0] if queue.cohort else 0,
        "shares": [ShareOut.from_orm(share).model_dump() for share in member_shares.shares(queue)],
        "items": items,
        "next": str(offset + limit) if more else None,
    }
