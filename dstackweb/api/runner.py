"""The API of runners (docs/runner.md). Not public; a token opens one job."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.utils import timezone
from ninja import P, QueryEx, Router

from dstackweb.api import tasks
from dstackweb.api.app import TokenOf, auth_of
from dstackweb.api.runner_schemas import ClaimIn, ExitIn, HeartbeatIn, HeartbeatsIn, SamplesIn, StartedIn
from dstackweb.api.tasks import TasksOut
from dstackweb.gpus import intake
from dstackweb.lib.errors import Conflict, DomainError, Forbidden, Gone, Invalid, NotFound, TooEarly
from dstackweb.lib.storage import Gap
from dstackweb.lib.times import to_ms
from dstackweb.runner.limits import ARTIFACT_PATH_MAX as PATH_MAX
from dstackweb.runner.spool import MARK as RECORD
from dstackweb.runs import archives, artifacts, attempts, heartbeats, logs
from dstackweb.runs.codes import MessageCode
from dstackweb.runs.heartbeats import HeardJob, Heartbeat
from dstackweb.runs.launch import attempt_fields, job_of_token, runner_spec
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE, JobStatus, Reason
from dstackweb.scheduler import restored
from dstackweb.scheduler.cloud import agents

FOREIGN = "this token is for another job"
EXPLAINED: dict[str, str] = {
    Reason.OUT_OF_DISK: "disk",
    Reason.CODE_REFUSED: "code_refused",
    Reason.IMAGE_PULL_FAILED: "image_pull_failed",
}
"""Reasons of which the message's detail has the same code, and what the runner says of them in this field."""


router = Router(auth=TokenOf(job_of_token))


@router.post("/{job_id}/claim", include_in_schema=False)
def claim(request: HttpRequest, job_id: UUID, body: ClaimIn) -> dict[str, Any]:
    """Become the one runner of this job, and get its spec; 409 for any other."""
    if auth_of(request) != job_id:
        raise Forbidden(FOREIGN)
    try:
        job = attempts.claim_job(job_id, body.nonce, body.host)
    except Job.DoesNotExist:
        raise _refusal(NotFound("no such job")) from None
    return {"heartbeat_s": settings.DSTACKWEB_HEARTBEAT_S, "spec": _spec(job)}


@router.get("/{job_id}/spec", include_in_schema=False)
def spec(request: HttpRequest, job_id: UUID) -> dict[str, Any]:
    """For runners of before the claim was answered with it."""
    return _spec(_wanted(request, job_id))


def _spec(job: Job) -> dict[str, Any]:
    """The commands and their environment, secrets included. If a secret was deleted meanwhile, the job ends.

    `alone`: no other node is waited for, and the job is not to stop.
    """
    try:
        found = runner_spec(job)
        return found | {"alone": found["nodes"] == 1 and job.status != JobStatus.TERMINATING}
    except Invalid as error:
        attempts.end_job(job.pk, Reason.EXECUTOR_ERROR, message=error.detail)
        raise Conflict(error.detail) from None


@router.get("/{job_id}/archive", include_in_schema=False)
def archive(request: HttpRequest, job_id: UUID) -> StreamingHttpResponse:
    """The code of the run. If its bytes are lost, the job ends: asking again would not bring them back."""
    job = _wanted(request, job_id)
    archive = job.run.archive
    if archive is None:
        raise NotFound("no code was shipped with this run")
    found = archives.open_archive(archive)
    if found is None:
        detail = (
            f"the code of this run ({archive.sha256[:12]}….tar.gz) is not on the server any more, so nothing was "
            "started. Submit it again with dstackweb apply, which uploads it again"
        )
        attempts.end_job(job.pk, Reason.EXECUTOR_ERROR, message=detail)
        raise Gone(detail)
    return StreamingHttpResponse(found, headers={"Content-Length": str(archive.size)})


@router.post("/{job_id}/heartbeat", include_in_schema=False)
def heartbeat(request: HttpRequest, job_id: UUID, body: HeartbeatIn) -> dict[str, Any]:
    """A heartbeat. The answer is to go on, to wait for the other nodes, or to stop."""
    job = _heard(request, job_id)
    answer = _orders(job)
    if body.phase == "pulling":
        heartbeats.note_pull(job_id)
    if body.phase == "exited":
        heartbeats.note_exited(job_id)
    if body.phase != "waiting" or answer["action"] == "stop":
        return answer
    if not heartbeats.reach_barrier(job_id, job):
        return answer | {"action": "wait", "heartbeat_s": min(1.0, settings.DSTACKWEB_HEARTBEAT_S)}
    return answer | {"nodes": attempt_fields(job.run_id, job.attempt)}


@router.post("/heartbeats", auth=None, include_in_schema=False)
def heartbeats_(request: HttpRequest, body: HeartbeatsIn) -> dict[str, Any]:
    """Heartbeats of many running jobs, each with its own token: `{"jobs": {id: answer}}`, as to a single one.

    Where the answer would be an error there is none: the job's runner asks by itself.
    """
    tokens = {job_of_token(one.token): one.nonce for one in body.jobs}
    taken = heartbeats.take([Heartbeat(job, nonce) for job, nonce in tokens.items() if job is not None])
    return {"jobs": {str(pk): _orders(job) for pk, job in taken.items() if not isinstance(job, DomainError)}}


def _heard(request: HttpRequest, job_id: UUID) -> HeardJob:
    """Note a heartbeat of the runner that claimed this job, which has not ended."""
    if auth_of(request) != job_id:
        raise Forbidden(FOREIGN)
    job = heartbeats.take([Heartbeat(job_id, request.headers.get("X-Nonce", ""))])[job_id]
    if isinstance(job, DomainError):
        raise _refusal(job)
    return job


def _orders(job: HeardJob) -> dict[str, Any]:
    """The answer to a heartbeat of a job that no longer waits for other nodes."""
    answer = {"action": "go", "heartbeat_s": settings.DSTACKWEB_HEARTBEAT_S, "max_duration_s": job.limit_s}
    if job.status != JobStatus.TERMINATING:
        return answer
    return answer | {"action": "stop", "grace_s": job.stop_grace_s or 0, "reason": job.stop_reason}


@router.post("/{job_id}/started", include_in_schema=False)
def started(request: HttpRequest, job_id: UUID, body: StartedIn) -> dict[str, Any]:
    """The commands were started; answered as a heartbeat."""
    job = _heard(request, job_id)
    attempts.start_job(job_id, image_digest=body.image_digest)
    return _orders(job)


@router.post("/{job_id}/logs", include_in_schema=False)
def append_logs(
    request: HttpRequest,
    job_id: UUID,
    offset: QueryEx[int, P(ge=0)],
    marks: QueryEx[int, P(ge=0, multiple_of=RECORD.size)] = 0,
    marks_size: QueryEx[int, P(ge=0, multiple_of=RECORD.size)] = 0,
) -> HttpResponse:
    """Bytes of the job's log from `offset`. After a gap: 409 with the offset to continue from.

    With `cut` in the answer the log is over a limit: what is sent is dropped, now and later, and the job goes on.
    Before them the body may have `marks_size` bytes of `runner.spool`, which begin at their own offset `marks`; the
    `marks` of the answer is where these continue.
    """
    _claim_of(request, job_id, only_active=True)
    kept = {"marks": logs.append_marks(job_id, marks, request.body[:marks_size])} if marks_size else {}
    try:
        appended = logs.append(job_id, offset, request.body[marks_size:])
        return JsonResponse({"next": appended.next} | ({"cut": appended.cut} if appended.cut else {}) | kept)
    except Gap as gap:
        return JsonResponse({"detail": str(gap), "expected": gap.expected} | kept, status=409)


@router.post("/{job_id}/artifacts", include_in_schema=False)
def add_artifact(
    request: HttpRequest,
    job_id: UUID,
    path: QueryEx[str, P(min_length=1, max_length=PATH_MAX)],
    size: QueryEx[int, P(ge=0, lt=2**62)],
    sha256: QueryEx[str, P(pattern="^[0-9a-f]{64}$")],
    offset: QueryEx[int, P(ge=0, lt=2**62)] = 0,
) -> HttpResponse:
    """Bytes of a file that the job left, from `offset`. After a gap: 409 with the offset to continue from.

    `done` in the answer: all of it is there. `refused`: why it is not kept; the other files may be.
    """
    _claim_of(request, job_id, only_active=True)
    try:
        taken = artifacts.take(job_id, artifacts.Offered(path, size, sha256), offset, request.body)
    except Gap as gap:
        return JsonResponse({"detail": str(gap), "expected": gap.expected}, status=409)
    return JsonResponse(
        {"next": taken.next, "done": taken.done} | ({"refused": taken.refused} if taken.refused else {})
    )


@router.post("/{job_id}/samples", include_in_schema=False)
def samples(request: HttpRequest, job_id: UUID, body: SamplesIn) -> dict[str, Any]:
    """Samples of a cloud job's own GPUs, each with its age in seconds."""
    job = _wanted(request, job_id)
    if job.host_id is not None:
        raise Conflict("this job's host reads its GPUs itself")
    strangers = {gpu.uuid for sample in body.samples for gpu in sample.gpus} - set(job.gpus)
    if strangers:
        raise Invalid(f"not this job's GPUs: {', '.join(sorted(strangers))}")
    now = timezone.now()
    intake.add_samples(job, body.taken(now), to_ms(now))
    return {}


@router.post("/{job_id}/tasks", include_in_schema=False)
def task_lines(request: HttpRequest, job_id: UUID) -> TasksOut:
    """The tasks that a job reports in its output. The body is that of the public endpoint for tasks."""
    job = _wanted(request, job_id)
    return tasks.take(request, job.run, job.attempt, f"log-{job.node}")


@router.post("/{job_id}/exit", include_in_schema=False)
def exit_(request: HttpRequest, job_id: UUID, body: ExitIn) -> dict[str, Any]:
    """The job has ended, its processes are gone and its log has been shipped."""
    instance_id = _claim_of(request, job_id)
    explained = getattr(body, EXPLAINED.get(body.reason, ""), None)
    detail = {"code": MessageCode(body.reason), **explained.dict()} if explained else None
    if body.reason == Reason.OUT_OF_MEMORY:
        detail = {"code": MessageCode.OUT_OF_MEMORY, "memory_mib": body.memory_mib}
    if body.interruption is not None and instance_id is not None:
        agents.record_interruption(instance_id, body.interruption.at)
    if body.artifacts is not None:
        left = [{**one.dict(), "why": one.why.value} for one in body.artifacts.left_out]
        artifacts.note_left_out(job_id, left, body.artifacts.number)
    attempts.report_end(
        job_id,
        body.reason,
        exit_code=body.exit_code,
        message=body.message,
        detail=detail,
        log_size=body.log_size,
        log_missing=body.log_missing,
        signalled=body.signalled,
        by_engine=body.by_engine,
    )
    return {}


def _refusal(error: DomainError) -> DomainError:
    """The answer to a runner that the server does not know: it ends everything. After a restore it first asks again."""
    if restored.is_waiting():
        return TooEarly("the server was restored, and does not know yet what was started since its backup")
    return error


def _wanted(request: HttpRequest, job_id: UUID) -> Job:
    """The job, if the caller is the runner that claimed it and the job has not ended."""
    _claim_of(request, job_id, only_active=True)
    return Job.objects.select_related("run__project", "run__archive", "host", "instance").get(pk=job_id)


def _claim_of(request: HttpRequest, job_id: UUID, *, only_active: bool = False) -> UUID | None:
    """The job's instance, if the caller is the runner that claimed it (and the job has not ended)."""
    if auth_of(request) != job_id:
        raise Forbidden(FOREIGN)
    found = Job.objects.filter(pk=job_id).values_list("claim_nonce", "status", "instance_id").first()
    if found is None:
        raise _refusal(NotFound("no such job"))
    nonce, status, instance_id = found
    if not nonce:
        raise _refusal(Conflict("claim the job first"))
    if request.headers.get("X-Nonce", "") != nonce:
        raise Conflict("another runner has this job")
    if only_active and status not in JOB_ACTIVE:
        raise Conflict("this job has ended")
    return instance_id
