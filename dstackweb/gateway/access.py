"""Who may enter which run, as the database has it. The gateway keeps nothing of this for longer than RECHECK_S."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from django.db.models import Q
from django.utils import timezone

from dstackweb.accounts import attempts
from dstackweb.accounts.access import role_in, visible_projects
from dstackweb.accounts.models import SSHKey, User
from dstackweb.accounts.tokens import authenticate_token
from dstackweb.gateway.answers import Denied
from dstackweb.lib.errors import TooMany
from dstackweb.lib.sql import parsed_uid
from dstackweb.runs.connections import Visit, may_act_in, may_enter, may_open, visitor
from dstackweb.runs.launch import job_of_token
from dstackweb.runs.models import Job, Run
from dstackweb.runs.service_codes import GatewayProblem
from dstackweb.runs.service_health import rules_of
from dstackweb.runs.states import ACTIVE, JOB_ACTIVE
from dstackweb.spec.codes import RunType
from dstackweb.spec.effective import HealthCheck

RECHECK_S = 60.0
GONE = "gone"
"""The status of a run that was removed."""
KEY_USE = dt.timedelta(minutes=1)
_ADMITS = Q(spec__type=RunType.DEV_ENVIRONMENT.value) | Q(spec__hold=True)
"""Runs that people enter by SSH."""
_CONNECTS = _ADMITS | Q(spec__type=RunType.SERVICE.value)


@dataclass(frozen=True)
class Visitor:
    """A person at a run that they may enter."""

    user_id: int
    user: str
    run_id: int
    run: str


@dataclass(frozen=True)
class Admission:
    """A user who may use what a run serves. `port` is the service's; None for the pages of a dev environment."""

    user: str
    run_id: int
    run: str
    port: int | None


@dataclass(frozen=True)
class CheckedPort:
    """What a service listens on, and how that is checked."""

    port: int
    rules: HealthCheck


@dataclass(frozen=True)
class RunnerAccess:
    """The runner of a job, which may connect; `service` if that is one."""

    job: UUID
    run_id: int
    attempt: int
    service: CheckedPort | None = None


def runner_of(job: UUID, token: str, nonce: str) -> RunnerAccess | None:
    """The job's runner, if it is the one that asks, and the job may be connected to."""
    if job_of_token(token) != job or not nonce:
        return None
    found = Job.objects.filter(pk=job, claim_nonce=nonce, status__in=JOB_ACTIVE)
    row = found.filter(run__in=Run.objects.filter(_CONNECTS)).values_list("run_id", "attempt", "run__spec").first()
    if row is None:
        return None
    run_id, attempt, spec = row
    is_service = spec.get("type") == RunType.SERVICE
    return RunnerAccess(job, run_id, attempt, CheckedPort(spec["port"], rules_of(spec)) if is_service else None)


def by_token(token: str, uid: str, address: str) -> Admission:
    """The owner of an API token at the service of this id. Raises Denied.

    Wrong tokens from one address are counted with those of the API.
    """
    user = authenticate_token(token)
    if user is None:
        try:
            attempts.check(address)
        except TooMany:
            raise Denied(GatewayProblem.TOO_MANY_FAILURES) from None
        attempts.count_failure(address)
        raise Denied(GatewayProblem.BAD_TOKEN)
    admission = _admitted(user, uid)
    if admission.port is None:
        raise Denied(GatewayProblem.TOKENS_NOT_TAKEN, name=admission.run)
    return admission


def by_visit(visit: Visit, uid: str) -> Admission:
    """A person who came from the page of the run of this id. Raises Denied."""
    user = visitor(visit)
    if user is None or not Run.objects.filter(pk=visit.run_id, uid=uid).exists():
        raise Denied(GatewayProblem.SIGN_IN)
    return _admitted(user, uid)


def _admitted(user: User, uid: str) -> Admission:
    run = Run.objects.select_related("project").filter(uid=uid).filter(_CONNECTS).first()
    if run is None or role_in(run.project, user) is None:
        raise Denied(GatewayProblem.NO_RUN)
    if not may_open(user, run):
        raise Denied(GatewayProblem.NO_ACCESS, name=run.name)
    if run.status not in ACTIVE:
        raise Denied(GatewayProblem.ENDED, name=run.name, status=run.status)
    return Admission(user.get_username(), run.pk, run.name, run.spec.get("port"))


def by_key(name: str, fingerprint: str) -> Visitor | None:
    """The run that `name` leads the owner of a key to: its name, `project/name`, or its id. None if there is none."""
    keys = SSHKey.objects.select_related("user").filter(fingerprint=fingerprint, user__is_active=True)
    for key in keys.order_by("pk"):
        if (run := _run_called(key.user, name)) is not None:
            now = timezone.now()
            stale = Q(last_used_at=None) | Q(last_used_at__lt=now - KEY_USE)
            SSHKey.objects.filter(stale, pk=key.pk).update(last_used_at=now)
            return Visitor(key.user.pk, key.user.get_username(), run.pk, run.name)
    return None


def _run_called(user: User, name: str) -> Run | None:
    """The one active run of this name that the user may enter, else the last one that has ended."""
    project, _, called = name.rpartition("/")
    runs = Run.objects.select_related("project").filter(_ADMITS, project__in=visible_projects(user))
    if project:
        runs = runs.filter(project__name=project)
    uid = parsed_uid(called)
    runs = runs.filter(uid=uid) if uid else runs.filter(name=called)
    found = [run for run in runs.order_by("-pk")[:50] if may_act_in(user, run)]
    active = [run for run in found if run.status in ACTIVE]
    if len(active) > 1:  # of several projects
        return None
    return next(iter((*active, *found)), None)


def may_still_enter(entries: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those of these users and runs that are still allowed."""
    return {entry for entry in entries if may_enter(*entry)}


def status_of(run_id: int) -> str:
    """The run's status, for those who may enter it."""
    return Run.objects.filter(pk=run_id).values_list("status", flat=True).first() or GONE
