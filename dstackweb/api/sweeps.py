"""Sweeps: list, read, their runs page by page or as a file, priority, release, stop, retry.

They are submitted as runs are.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, StreamingHttpResponse
from ninja import P, Path, QueryEx, Router

from dstackweb.api.app import caller, project_of, refusals
from dstackweb.api.run_schemas import RunStatusName, StopIn
from dstackweb.api.sweep_schemas import PatchSweepIn, SweepOut, SweepRunOut, SweepRunsOut, SweepsOut
from dstackweb.api.usage import FILE, Format
from dstackweb.lib import exports
from dstackweb.runs.models import Sweep
from dstackweb.runs.states import RunStatus
from dstackweb.runs.sweeps import selectors, services
from dstackweb.wording import tables

router = Router(tags=["sweeps"])
REFUSALS = refusals(403, 404, 422)
CONFLICTS = refusals(403, 404, 409, 422)


@router.get("", response={200: SweepsOut, **REFUSALS}, summary="List sweeps, newest first")
def index(
    request: HttpRequest,
    project: Path[str],
    active: QueryEx[bool, P(description="Only those that have not ended")] = False,
    limit: QueryEx[int, P(ge=1, le=500)] = 50,
    cursor: int | None = None,
) -> dict[str, Any]:
    """`cursor` is the `next` of the page before."""
    found, _role = project_of(request, project)
    sweeps = selectors.newest_sweeps(found, limit + 1, cursor, active=active)
    page = sweeps[:limit]
    return {"items": page, "next": str(page[-1].pk) if len(sweeps) > limit else None}


@router.get("/{name}", response={200: SweepOut, **REFUSALS}, summary="One sweep")
def detail(request: HttpRequest, project: Path[str], name: str) -> Sweep:
    """By id, or the newest with the name."""
    return _sweep(request, project, name)[0]


@router.get("/{name}/runs", response={200: SweepRunsOut, **REFUSALS}, summary="The runs of a sweep")
def list_runs(
    request: HttpRequest,
    project: Path[str],
    name: str,
    status: QueryEx[list[RunStatusName] | None, P(description="Repeatable")] = None,
    limit: QueryEx[int, P(ge=1, le=selectors.PAGE)] = 100,
    cursor: QueryEx[int, P(ge=0, le=2**31 - 1, description="The index to begin with")] = 0,
) -> dict[str, Any]:
    """Each index with its parameters and outcome, whether its run was created or not; with `status`, only such runs."""
    sweep, _role = _sweep(request, project, name)
    if status:
        rows = selectors.table_of_status(sweep, [RunStatus(one) for one in status], cursor, limit + 1)
    else:
        rows = selectors.table(sweep, cursor, limit + 1)
    following = str(rows[limit].index) if len(rows) > limit else None
    return {"items": [SweepRunOut.of(row) for row in rows[:limit]], "next": following}


@router.get(
    "/{name}/export", response={200: None, **REFUSALS}, summary="The runs of a sweep as a file", openapi_extra=FILE
)
def export(request: HttpRequest, project: Path[str], name: str, form: Format = "json") -> StreamingHttpResponse:
    """A row for each index, with a column for each parameter."""
    sweep, _role = _sweep(request, project, name)
    columns = tables.sweep_columns(sweep)
    return exports.response(f"sweep-{sweep.name}", form, columns, tables.sweep_table(sweep))


@router.patch("/{name}", response={200: SweepOut, **CONFLICTS}, summary="Change the priority of a sweep")
def change(request: HttpRequest, project: Path[str], name: str, body: PatchSweepIn) -> Sweep:
    """Of all its runs: waiting ones move, and later ones are created with it."""
    sweep, role = _sweep(request, project, name, "member")
    return services.set_priority(sweep, caller(request), role, body.priority)


@router.post("/{name}/release", response={200: SweepOut, **CONFLICTS}, summary="Release a sweep from its `after`")
def release(request: HttpRequest, project: Path[str], name: str) -> Sweep:
    """Let it enter its queue without waiting for others any longer."""
    sweep, role = _sweep(request, project, name, "member")
    return services.release(sweep, caller(request), role)


@router.post("/{name}/stop", response={200: SweepOut, **CONFLICTS}, summary="Stop a sweep")
def stop(request: HttpRequest, project: Path[str], name: str, body: StopIn | None = None) -> Sweep:
    """No more of its runs are created, and its active runs are stopped; `abort` kills them immediately."""
    sweep, role = _sweep(request, project, name, "member")
    return services.stop(sweep, caller(request), role, abort=bool(body and body.abort))


@router.post("/{name}/retry", response={200: SweepOut, **CONFLICTS}, summary="Retry the failed runs of a sweep")
def retry(request: HttpRequest, project: Path[str], name: str) -> Sweep:
    """New runs with the same names, indices and parameters. Runs that people stopped are left."""
    sweep, role = _sweep(request, project, name, "member")
    return services.retry(sweep, caller(request), role)


def _sweep(request: HttpRequest, project: str, name: str, at_least: str = "viewer") -> tuple[Sweep, str]:
    found, role = project_of(request, project, at_least)
    return selectors.find_sweep(found, name), role
