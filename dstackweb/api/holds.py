"""Holds: GPUs for a person to work on, and more time for what runs."""

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
    """What to hold, in the notation of the run file, and `for` how long."""

    model_config = {"extra": "forbid", "populate_by_name": True}

    duration: str = Field(alias="for", examples=["3h"])
    gpu: str = Field("", examples=["A100:2"])
    cpu: str = ""
    memory: str = ""
    name: str = ""
    queue: str = ""
    priority: int | None = Field(None, strict=True)


class ExtendIn(Schema):
    """How much time more."""

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
    """A run that keeps what it is given for a person to work on. It waits in its queue like any other.

    Once it runs, `hold` says where it is and how to get in, and `held_until` for how long. Stop it to give it back.
    """
    found, role = project_of(request, project, "member")
    run = holds.submit_hold(found, caller(request), role, holds.HoldRequest(**body.dict()), idempotency_key)
    run = selectors.find_run(found, str(run.uid))
    response["ETag"] = f'"{services.etag(run)}"'
    return Status(201, RunOut.of(run))


@of_runs.post("/{name}/extend", response={200: RunOut, **REFUSALS}, summary="Give a placed run more time")
def extend(request: HttpRequest, response: HttpResponse, project: Path[str], name: str, body: ExtendIn) -> RunOut:
    """Lengthen the `max_duration` of a hold, or of any other run that has one."""
    found, role = project_of(request, project, "member")
    run = holds.extend(selectors.find_run(found, name), caller(request), role, body.duration)
    response["ETag"] = f'"{services.etag(run)}"'
    return RunOut.of(run)
