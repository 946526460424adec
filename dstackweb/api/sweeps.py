"""Sweeps: list, read, their runs page by page or as a file, priority, release, stop, retry.

They are submitted as runs are.
"""

from __future__ import annotations

import datetime as dt
from typing import Any, Literal

from django.http import HttpRequest, StreamingHttpResponse
from ninja import Field, P, Path, QueryEx, Router, Schema

from dstackweb.api.app import (
    CONFLICTS,
    FILE,
    REFUSALS,
    Body,
    Format,
    Id,
    Name,
    Page,
    Username,
    UsernameOrNull,
    caller,
    project_of,
)
from dstackweb.api.run_schemas import DependencyOut, RunStatusName, StopIn
from dstackweb.lib import exports
from dstackweb.runs.codes import NoRun
from dstackweb.runs.models import Dependency, Sweep
from dstackweb.runs.selectors import dependencies_of
from dstackweb.runs.states import RunStatus
from dstackweb.runs.sweeps import selectors, services
from dstackweb.runs.sweeps.selectors import SweepCounts, SweepRun, parameter_names
from dstackweb.spec.array import Array
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.wording import tables
from dstackweb.wording.statuses import after
from dstackweb.wording.tables import sweep_run


class SweepCountsOut(Schema):
    """How many of its runs are where; all of them add up to its size."""

    waiting: int
    running: int = Field(description="On hosts or instances, also those that start or stop")
    done: int
    failed: int
    terminated: int
    left: int = Field(description="To be created")
    dropped: int = Field(description="Never created, since it was stopped")
    removed: int = Field(description="Deleted, or removed because they were old")


class SweepRowOut(Schema):
    """A sweep. Its runs are called `<name>-<index>`, from 0 to `size` - 1."""

    type: Literal["sweep"] = "sweep"
    id: Id = Field(validation_alias="uid")
    name: str
    user: Username
    queue: Name
    priority: int
    size: int
    status: RunStatusName = Field(
        description="`pending` while it waits for others, `running` until all its runs have ended, then `done` if all "
        "are, `terminated` if none was created, otherwise `failed`"
    )
    status_message: str = Field(description="What it waits for (`after`), or why it was canceled; else empty")
    max_parallel: int | None
    counts: SweepCountsOut
    waits_for_name: str = Field(description="The name of its next run, while another run has it; else empty")
    submitted_at: dt.datetime
    stopped_at: dt.datetime | None
    stopped_by: UsernameOrNull = Field(description="Null if its owner was not allowed to submit any more")
    ended_at: dt.datetime | None

    @staticmethod
    def resolve_status_message(sweep: Sweep) -> str:
        return after(sweep.status_detail) if sweep.status_detail else ""

    @staticmethod
    def resolve_counts(sweep: Sweep) -> SweepCounts:
        return SweepCounts.of(sweep)


class SweepOut(SweepRowOut):
    """With what its runs have in common. `settings` is in the run file's notation, `provenance` has the same keys."""

    after: list[DependencyOut] = Field(description="The runs and sweeps that had, or have, to end before it")
    parameters: list[str] = Field(description="The names of the parameters of its runs")
    settings: dict[str, Any]
    provenance: dict[str, Any]

    @staticmethod
    def resolve_after(sweep: Sweep) -> list[Dependency]:
        return dependencies_of(sweep)

    @staticmethod
    def resolve_parameters(sweep: Sweep) -> list[str]:
        return list(parameter_names(sweep))

    @staticmethod
    def resolve_settings(sweep: Sweep) -> dict[str, Any]:
        array = Array.model_validate(sweep.array)
        spec = EffectiveSpec.model_validate(sweep.spec).model_copy(update={"array": array, "priority": sweep.priority})
        return spec.as_file()


class SweepsOut(Page[SweepRowOut]): ...


class SweepRunOut(Schema):
    """A run of a sweep, or, without `id`, why there is none: `to_come`, `dropped` or `removed`."""

    index: int
    name: str
    id: str | None
    parameters: dict[str, str]
    status: RunStatusName | NoRun
    status_message: str = Field(description="Its message, or why it ended unless it is done")
    termination_reason: str
    exit_code: int | None
    started_at: dt.datetime | None
    ended_at: dt.datetime | None
    duration_s: float | None = Field(description="From the start of its newest attempt to its end; null before")

    @classmethod
    def of(cls, row: SweepRun) -> SweepRunOut:
        return cls(parameters=row.parameters, **sweep_run(row))


class SweepRunsOut(Page[SweepRunOut]): ...


class PatchSweepIn(Body):
    """Changes of a sweep."""

    priority: int = Field(strict=True)


router = Router(tags=["sweeps"])


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
