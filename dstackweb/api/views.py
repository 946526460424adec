"""Saved views: filters of a project's queues under a name, one's own and those shared with all members."""

from __future__ import annotations

from django.http import HttpRequest
from ninja import Field, Path, Router, Schema, Status

from dstackweb.accounts import saved_views
from dstackweb.accounts.access import allows, need_role
from dstackweb.accounts.models import Project, Role, SavedView, TokenScope
from dstackweb.api.app import REFUSALS, Body, Listing, Name, caller, project_of, refusals
from dstackweb.wording.queue_filters import worth_saving

router = Router(tags=["queues"])
QUERY = (
    "As in the address of the queue's page: `q` (part of the name), `member`, `needs` (such as `2xA100` or `1xGPU`), "
    "`reason`, `priority` (the lowest), `group` (`reason` or `member`) and `columns`"
)


class ViewIn(Body):
    """A view to save. One of the same name is replaced."""

    name: str = Field(max_length=40, description="Such as `my sweeps`")
    query: str = Field(max_length=500, description=QUERY, examples=["q=sweep&group=reason"])
    shared: bool = Field(False, strict=True, description="For all members; managers only")


class PatchViewIn(Body):
    """Changes of a view; missing fields stay. Shared ones are changed by managers; `default` is the caller's own."""

    name: str | None = Field(None, max_length=40)
    query: str | None = Field(None, max_length=500, description=QUERY)
    default: bool | None = Field(None, strict=True, description="Whether the caller's queue pages begin with it")


class ViewOut(Schema):
    """A saved view. `default`: the caller's queue pages begin with it."""

    id: int
    name: Name
    query: str
    shared: bool
    default: bool = Field(validation_alias="is_default")

    @staticmethod
    def resolve_shared(view: SavedView) -> bool:
        return view.user_id is None


class ViewsOut(Listing[ViewOut]): ...


@router.get("", response={200: ViewsOut, **REFUSALS}, summary="The caller's saved views")
def index(request: HttpRequest, project: Path[str]) -> dict[str, object]:
    """Their own and the shared ones, by name."""
    found, _role = project_of(request, project)
    return {"items": saved_views.seen(found, caller(request))}


def _changes(request: HttpRequest, project: str) -> tuple[Project, str]:
    """As `project_of`, for a change: all members may have views, but no token that only reads makes any."""
    limit = caller(request).token_limit
    return project_of(request, project, "member" if limit and limit.scope == TokenScope.READ else "viewer")


@router.post("", response={201: ViewOut, **REFUSALS, **refusals(409)}, summary="Save a view of the queues")
def save(request: HttpRequest, project: Path[str], body: ViewIn) -> Status[SavedView]:
    found, role = _changes(request, project)
    if body.shared:
        need_role(role, found.name, Role.MANAGER)
    owner = None if body.shared else caller(request)
    view = saved_views.save(found, owner, body.name, worth_saving(body.query))
    return Status(201, saved_views.one(found, caller(request), view.pk))


@router.patch("/{view}", response={200: ViewOut, **REFUSALS, **refusals(409)}, summary="Change a saved view")
def change(request: HttpRequest, project: Path[str], view: Path[int], body: PatchViewIn) -> SavedView:
    found, role = _changes(request, project)
    user = caller(request)
    if body.name is not None or body.query is not None:
        query = None if body.query is None else worth_saving(body.query)
        saved_views.change(found, view, user, allows(role, Role.MANAGER), name=body.name, query=query)
    if body.default is not None:
        saved_views.set_default(found, view, user, chosen=body.default)
    return saved_views.one(found, user, view)


@router.delete("/{view}", response={204: None, **REFUSALS}, summary="Delete a saved view")
def delete(request: HttpRequest, project: Path[str], view: Path[int]) -> Status[None]:
    """One's own; managers also shared ones."""
    found, role = _changes(request, project)
    saved_views.delete(found, view, caller(request), shared=allows(role, Role.MANAGER))
    return Status(204, None)
