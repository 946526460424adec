"""Holds: GPUs for interactive work. Also more time for runs."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from ninja import Field, Path, Router, Schema, Status

from dstackweb.api.app import IdempotencyKey, caller, project_of
from dstackweb.api.schemas import ErrorOut, RunOut
from dstackweb.runs import holds, selectors, services

router = Router(tags=["holds"])
of_runs = Router(tags=["holds"])
REFUSALS = {401: ErrorOut, 403: ErrorOut, 404: ErrorOut, 409: ErrorOut, 422: ErrorOut}


class HoldIn(Schema):
    """The resources, in the notation of the run file, and `for` how long."""

    model_config = {"extra": "forbid", "populate_by_name": True}

    duration: str = Field(alias="for", examples=["3h"])
    gpu: str = Field("", examples=["A100:2"])
    cpu: str = ""
    memory: str = ""
    name: str = ""
    queue: str = ""
    priority: int | None = Field(None, strict=True)


class ExtendIn(Schema):
    """The time to add."""

    model_config = {"extra": "forbid", "populate_by_name": True}

    duration: str = Field(alias="for", examples=["1h"])


@router.post("", response={201: RunOut, **REFUSALS, 413: ErrorOut}, summary="Hold GPUs or CPUs")
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
    run = selectors.find_run(found, str(run.uid))
    response["ETag"] = f'"{services.etag(run)}"'
    return Status(201, RunOut.of(run))


@of_runs.post("/{name}/extend", response={200: RunOut, **REFUSALS}, summary="Extend a run")
def extend(request: HttpRequest, response: HttpResponse, project: Path[str], name: str, body: ExtendIn) -> RunOut:
    """Add time to the `max_duration` of a placed hold, or of another placed run that has one."""
    found, role = project_of(request, project, "member")
    run = holds.extend(selectors.find_run(found, name), caller(request), role, body.duration)
    response["ETag"] = f'"{services.etag(run)}"'
    return RunOut.of(run)
