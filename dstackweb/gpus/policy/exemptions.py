"""Keeping a run that its policy would stop: for a while, and with a reason. The verdict on it stays as it is."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection

from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from dstackweb.accounts.access import allows
from dstackweb.accounts.models import Project, User
from dstackweb.gpus.models import Keep, ProjectPolicies
from dstackweb.gpus.policy.binding import policy_of
from dstackweb.lib.errors import Conflict, Forbidden, Invalid
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.models import Run
from dstackweb.runs.states import RunStatus
from dstackweb.runs.transitions import lock_run, record, touch
from dstackweb.spec.source import unusable

REASON_MAX = 200
MINUTES_MAX = 24 * 60


def policies_of(project: Project) -> ProjectPolicies:
    """How a project's policies are carried out; the defaults, not stored, where nobody has set anything."""
    return policies_by_project([project.pk])[project.pk]


def policies_by_project(project_ids: Collection[int]) -> dict[int, ProjectPolicies]:
    """The same for several projects, by id, in one query."""
    found = ProjectPolicies.objects.in_bulk(set(project_ids))
    return {pk: found.get(pk) or ProjectPolicies(project_id=pk) for pk in project_ids}


def kept_until(run_id: int) -> dt.datetime | None:
    """Until when a run was kept, though that may be over; None: it never was."""
    until: dt.datetime | None = Keep.objects.filter(run=run_id).aggregate(until=Max("until"))["until"]
    return until


def keep(run: Run, user: User, role: str, reason: str, *, minutes: int | None = None) -> Keep:
    """Keep a run from being stopped by its policy for `minutes` more: the project's usual time when not said.

    Only its owner or a manager may, and as often as the project allows; only a manager for longer than usual. Raises
    Forbidden, Invalid (no reason, no such time) or Conflict (nothing would stop it, or it was kept often enough).
    """
    if not (allows(role, "manager") or (allows(role, "member") and run.user_id == user.pk)):
        raise Forbidden(f"run {run.name} belongs to {run.user.get_username()}: they or a manager can keep it")
    reason = " ".join(reason.split())
    if not reason:
        raise Invalid.at("reason", msg="say why the run should be kept: others wait for its GPUs")
    if why := unusable(reason):
        raise Invalid.at("reason", msg=why)
    if len(reason) > REASON_MAX:
        raise Invalid.at("reason", msg=f"the reason may have {REASON_MAX} characters, not {len(reason)}")
    now = timezone.now()
    with transaction.atomic():
        fresh = lock_run(run.pk)
        policies = policies_of(fresh.project)
        wanted = _minutes(minutes, policies.keep_minutes, role)
        _refuse_needless(fresh, policies)
        before = fresh.keeps.count()
        if before >= policies.keeps:
            raise Conflict(f"run {fresh.name} was kept {before} times already, as often as {fresh.project} allows")
        until = max(now, kept_until(fresh.pk) or now) + dt.timedelta(minutes=wanted)
        made = Keep.objects.create(run=fresh, by=user, at=now, until=until, reason=reason)
        told = {"minutes": wanted, "until": until.isoformat(), "reason": reason, "left": policies.keeps - before - 1}
        record(fresh, RunEventKind.UTILIZATION_KEPT, told, actor=user, at=now)
        touch(fresh.queue_id)
    return made


def _minutes(asked: int | None, usual: int, role: str) -> int:
    most = MINUTES_MAX if allows(role, "manager") else usual
    wanted = usual if asked is None else asked
    if not 1 <= wanted <= most:
        raise Invalid.at("minutes", msg=f"a run can be kept for 1 to {most} minutes at once, not {wanted}")
    return wanted


def _refuse_needless(run: Run, policies: ProjectPolicies) -> None:
    """Raises Conflict where nothing would stop the run."""
    if run.status not in (RunStatus.PROVISIONING, RunStatus.RUNNING):
        raise Conflict(f"run {run.name} is {run.status}: only a run that has been placed and isn't ending is kept")
    policy = policy_of(run)
    if policy is None:
        raise Conflict(f"run {run.name} has no utilization policy: there is nothing to keep it from")
    if policy.action == "notify":
        raise Conflict(f"the utilization policy of run {run.name} only notifies: there is nothing to keep it from")
    if policies.observe_only:
        raise Conflict(f"utilization policies stop no runs in {run.project}: there is nothing to keep it from")
