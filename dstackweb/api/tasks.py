"""Reporting the tasks inside a run (docs/tracking.md), and the client library for it as one file."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from uuid import UUID

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from ninja import Field, Path, Router, Schema
from ninja.security import HttpBearer
from pydantic import TypeAdapter

from dstackweb.accounts.models import User
from dstackweb.api.app import auth_of, refusals, run_of, sign_in
from dstackweb.lib.errors import Conflict, Forbidden, Invalid, NotFound, TooMany
from dstackweb.lib.models import room
from dstackweb.progress import reports
from dstackweb.progress.ingest import Together
from dstackweb.progress.reports import ENTRIES_MAX, MESSAGE_MAX, Batch, EntryList, ParsedRequest, Receipt, parse_request
from dstackweb.runner.pyz import package, write_zip
from dstackweb.runs.launch import job_of_tasks_token, masker, scope_for
from dstackweb.runs.models import Job, Run


def _entries(entries: TypeAdapter[Any], text: str) -> dict[str, Any]:
    (item,) = entries.json_schema()["$defs"].values()
    return {"type": "array", "items": item, "description": f"{text}; at most {ENTRIES_MAX} entries in all lists"}


BODY = reports.BODY.json_schema()
BODY["properties"] |= {
    "events": _entries(reports.EVENTS, "Tasks that entered a state"),
    "counts": _entries(reports.COUNTS, "This reporter's tasks of a group in each state"),
    "failures": _entries(reports.FAILURES, "Failed tasks, in addition to counts"),
}
REQUEST_BODY = {"required": True, "content": {"application/json": {"schema": BODY}}}

REASONS = {
    "forgotten": "this task was forgotten",
    "too_many_tasks": "the run has too many individual tasks; report counts instead",
    "too_many_groups": "the run has too many groups",
    "too_many_prefixes": "the run has too many prefixes; report further ones under one name",
}


class RefusedOut(Schema):
    """A rejected entry. All others were accepted."""

    list: EntryList = Field(description="The entry's list in the request")
    index: int
    key: str = Field(description="The task's key; the prefix for counts")
    reason: str
    detail: str


class TasksOut(Schema):
    """The result of a request."""

    attempt: int = Field(description="Attempt of the run that counts these tasks")
    applied: int
    outdated: int = Field(description="Entries that are not newer than what is known")
    refused: list[RefusedOut]

    @classmethod
    def of(cls, attempt: int, parsed: ParsedRequest, receipt: Receipt) -> TasksOut:
        """List invalid entries and entries that exceed limits, by their indices in the request."""
        uncounted = [
            replace(one, index=parsed.positions[one.list][one.index], detail=REASONS[one.reason])
            for one in receipt.rejected
        ]
        refused = [RefusedOut.from_orm(one) for one in (*parsed.rejected, *uncounted)]
        return cls(attempt=attempt, applied=receipt.applied, outdated=receipt.outdated, refused=refused)


PER_PROJECT = 2
"""Concurrent requests that one project can always have: one is counted while the next one is parsed."""
COST = 50
"""The cost of a request in addition to its entries, in entries."""
ENTRY_BYTES = 1000
"""Bytes of a body that cost as much as an entry: so invalid bodies are not free."""
AGAIN_S = 1.0
REMEMBERED = 1000
"""The most buckets of runs before full ones are dropped."""


class Gate:
    """Limits of task reports in a process: `at_once` requests; `rate` entries per second and run, `burst` saved up.

    Further requests are refused immediately, so that reports don't block pages. The runs of a project leave a place for
    those of others.
    """

    def __init__(self, at_once: int, rate: float, burst: float) -> None:
        self._at_once, self._rate, self._burst = at_once, rate, burst
        self._lock = threading.Lock()
        self._inside: Counter[int] = Counter()
        self._buckets: dict[int, tuple[float, int]] = {}

    @contextmanager
    def enter(self, project_id: int) -> Iterator[None]:
        """Enter a limited section. Raises TooMany if it is full."""
        with self._lock:
            if self._inside.total() >= self._at_once or self._inside[project_id] >= max(PER_PROJECT, self._at_once - 1):
                raise TooMany(_("too many task reports at once"), AGAIN_S)
            self._inside[project_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside[project_id] -= 1
                if not self._inside[project_id]:
                    del self._inside[project_id]

    def spend(self, run_id: int, size: int, now_us: int) -> None:
        """Take what a request of `size` bytes costs from the run's bucket, before its body is understood, which is
        work. Raises TooMany while the bucket is empty.

        The last one may go into debt: any request that is allowed at all gets through in the end.
        """
        with self._lock:
            tokens, at_us = self._buckets.get(run_id, (self._burst, now_us))
            left = room(tokens, at_us, self._rate, self._burst, now_us)
            if left <= 0:
                detail = _("this run reports more than %(rate)s tasks per second") % {"rate": f"{self._rate:,.0f}"}
                raise TooMany(detail, max(AGAIN_S, -left / self._rate))
            if len(self._buckets) >= REMEMBERED:
                self._forget_full(now_us)
            self._buckets[run_id] = (left - size / ENTRY_BYTES - COST, now_us)

    def owe(self, run_id: int, entries: int) -> None:
        """Take what its entries cost, now that they are known."""
        with self._lock:
            if run_id in self._buckets:
                tokens, at_us = self._buckets[run_id]
                self._buckets[run_id] = (tokens - entries, at_us)

    def _forget_full(self, now_us: int) -> None:
        self._buckets = {
            run_id: (tokens, at_us)
            for run_id, (tokens, at_us) in self._buckets.items()
            if room(tokens, at_us, self._rate, self._burst, now_us) < self._burst
        }


router = Router(tags=["progress"])
together = Together()

BURST_S = 2
gate = Gate(
    at_once=max(1, settings.DSTACKWEB_WEB_THREADS // 2),
    rate=settings.DSTACKWEB_TASKS_PER_S,
    burst=BURST_S * settings.DSTACKWEB_TASKS_PER_S,
)


class TasksToken(HttpBearer):
    """The token of a job's commands (`DSTACKWEB_TASKS_TOKEN`), or an API token."""

    def authenticate(self, request: HttpRequest, token: str) -> UUID | User | None:
        return job_of_tasks_token(token) or sign_in(request, token)


@router.post(
    "/{name}/tasks",
    auth=TasksToken(),
    response={200: TasksOut, **refusals(403, 404, 409, 413, 422, 429)},
    openapi_extra={"requestBody": REQUEST_BODY},
    summary="Report the tasks of a run",
)
def report(request: HttpRequest, project: Path[str], name: str) -> TasksOut:
    """States of single tasks, or counts of groups. Repeated and outdated entries change nothing.

    With the API token of a member, or the token in `DSTACKWEB_TASKS_TOKEN` of the run's commands. Invalid entries are
    rejected individually. After a 429, try again after `Retry-After`. A 409 has a `reason`: `not_yet` (the run waits to
    start, or for its next attempt: try again later), `attempt_over` (of the request or of the job's token), `run_over`.
    """
    who = auth_of(request)
    if isinstance(who, UUID):
        job = _job(who, name)
        return take(request, job.run, job.attempt, f"job-{job.node}")
    run, _role = run_of(request, project, name, "member")
    return take(request, run, None, f"user-{who.username}")


def take(request: HttpRequest, run: Run, attempt: int | None, reporter: str) -> TasksOut:
    """Count the tasks that a request reports for an attempt (None: the one in the request, else the current one).

    `reporter` is the default name of the reporter. Raises TooMany, Invalid and Conflict.
    """
    with gate.enter(run.project_id):
        now_us = time.time_ns() // 1000
        raw = request.body
        gate.spend(run.pk, len(raw), now_us)
        parsed = parse_request(_json(raw), reporter, now_us)
        gate.owe(run.pk, parsed.entries)
        receipt = _count(run, parsed.attempt if attempt is None else attempt, parsed.batch, now_us // 1000)
        return TasksOut.of(run.attempt, parsed, receipt)


def _without_secrets(run: Run, batch: Batch) -> Batch:
    batch = reports.with_names(batch, lambda names: _masked_names(run, names))
    return reports.with_messages(batch, lambda message: _masked(run, message))


def _masked_names(run: Run, names: Collection[str]) -> dict[str, str]:
    """Other names for those with secrets of the run: masked, or for all of them a digest if these can't be read."""
    if (found := masker(run)) is None:
        return {name: hashlib.sha256(name.encode()).hexdigest()[:16] for name in names}
    before = list(names)
    data = "\0".join(before).encode()  # no name and no secret has a NUL
    if (masked := found.mask(data)) == data:
        return {}
    after = masked.decode("utf-8", "replace").split("\0")
    return {old: new[: len(old)] for old, new in zip(before, after, strict=True) if old != new}


def _masked(run: Run, message: str) -> str:
    """A message without the run's secrets, nor the beginning of one where it was cut; empty if they can't be read."""
    if (found := masker(run)) is None:
        return ""
    data = message.encode()
    end = found.settled(data) if len(message) >= MESSAGE_MAX else len(data)
    return (found.mask(data)[:end] + b"*" * (len(data) - end)).decode("utf-8", "replace")[:MESSAGE_MAX]


def _count(run: Run, attempt: int | None, batch: Batch, now_ms: int) -> Receipt:
    """Secrets are masked once the attempt is known to be open: reports after its end cost nothing more."""
    try:
        return together.ingest(scope_for(run, attempt), _without_secrets(run, batch), now_ms)
    except Conflict:  # the attempt may have ended since the run was read: a reporter of any attempt goes on
        run.refresh_from_db(fields=["status", "attempt"])
        return together.ingest(scope_for(run, attempt), _without_secrets(run, batch), now_ms)


def _job(job_id: UUID, name: str) -> Job:
    """The job of a token, whose commands can report only for their own run."""
    job = Job.objects.select_related("run").filter(pk=job_id).first()
    if job is None:
        raise NotFound(_("no such job"))
    if name not in (str(job.run.uid), job.run.name):
        raise Forbidden(_("this token is for another run"))
    return job


def _json(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise Invalid(_("the body is not valid JSON")) from None


downloads = Router(tags=["progress"])
ZIP = {"200": {"description": "OK", "content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}}}}


@downloads.get("/tracking.zip", auth=None, openapi_extra={"responses": ZIP}, summary="dstackweb.tracking as one file")
def tracking(request: HttpRequest) -> HttpResponse:
    """Add it to `sys.path` or PYTHONPATH for `from dstackweb.tracking import task, track`. No secrets are inside.

    Its `ETag` is its SHA-256.
    """
    return zip_response(request, *_zip())


def zip_response(request: HttpRequest, data: bytes, sha256: str) -> HttpResponse:
    """A ZIP file, or 304 if the client has it."""
    etag = f'"{sha256}"'
    if request.headers.get("If-None-Match") == etag:
        return HttpResponse(status=304, headers={"ETag": etag})
    return HttpResponse(data, content_type="application/zip", headers={"ETag": etag})


@lru_cache(maxsize=1)
def _zip() -> tuple[bytes, str]:
    """The archive, made once per process, and its SHA-256 in hex."""
    file = io.BytesIO()
    write_zip(file, package("tracking"))
    return file.getvalue(), hashlib.sha256(file.getvalue()).hexdigest()
