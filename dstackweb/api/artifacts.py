"""Artifacts of a run: what its jobs left, listed and downloaded."""

from __future__ import annotations

import datetime as dt
from functools import partial
from typing import Any

from django.http import HttpRequest, HttpResponseBase
from ninja import Field, P, Path, QueryEx, Router, Schema

from dstackweb.api.app import RAW, REFUSALS, refusals, run_of
from dstackweb.lib.downloads import file_response
from dstackweb.runs import artifacts
from dstackweb.wording import storage as words

router = Router(tags=["runs"])
FILE_HEADERS = {
    "ETag": {"schema": {"type": "string"}, "description": "Its SHA-256, in quotes"},
    "Content-Range": {"schema": {"type": "string"}, "description": "Of a 206"},
}


class ArtifactOut(Schema):
    """A file that a job left. `content_type` is guessed from its name."""

    path: str
    node: int = Field(validation_alias="job.node")
    attempt: int = Field(validation_alias="job.attempt")
    size: int
    sha256: str
    content_type: str
    stored_at: dt.datetime


class LeftOutOut(Schema):
    """A file that was not kept; `why` is a code and `detail` says it in words. `size` is null where it is unknown."""

    path: str
    node: int
    attempt: int
    size: int | None
    why: str
    detail: str


class ArtifactsOut(Schema):
    """`left_out` names some of the `left_out_number` files that were not kept."""

    items: list[ArtifactOut]
    next: str | None
    left_out: list[LeftOutOut]
    left_out_number: int


@router.get("/{name}/artifacts", response={200: ArtifactsOut, **REFUSALS}, summary="Artifacts of a run")
def index(
    request: HttpRequest,
    project: Path[str],
    name: str,
    limit: QueryEx[int, P(ge=1, le=artifacts.MOST_FILES)] = 500,
    cursor: QueryEx[int, P(ge=0, lt=2**31)] = 0,
) -> dict[str, Any]:
    """The files that its jobs left in `$DSTACKWEB_ARTIFACTS`: newest attempt first, then by node and path."""
    run, _role = run_of(request, project, name)
    found = list(artifacts.of_run(run)[cursor : cursor + limit + 1])
    jobs = artifacts.left_out(run)
    return {
        "items": found[:limit],
        "next": str(cursor + limit) if len(found) > limit else None,
        "left_out": [
            {"node": job.node, "attempt": job.attempt, "detail": words.left_out(one["why"]), **one}
            for job in jobs
            for one in job.artifacts_left["left_out"]
        ],
        "left_out_number": sum(job.artifacts_left["number"] for job in jobs),
    }


@router.get(
    "/{name}/artifacts/file",
    response={200: None, **REFUSALS, **refusals(410)},
    summary="One artifact's bytes",
    openapi_extra={
        "responses": {
            200: {"content": RAW, "headers": FILE_HEADERS},
            206: {"description": "The part that `Range` asks for", "content": RAW, "headers": FILE_HEADERS},
            416: {"description": "The range is behind the end"},
        }
    },
)
def read(
    request: HttpRequest,
    project: Path[str],
    name: str,
    path: QueryEx[str, P(min_length=1, max_length=512)],
    node: QueryEx[int, P(ge=0, lt=2**31)] = 0,
    attempt: QueryEx[int | None, P(ge=1, lt=2**31)] = None,
) -> HttpResponseBase:
    """By its path and node, of the newest attempt that has it or of `attempt`. `Range` asks for a part."""
    run, _role = run_of(request, project, name)
    found = artifacts.find(run, path, node, attempt)
    return file_response(request, partial(artifacts.read, found), size=found.size, sha256=found.sha256, name=found.name)
