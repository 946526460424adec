"""Progress: how many tasks of a run, or runs of a project, are in which state, by the prefix of their names."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from ninja import P, Path, QueryEx, Router

from dstackweb.api.app import project_of, ready
from dstackweb.api.progress_schemas import (
    FailuresOut,
    GroupsOut,
    ProgressOut,
    TaskListOut,
    failure_of,
    group_of,
    progress_of,
    task_of,
)
from dstackweb.api.schemas import ErrorOut
from dstackweb.lib.errors import NotFound
from dstackweb.progress import selectors
from dstackweb.progress.models import NAME_MAX
from dstackweb.progress.selectors import Bar, Only, Order, Overview
from dstackweb.runs.models import Run
from dstackweb.runs.selectors import find_run

router = Router(tags=["progress"])
of_runs = Router(tags=["progress"])
REFUSALS = {401: ErrorOut, 404: ErrorOut, 422: ErrorOut}

Find = QueryEx[str, P(max_length=NAME_MAX, description="A part of the name, in whatever case")]
OrderBy = QueryEx[
    Order, P(description="`active`: those first to which something is still to come; `failed`: those with failed tasks")
]
OnlyThose = QueryEx[Only, P(description="`failed`: those with failed tasks; `running`: those with running ones")]
Limit = QueryEx[int, P(ge=1, le=500)]
Cursor = QueryEx[str, P(pattern=r"^(\d{1,18}\.\d{1,18})?$", description="The `next` of the page before")]
Attempt = QueryEx[int | None, P(ge=1, le=2**31 - 1, description="The last that told of tasks where it isn't given")]
OfPrefix = QueryEx[str, P(max_length=NAME_MAX)]
OfGroup = QueryEx[str, P(max_length=NAME_MAX)]


@router.get("", response={200: ProgressOut, **REFUSALS}, summary="How far a project's runs are")
def of_project(
    request: HttpRequest,
    project: Path[str],
    find: Find = "",
    order: OrderBy = "active",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> HttpResponse:
    """By the prefix of their names; each run is a group. A few rows are read, however many runs there are."""
    overview = _of_project(request, project)
    return ready(request, progress_of(None, overview, *_page(overview, find, order, limit, cursor)))


@router.get("/groups", response={200: GroupsOut, **REFUSALS}, summary="A prefix's runs")
def groups_of_project(
    request: HttpRequest,
    project: Path[str],
    prefix: OfPrefix,
    only: OnlyThose = "",
    find: Find = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> HttpResponse:
    """Runs of one name count together."""
    return _groups(request, _of_project(request, project), prefix, only, find, limit, cursor)


@of_runs.get("/{name}/progress", response={200: ProgressOut, **REFUSALS}, summary="How far a run's tasks are")
def of_run(
    request: HttpRequest,
    project: Path[str],
    name: str,
    find: Find = "",
    order: OrderBy = "active",
    limit: Limit = 50,
    cursor: Cursor = "",
    attempt: Attempt = None,
) -> HttpResponse:
    """By prefix, as they were reported. A few rows are read, however many tasks there are; nothing where none were."""
    run = _run(request, project, name)
    overview = selectors.of_run(run.pk, _now_ms(), attempt)
    return ready(request, progress_of(run, overview, *_page(overview, find, order, limit, cursor)))


@of_runs.get("/{name}/progress/groups", response={200: GroupsOut, **REFUSALS}, summary="The groups of a prefix")
def groups_of_run(
    request: HttpRequest,
    project: Path[str],
    name: str,
    prefix: OfPrefix,
    only: OnlyThose = "",
    find: Find = "",
    limit: Limit = 50,
    cursor: Cursor = "",
    attempt: Attempt = None,
) -> HttpResponse:
    """In the order in which they were first heard of; those whose tasks are all forgotten are gone."""
    return _groups(request, _of_run(request, project, name, attempt), prefix, only, find, limit, cursor)


@of_runs.get("/{name}/progress/failures", response={200: FailuresOut, **REFUSALS}, summary="Tasks that have failed")
def failures_of_run(
    request: HttpRequest,
    project: Path[str],
    name: str,
    prefix: OfPrefix = "",
    limit: Limit = 50,
    cursor: Cursor = "",
    attempt: Attempt = None,
) -> HttpResponse:
    """With what they said, newest first; of all prefixes, or of one."""
    overview = _of_run(request, project, name, attempt)
    if overview is None:
        return ready(request, {"items": [], "next": None})
    of = _prefix(overview, prefix).id if prefix else None
    found, following = selectors.failures(overview.scope_id, of, cursor or None, limit)
    return ready(request, {"items": [failure_of(failed) for failed in found], "next": following})


@of_runs.get("/{name}/progress/tasks", response={200: TaskListOut, **REFUSALS}, summary="The tasks of a group")
def tasks_of_run(
    request: HttpRequest,
    project: Path[str],
    name: str,
    prefix: OfPrefix,
    group: OfGroup,
    limit: Limit = 50,
    cursor: Cursor = "",
    attempt: Attempt = None,
) -> HttpResponse:
    """Those that were reported by themselves, in the order in which they were first heard of."""
    of = _prefix(_of_run(request, project, name, attempt), prefix)
    bar = selectors.group(of.id, group)
    if bar is None:
        raise NotFound(f"no group is called {group!r} in {prefix}")
    found, following = selectors.tasks(bar.id, cursor or None, limit)
    return ready(request, {"items": [task_of(task) for task in found], "next": following})


def _page(overview: Overview | None, find: str, order: Order, limit: int, cursor: str) -> tuple[list[Bar], str | None]:
    if overview is None:
        return [], None
    return selectors.prefixes(overview.scope_id, _now_ms(), find=find, order=order, after=cursor or None, limit=limit)


def _groups(
    request: HttpRequest, overview: Overview | None, prefix: str, only: Only, find: str, limit: int, cursor: str
) -> HttpResponse:
    of = _prefix(overview, prefix)
    bars, following = selectors.groups(of.id, only=only, find=find, after=cursor or None, limit=limit)
    return ready(request, {"items": [group_of(bar) for bar in bars], "next": following})


def _of_project(request: HttpRequest, project: str) -> Overview | None:
    found, _role = project_of(request, project)
    return selectors.of_project(found.pk, _now_ms())


def _of_run(request: HttpRequest, project: str, name: str, attempt: int | None) -> Overview | None:
    return selectors.of_run(_run(request, project, name).pk, _now_ms(), attempt)


def _run(request: HttpRequest, project: str, name: str) -> Run:
    found, _role = project_of(request, project)
    return find_run(found, name)


def _prefix(overview: Overview | None, name: str) -> Bar:
    """The prefix of this name. Raises NotFound."""
    found = selectors.prefix(overview.scope_id, name, _now_ms()) if overview is not None else None
    if found is None:
        raise NotFound(f"no prefix is called {name!r} here")
    return found


def _now_ms() -> int:
    return int(timezone.now().timestamp() * 1000)
