"""Runs: plan, submit, list, read, change, extend, stop, logs, and why a run waits. Also holds."""

from __future__ import annotations

import datetime as dt
from typing import Any, Literal

from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from ninja import Field, P, Path, QueryEx, Router, Schema, Status

from dstackweb.accounts.models import Project
from dstackweb.api.app import (
    CONFLICTS,
    RAW,
    REFUSALS,
    Id,
    IdempotencyKey,
    IfMatch,
    Since,
    StaleOut,
    Until,
    Username,
    caller,
    project_of,
    ready,
    refusals,
    run_of,
)
from dstackweb.api.plan_schemas import DecisionOut, PlanOut
from dstackweb.api.run_schemas import (
    EventsOut,
    ExtendIn,
    HoldIn,
    JobsOut,
    PatchRunIn,
    RunOut,
    RunsOut,
    RunStatusName,
    StopIn,
    SubmitIn,
    SubmitRunIn,
    events_page,
    jobs_page,
)
from dstackweb.api.sweeps import SweepOut
from dstackweb.lib.errors import Invalid
from dstackweb.runs import comparison, dependencies, holds, pipelines, removal, rows, selectors, services
from dstackweb.runs.codes import LogCut
from dstackweb.runs.comparison import LineOf, Side
from dstackweb.runs.models import Run, Sweep
from dstackweb.runs.row_fields import RunRow, sent
from dstackweb.runs.sweeps import selectors as sweep_selectors
from dstackweb.scheduler.passes.decision import Decision, decide_now, plan_all
from dstackweb.wording import statuses

router = Router(tags=["runs"])
hold_router = Router(tags=["holds"])
LOG_LIMIT = 4 << 20
LOG_HEADERS = {
    "X-Next-Offset": {"schema": {"type": "integer"}, "description": "The next offset"},
    "X-Attempt": {"schema": {"type": "integer"}, "description": "0 before the first placement"},
    "X-Log-Complete": {"schema": {"enum": ["true", "false"]}, "description": "`true`: nothing will follow"},
    "X-Log-Missing": {
        "schema": {"type": "integer"},
        "description": "Bytes of output that a log over its limit lacks, where its text says so; 0 until the job ended",
    },
    "X-Log-Cut": {
        "schema": {"enum": ["", *LogCut]},
        "description": "Why output after the last line is not kept; the run goes on",
    },
}


class SideOut(Schema):
    """One of two runs. Seconds of its newest attempt, up to now where they go on; null where a part was not reached."""

    id: Id = Field(validation_alias="run.uid")
    name: str = Field(validation_alias="run.name")
    user: Username = Field(validation_alias="run.user")
    status: str = Field(validation_alias="run.status")
    status_message: str
    termination_reason: str = Field(validation_alias="run.termination_reason")
    exit_code: int | None = Field(validation_alias="run.exit_code")
    attempt: int = Field(validation_alias="run.attempt")
    submitted_at: dt.datetime = Field(validation_alias="run.submitted_at")
    started_at: dt.datetime | None = Field(validation_alias="run.started_at")
    ended_at: dt.datetime | None = Field(validation_alias="run.ended_at")
    place: str = Field(description="Where it was placed last")
    cost: float = Field(description="USD of all attempts; hosts are free")
    waited_s: float | None = Field(description="In the queue")
    starting_s: float | None = Field(description="From its placement to its first command")
    ran_s: float | None
    total_s: float = Field(description="From its submission, all attempts")

    @staticmethod
    def resolve_status_message(side: Side) -> str:
        return statuses.run_message(side.run)


class LineOut(Schema):
    of: LineOf = Field(description="Which run has it")
    text: str


class SettingOut(Schema):
    """A setting as text; null where a run lacks it. `code` is the beginning of the uploaded code's SHA-256."""

    key: str
    left: str | None
    right: str | None
    differs: bool
    lines: list[LineOut] = Field(description="The lines of both, where texts of several lines differ")


class ComparisonOut(Schema):
    left: SideOut
    right: SideOut
    settings: list[SettingOut]


class PipelineOut(Schema):
    """The runs and sweeps that one file has made, each after those it waits for."""

    type: Literal["pipeline"] = "pipeline"
    runs: list[RunOut | SweepOut] = Field(description='A sweep has `"type": "sweep"`')


class PipelinePlanOut(Schema):
    """The plan of each run and sweep of a file, each after those it would wait for."""

    type: Literal["pipeline"] = "pipeline"
    plans: list[PlanOut] = Field(description="`settings.name` is the run's. Positions count the others of the file")


@router.post("/plan", response={200: PlanOut | PipelinePlanOut, **REFUSALS, **refusals(413)}, summary="Plan a run")
def plan(request: HttpRequest, project: Path[str], body: SubmitIn) -> PlanOut | PipelinePlanOut:
    """The effective settings with their sources, offers, and the position in the queue. Stores nothing.

    A file with several runs has a plan for each, and `"type": "pipeline"`.
    """
    found, role = project_of(request, project, "member")
    submission = services.Submission(body.config, body.env, body.overrides)
    plans = [PlanOut.of(one) for one in plan_all(found, caller(request), role, submission)]
    return plans[0] if len(plans) == 1 else PipelinePlanOut(plans=plans)


@router.post(
    "",
    response={201: RunOut | SweepOut | PipelineOut, **CONFLICTS, **refusals(413)},
    summary="Submit a run, a sweep or several runs",
)
def submit(
    request: HttpRequest,
    response: HttpResponse,
    project: Path[str],
    body: SubmitRunIn,
    idempotency_key: IdempotencyKey = "",
) -> Status[RunOut | Sweep | dict[str, Any]]:
    """Add a run to its queue. A file with `array` makes a sweep, which has `"type": "sweep"`.

    A file with several runs or sweeps, between lines of `---` or as a list of objects, makes all of them or none
    (`"type": "pipeline"`). An `Idempotency-Key` makes retries safe: a repeated key returns what was made.
    """
    found, role = project_of(request, project, "member")
    submission = services.Submission(body.config, body.env, body.overrides, body.archive)
    made, is_new = pipelines.submit(found, caller(request), role, submission, idempotency_key)
    if isinstance(made, Sweep):
        return Status(201, made)
    if isinstance(made, list):
        return Status(201, {"runs": [_one_of_several(found, one, is_new=is_new) for one in made]})
    return Status(201, _tagged(response, made if is_new else selectors.find_run(found, str(made.uid)), is_new=is_new))


@router.get("", response={200: RunsOut, **REFUSALS}, summary="List runs, newest first")
def index(
    request: HttpRequest,
    project: Path[str],
    status: QueryEx[list[RunStatusName] | None, P(description="Repeatable")] = None,
    user: str = "",
    q: str = "",
    queue: str = "",
    since: Since = None,
    until: Until = None,
    limit: QueryEx[int, P(ge=1, le=500)] = 50,
    cursor: int | None = None,
) -> HttpResponse:
    """Filter by status (repeatable), user, part of the name (`q`), queue and time of submission.

    `cursor` is the `next` of the page before.
    """
    found, _role = project_of(request, project)
    page, following = rows.newest_rows(
        found, statuses=status or (), user=user, text=q, queue=queue, since=since, until=until, before=cursor,
        limit=limit, kind=RunRow,
    )  # fmt: skip
    return ready(
        request,
        {"items": sent(statuses.worded(page)), "next": str(following) if following else None},
    )


@router.get("/{name}", response={200: RunOut, **REFUSALS}, summary="One run")
def detail(request: HttpRequest, response: HttpResponse, project: Path[str], name: str) -> RunOut:
    """By id, or the newest with the name. The `ETag` covers only what users edit."""
    return _tagged(response, run_of(request, project, name)[0])


@router.patch("/{name}", response={200: RunOut, **CONFLICTS, 412: StaleOut}, summary="Change a run")
def change(
    request: HttpRequest,
    response: HttpResponse,
    project: Path[str],
    name: str,
    body: PatchRunIn,
    if_match: IfMatch = None,
) -> RunOut:
    """Change its priority or its queue. With `If-Match`, a stale write gets a 412."""
    run, role = run_of(request, project, name, "member")
    if (body.priority is None) == (body.queue is None):
        raise Invalid.at("priority", msg=_("send either `priority` or `queue`"))
    if body.priority is not None:
        run = services.set_priority(run, caller(request), role, body.priority, if_match)
    else:
        run = services.set_queue(run, caller(request), role, body.queue or "", if_match)
    return _tagged(response, run)


@router.post("/{name}/stop", response={200: RunOut, **CONFLICTS}, summary="Stop a run")
def stop(
    request: HttpRequest, response: HttpResponse, project: Path[str], name: str, body: StopIn | None = None
) -> RunOut:
    """SIGTERM, then SIGKILL after its `stop_duration`. `abort` kills immediately.

    Of an ended run whose next scheduled run has not been created, it ends the schedule.
    """
    run, role = run_of(request, project, name, "member")
    return _tagged(response, services.stop(run, caller(request), role, abort=bool(body and body.abort)))


@router.post("/{name}/release", response={200: RunOut, **CONFLICTS}, summary="Release a run from its `after`")
def release(request: HttpRequest, response: HttpResponse, project: Path[str], name: str) -> RunOut:
    """Let it enter its queue without waiting for other runs any longer."""
    run, role = run_of(request, project, name, "member")
    return _tagged(response, dependencies.release(run, caller(request), role))


@router.delete("/{name}", response={204: None, **CONFLICTS}, summary="Delete a run")
def delete(request: HttpRequest, project: Path[str], name: str) -> Status[None]:
    """Only a run that has ended, for good: with its jobs, events, logs and directories. It ends the run's schedule."""
    run, role = run_of(request, project, name, "member")
    removal.delete(run, caller(request), role)
    return Status(204, None)


@router.post("/{name}/extend", response={200: RunOut, **CONFLICTS}, summary="Extend a run", tags=["holds"])
def extend(request: HttpRequest, response: HttpResponse, project: Path[str], name: str, body: ExtendIn) -> RunOut:
    """Add time to the `max_duration` of a placed hold, or of another placed run that has one."""
    run, role = run_of(request, project, name, "member")
    return _tagged(response, holds.extend(run, caller(request), role, body.duration))


@hold_router.post("", response={201: RunOut, **CONFLICTS, **refusals(413)}, summary="Hold GPUs or CPUs")
def hold(
    request: HttpRequest,
    response: HttpResponse,
    project: Path[str],
    body: HoldIn,
    idempotency_key: IdempotencyKey = "",
) -> Status[RunOut]:
    """Submit a run that reserves resources for interactive work. It waits in its queue like other runs.

    When it runs, `hold` has its host and connection details, and `held_until` its end. Stop it to release it.
    """
    found, role = project_of(request, project, "member")
    run = holds.submit_hold(found, caller(request), role, holds.HoldRequest(**body.dict()), idempotency_key)
    return Status(201, _tagged(response, selectors.find_run(found, str(run.uid))))


@router.get(
    "/{name}/decision", response={200: DecisionOut, **refusals(403, 404)}, summary="Why a run waits, place by place"
)
def decision(request: HttpRequest, project: Path[str], name: str) -> Decision:
    """Computed with the code of the placement pass; changes nothing."""
    return decide_now(run_of(request, project, name)[0])


@router.get("/{name}/compare", response={200: ComparisonOut, **REFUSALS}, summary="Compare two runs")
def compare(
    request: HttpRequest,
    project: Path[str],
    name: str,
    other: QueryEx[str, P(alias="with", description="Another run; by default the one before of the same name")] = "",
) -> comparison.Comparison:
    """Its settings, times and outcome on the left, those of the other run on the right.

    Without another run, the one before of the same name is on the left.
    """
    found, _role = project_of(request, project)
    return comparison.compare(*comparison.find_pair(found, name, other), timezone.now())


@router.get("/{name}/jobs", response={200: JobsOut, **REFUSALS}, summary="All jobs of a run")
def list_jobs(
    request: HttpRequest,
    project: Path[str],
    name: str,
    limit: QueryEx[int, P(ge=1, le=selectors.JOBS_AT_ONCE)] = 200,
    cursor: QueryEx[str, P(pattern=r"^(\d{1,9}\.\d{1,9})?$")] = "",
) -> dict[str, Any]:
    """Newest attempt first, then by node. The run itself has the first thousand."""
    jobs, following = jobs_page(run_of(request, project, name)[0], limit, cursor)
    return {"items": jobs, "next": following}


@router.get("/{name}/events", response={200: EventsOut, **REFUSALS}, summary="All events of a run")
def list_events(
    request: HttpRequest,
    project: Path[str],
    name: str,
    limit: QueryEx[int, P(ge=1, le=selectors.EVENTS_AT_ONCE)] = 200,
    cursor: int | None = None,
) -> dict[str, Any]:
    """Newest first. The run itself has the newest five hundred."""
    events, following = events_page(run_of(request, project, name)[0], limit, cursor)
    return {"items": events, "next": following}


@router.get(
    "/{name}/logs",
    response={200: None, **REFUSALS, **refusals(410)},
    summary="Raw log bytes of one job",
    openapi_extra={"responses": {200: {"content": RAW, "headers": LOG_HEADERS}}},
)
def read_logs(
    request: HttpRequest,
    project: Path[str],
    name: str,
    node: QueryEx[int, P(ge=0)] = 0,
    attempt: QueryEx[int | None, P(ge=1)] = None,
    offset: QueryEx[int, P(ge=0, lt=2**62)] = 0,
    tail: QueryEx[int | None, P(ge=0, le=100_000)] = None,
) -> HttpResponse:
    """stdout and stderr together, at most 4 MiB, from `offset` or the last `tail` lines.

    `X-Next-Offset` is the next offset. `X-Log-Complete: true`: nothing will follow. `X-Log-Missing`: bytes of output
    that a log over its limit lacks; offsets don't count them. `X-Log-Cut`: why later output is not kept.
    """
    run, _role = run_of(request, project, name)
    part = selectors.log_part(run, node=node, attempt=attempt, offset=offset, tail=tail, limit=LOG_LIMIT)
    response = HttpResponse(part.data, content_type="application/octet-stream")
    response["X-Next-Offset"] = str(part.next_offset)
    response["X-Attempt"] = str(part.attempt)
    response["X-Log-Complete"] = "true" if part.complete else "false"
    response["X-Log-Missing"] = str(part.missing)
    response["X-Log-Cut"] = part.cut
    return response


def _one_of_several(project: Project, made: Run | Sweep, *, is_new: bool) -> RunOut | Sweep:
    if isinstance(made, Sweep):
        return sweep_selectors.find_sweep(project, str(made.uid))
    return RunOut.of(selectors.find_run(project, str(made.uid)), is_new=is_new)


def _tagged(response: HttpResponse, run: Run, *, is_new: bool = False) -> RunOut:
    response["ETag"] = f'"{services.etag(run)}"'
    return RunOut.of(run, is_new=is_new)
