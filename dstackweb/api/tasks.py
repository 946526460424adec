"""Reporting the tasks inside a run (docs/tracking.md), and the client library for it as one file."""

from __future__ import annotations

import hashlib
import io
import json
import time
from functools import lru_cache
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, HttpResponse, UnreadablePostError
from ninja import Field, Path, Router, Schema
from ninja.security import HttpBearer

from dstackweb.accounts.models import User
from dstackweb.accounts.services import authenticate_token
from dstackweb.api.app import project_of
from dstackweb.api.schemas import ErrorOut
from dstackweb.api.task_gate import Gate
from dstackweb.lib.errors import Forbidden, Invalid, NotFound, TooLarge
from dstackweb.progress import ingest
from dstackweb.progress.events import Receipt, Refusal, Where
from dstackweb.progress.models import KEY_MAX, NAME_MAX
from dstackweb.progress.parse import COUNT_MAX, ENTRIES_MAX, REPORTER_MAX, SECONDS_MAX, SEQ_MAX, Refused, Told, read
from dstackweb.progress.states import ALIASES
from dstackweb.runner.pyz import package, write_zip
from dstackweb.runs import selectors
from dstackweb.runs.models import Job, Run
from dstackweb.runs.reporting import scope_for
from dstackweb.runs.tokens import job_of_tasks_token

_SEQ = {"type": "integer", "minimum": 0, "maximum": SEQ_MAX, "description": "Rises per reporter; else the body's"}
_KEY = {"type": "string", "minLength": 1, "maxLength": KEY_MAX}
_PREFIX = {"type": "string", "maxLength": NAME_MAX, "description": "Else by the key"}
_GROUP = {"type": "string", "maxLength": NAME_MAX, "description": "Else the prefix if that is told, else by the key"}
_SECONDS = {"type": "number", "minimum": 0, "maximum": SECONDS_MAX}
_NUMBER = {"type": "integer", "minimum": 0, "maximum": COUNT_MAX}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


_EVENT = _object(
    ["key", "state"],
    key=_KEY,
    state={"enum": list(ALIASES)},
    seq=_SEQ,
    prefix=_PREFIX,
    group=_GROUP,
    duration_s=_SECONDS,
    message={"type": "string", "description": "Why it failed"},
)
_COUNT = _object(
    ["prefix", "states"],
    prefix=_PREFIX | {"minLength": 1},
    group=_GROUP,
    seq=_SEQ,
    states={"type": "object", "propertyNames": {"enum": list(ALIASES)}, "additionalProperties": _NUMBER},
    duration_n=_NUMBER | {"description": "How many of the finished ones were timed, so far"},
    duration_s=_SECONDS | {"description": "What these have taken, so far"},
)
_FAILURE = _object(["key"], key=_KEY, prefix=_PREFIX, group=_GROUP, seq=_SEQ, message={"type": "string"})


def _entries(item: dict[str, Any], told: str) -> dict[str, Any]:
    return {"type": "array", "items": item, "description": f"{told}; of all entries at most {ENTRIES_MAX}"}


BODY = _object(
    [],
    reporter={"type": "string", "minLength": 1, "maxLength": REPORTER_MAX},
    seq=_SEQ | {"description": "Of all entries that have none; without it the server's time in microseconds"},
    events=_entries(_EVENT, "Tasks that have entered a state"),
    counts=_entries(_COUNT, "How many tasks of a group are in each state now, by this reporter"),
    failures=_entries(_FAILURE, "Tasks that failed, beside counts"),
    ended={
        "type": "boolean",
        "description": "It tells no more: its unfinished tasks are released",
    },
    attempt={"type": "integer", "minimum": 1, "description": "409 unless it is the present one"},
)
REQUEST_BODY = {"required": True, "content": {"application/json": {"schema": BODY}}}

REASONS = {
    "forgotten": "this task is forgotten for good",
    "too_many_tasks": "the run has as many tasks of their own as are kept; tell counts instead",
    "too_many_groups": "the run has as many groups as are kept",
    "too_many_prefixes": "the run has as many prefixes as are kept",
}


class RefusedOut(Schema):
    """An entry that was not taken. All others were."""

    list: Where = Field(description="Where it stands in the request")
    index: int
    key: str = Field(description="The task's key; of counts the prefix")
    reason: str
    detail: str


class TasksOut(Schema):
    """What became of a request."""

    applied: int
    outdated: int = Field(description="Known already, or something newer is")
    refused: list[RefusedOut]

    @classmethod
    def of(cls, told: Told, receipt: Receipt) -> TasksOut:
        """Both what could not be read and what could not be counted."""
        refused = [*map(_unread, told.refused), *(_uncounted(told, refusal) for refusal in receipt.refused)]
        return cls(applied=receipt.applied, outdated=receipt.outdated, refused=refused)


def _unread(refused: Refused) -> RefusedOut:
    return RefusedOut(
        list=refused.list, index=refused.index, key=refused.key, reason=refused.reason, detail=refused.detail
    )


def _uncounted(told: Told, refusal: Refusal) -> RefusedOut:
    return RefusedOut(
        list=refusal.list,
        index=told.places[refusal.list][refusal.index],
        key=refusal.key,
        reason=refusal.reason,
        detail=REASONS[refusal.reason],
    )


router = Router(tags=["progress"])

BURST_S = 2
gate = Gate(
    at_once=max(1, settings.DSTACKWEB_WEB_THREADS // 2),
    rate=settings.DSTACKWEB_TASKS_PER_S,
    burst=BURST_S * settings.DSTACKWEB_TASKS_PER_S,
)


class TasksToken(HttpBearer):
    """The token of a job's commands (`DSTACKWEB_TASKS_TOKEN`), or an API token."""

    def authenticate(self, request: HttpRequest, token: str) -> UUID | User | None:
        return job_of_tasks_token(token) or authenticate_token(token)


@router.post(
    "/{name}/tasks",
    auth=TasksToken(),
    response={200: TasksOut, **dict.fromkeys((401, 403, 404, 409, 413, 422, 429), ErrorOut)},
    openapi_extra={"requestBody": REQUEST_BODY},
    summary="Tell of the tasks inside a run",
)
def tell(request: HttpRequest, project: Path[str], name: str) -> TasksOut:
    """States of single tasks, or counts of whole groups. Sent again, or late, it changes nothing.

    By an API token of a member, or by the token that the run's commands find as `DSTACKWEB_TASKS_TOKEN`. One bad
    entry is refused by itself. A 429 says when to try again.
    """
    who: Any = getattr(request, "auth", None)
    if isinstance(who, UUID):
        job = _job(who, name)
        return take(request, job.run, job.attempt, f"job-{job.node}")
    found, _role = project_of(request, project, "member")
    return take(request, selectors.find_run(found, name), None, f"user-{who.username}")


def take(request: HttpRequest, run: Run, attempt: int | None, reporter: str) -> TasksOut:
    """Count what a request tells of an attempt (None: of that which it names, else the present one).

    `reporter` is who tells unless the request says so. Raises TooLarge, TooMany, Invalid and Conflict.
    """
    with gate.enter(run.pk):
        now_us = time.time_ns() // 1000
        raw = _body(request)
        gate.spend(run.pk, len(raw), now_us)
        told = read(_json(raw), reporter, now_us)
        gate.owe(run.pk, told.entries)
        scope_id = scope_for(run, told.attempt if attempt is None else attempt)
        return TasksOut.of(told, ingest.take(scope_id, told.batch, now_us // 1000))


def _job(job_id: UUID, name: str) -> Job:
    """The job whose commands tell, which do so of their own run only."""
    job = Job.objects.select_related("run").filter(pk=job_id).first()
    if job is None:
        raise NotFound("no such job")
    if name not in (str(job.run.uid), job.run.name):
        raise Forbidden("this token is for another run")
    return job


def _body(request: HttpRequest) -> bytes:
    try:
        return request.body
    except RequestDataTooBig:
        raise TooLarge(f"at most {settings.DATA_UPLOAD_MAX_MEMORY_SIZE >> 20} MiB in one request") from None
    except UnreadablePostError:  # who told it is gone
        raise Invalid("the body ended early") from None


def _json(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise Invalid("the body is no JSON") from None


downloads = Router(tags=["progress"])
ZIP = {"200": {"description": "OK", "content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}}}}


@downloads.get("/tracking.zip", auth=None, openapi_extra={"responses": ZIP}, summary="dstackweb.tracking as one file")
def tracking(request: HttpRequest) -> HttpResponse:
    """Put it on `sys.path` or PYTHONPATH, and `from dstackweb.tracking import task, track` works. It holds no secret;
    its `ETag` is its SHA-256."""
    data, sha256 = _zip()
    etag = f'"{sha256}"'
    if request.headers.get("If-None-Match") == etag:
        return HttpResponse(status=304, headers={"ETag": etag})
    return HttpResponse(data, content_type="application/zip", headers={"ETag": etag})


@lru_cache(maxsize=1)
def _zip() -> tuple[bytes, str]:
    """The archive as it was when this process first asked, and its SHA-256 in hex."""
    file = io.BytesIO()
    write_zip(file, package("tracking"))
    return file.getvalue(), hashlib.sha256(file.getvalue()).hexdigest()
