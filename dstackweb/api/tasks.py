"""Telling of the tasks inside a run (docs/tracking.md): by the run's own commands, or by a member's program."""

from __future__ import annotations

import json
import time
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, UnreadablePostError
from ninja import Path, Router
from ninja.security import HttpBearer

from dstackweb.accounts.models import User
from dstackweb.accounts.services import authenticate_token
from dstackweb.api.app import project_of
from dstackweb.api.schemas import ErrorOut
from dstackweb.api.task_gate import Gate
from dstackweb.api.task_schemas import REQUEST_BODY, TasksOut
from dstackweb.lib.errors import Forbidden, Invalid, NotFound, TooLarge
from dstackweb.progress import ingest
from dstackweb.progress.parse import read
from dstackweb.runs import selectors
from dstackweb.runs.models import Job, Run
from dstackweb.runs.reporting import scope_for
from dstackweb.runs.tokens import job_of_tasks_token

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
