"""Who may enter which run, as the database has it. The gateway keeps nothing of this for longer than RECHECK_S."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from django.db.models import Q
from django.utils import timezone

from dstackweb.accounts.access import visible_projects
from dstackweb.accounts.models import SSHKey, User
from dstackweb.runs.launch import job_of_token
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import ACTIVE, JOB_ACTIVE
from dstackweb.runs.visits import may_act_in, may_enter
from dstackweb.spec.codes import RunType

RECHECK_S = 60.0
KEY_USE = dt.timedelta(minutes=1)
_ADMITS = Q(spec__type=RunType.DEV_ENVIRONMENT.value) | Q(spec__hold=True)


@dataclass(frozen=True)
class Entry:
    """A person at a run that they may enter."""

    user_id: int
    user: str
    run_id: int
    run: str


@dataclass(frozen=True)
class Runner:
    """The runner of a job, which may connect."""

    job: UUID
    run_id: int
    attempt: int


def runner_of(job: UUID, token: str, nonce: str) -> Runner | None:
    """The job's runner, if it is the one that asks, and people may connect to the job."""
    if job_of_token(token) != job or not nonce:
        return None
    found = Job.objects.filter(pk=job, claim_nonce=nonce, status__in=JOB_ACTIVE)
    row = found.filter(run__in=Run.objects.filter(_ADMITS)).values_list("run_id", "attempt").first()
    return Runner(job, *row) if row else None


def by_key(name: str, fingerprint: str) -> Entry | None:
    """The run that `name` leads the owner of a key to: its name, `project/name`, or its id. None if there is none."""
    keys = SSHKey.objects.select_related("user").filter(fingerprint=fingerprint, user__is_active=True)
    for key in keys.order_by("pk"):
        if (run := _run_called(key.user, name)) is not None:
            now = timezone.now()
            stale = Q(last_used_at=None) | Q(last_used_at__lt=now - KEY_USE)
            SSHKey.objects.filter(stale, pk=key.pk).update(last_used_at=now)
            return Entry(key.user.pk, key.user.get_username(), run.pk, run.name)
    return None


def _run_called(user: User, name: str) -> Run | None:
    """The one active run of this name that the user may enter, else the last one that has ended."""
    project, _, called = name.rpartition("/")
    runs = Run.objects.select_related("project").filter(_ADMITS, project__in=visible_projects(user))
    if project:
        runs = runs.filter(project__name=project)
    try:
        runs = runs.filter(uid=UUID(called))
    except ValueError:
        runs = runs.filter(name=called)
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
    return Run.objects.filter(pk=run_id).values_list("status", flat=True).first() or "gone"
