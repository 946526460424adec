"""Applying a profile's changed utilization policy to active runs that an admin chooses: those that have theirs from the
profile, not from their own file, or none. With a run of a sweep, those of it that are still to be created get it."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.models import Project, User
from dstackweb.gpus import binding
from dstackweb.lib.errors import Conflict
from dstackweb.lib.times import to_moment, to_ms
from dstackweb.profiles.models import Profile
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.models import Job, Run, Sweep
from dstackweb.runs.queue.queues import lock_queue
from dstackweb.runs.shared_rows import shared_rows_last, touch, touch_sweep
from dstackweb.runs.states import JobStatus, RunStatus
from dstackweb.runs.transitions import lock_run, record
from dstackweb.spec.codes import UtilizationAction
from dstackweb.spec.effective import UtilizationPolicy
from dstackweb.spec.run_file import parse_profile_settings

NOT_ENDING = (RunStatus.PENDING, RunStatus.SUBMITTED, RunStatus.PROVISIONING, RunStatus.RUNNING)
SHOWN = 200
"""Runs listed and changed at once."""
PREDICTED = 50
"""Running runs for which the stop time is computed, which reads their samples."""


@dataclass(frozen=True)
class PolicyChange:
    """One run whose policy would change. `stops_at` is when it will be stopped if it stays as idle as its samples show:
    None when it isn't low or that was not computed."""

    run: Run
    before: UtilizationPolicy | None
    after: UtilizationPolicy | None
    stops_at: dt.datetime | None = None


def by_change(rows: Iterable[PolicyChange]) -> list[tuple[PolicyChange, list[PolicyChange]]]:
    """The runs by what changes for them, so that it is shown once; the first stands for its group."""
    groups: dict[str, list[PolicyChange]] = defaultdict(list)
    for row in rows:
        groups[f"{row.before} {row.after}"].append(row)
    return [(rows[0], rows) for rows in groups.values()]


@dataclass(frozen=True)
class PolicyChanges:
    """The first runs that would change, and how many there are in all, under the policy with this fingerprint."""

    listed: list[PolicyChange]
    total: int
    fingerprint: str


def policy_set_by(profile: Profile) -> UtilizationPolicy | None:
    """The policy that a profile sets, if any. Raises Invalid for settings that no run could use."""
    fields = parse_profile_settings(profile.settings).utilization_policy
    return None if fields is None else UtilizationPolicy.of(fields)


def fingerprint(policy: UtilizationPolicy | None) -> str:
    text = json.dumps(policy.model_dump(mode="json") if policy else None, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def affected(profile: Profile) -> QuerySet[Run]:
    """Active runs with GPUs whose utilization policy this profile determines, whatever theirs is now."""
    own, in_projects = "provenance__utilization_policy", Q(project__in=projects_of(profile))
    from_it = Q(**{f"{own}__source": "profile", f"{own}__profile": profile.name})
    of_it = Q(spec__profile=profile.name)
    if profile.is_default:
        # Submitted while the project had no default profile.
        of_it |= Q(spec__profile=None, project__in=projects_of(profile, "is_default"))
    unset = Q(**{f"{own}__source": "default"}) & of_it
    statuses = [status.value for status in NOT_ENDING]
    active = Run.objects.filter(status__in=statuses, spec__requirements__gpu_count_min__gt=0)
    return active.filter(in_projects & (from_it | unset))


def using(profile: Profile) -> QuerySet[Run]:
    """Runs that were submitted with this profile, whatever of it their own file replaced."""
    return Run.objects.filter(spec__profile=profile.name, project__in=projects_of(profile))


def projects_of(profile: Profile, alike: str = "name") -> QuerySet[Project]:
    """The projects whose runs get this profile when they name it: those without one of their own that is `alike`, by
    name. With `is_default`, those whose runs get it without naming any."""
    if profile.project_id is not None:
        return Project.objects.filter(pk=profile.project_id)
    same = Profile.objects.filter(**{alike: getattr(profile, alike)}, project__isnull=False)
    return Project.objects.exclude(pk__in=same.values("project"))


def changes(profile: Profile, now: dt.datetime) -> PolicyChanges:
    """The active runs whose policy would change, placed ones first. Raises Invalid."""
    policy = policy_set_by(profile)
    found = affected(profile).values_list("pk", "status", "spec__utilization_policy", "spec__hold")
    ids = [
        (status not in (RunStatus.RUNNING, RunStatus.PROVISIONING), pk)
        for pk, status, before, hold in found
        if (UtilizationPolicy.model_validate(before) if before else None) != _for(policy, bool(hold))
    ]
    listed = [pk for _waits, pk in sorted(ids)[:SHOWN]]
    runs = Run.objects.select_related("project", "user").defer("config_text", "env_secret").in_bulk(listed)
    rows = [
        PolicyChange(run, binding.policy_of(run), _for(policy, run.is_hold)) for pk in listed if (run := runs.get(pk))
    ]
    return PolicyChanges(_with_stop_times(rows, now), len(ids), fingerprint(policy))


def _for(policy: UtilizationPolicy | None, is_hold: bool) -> UtilizationPolicy | None:
    """The policy as a run gets it: for a hold it only notifies."""
    return policy.model_copy(update={"action": UtilizationAction.NOTIFY}) if policy is not None and is_hold else policy


def _with_stop_times(rows: list[PolicyChange], now: dt.datetime) -> list[PolicyChange]:
    """The same rows, with the time at which running runs would be stopped."""
    running = [row for row in rows if row.run.status == RunStatus.RUNNING and row.after][:PREDICTED]
    stops_at = {row.run.pk: _stops_at(row.run, row.after, now) for row in running}
    return [replace(row, stops_at=stops_at.get(row.run.pk)) for row in rows]


def _stops_at(run: Run, policy: UtilizationPolicy | None, now: dt.datetime) -> dt.datetime | None:
    """When a policy would stop the first of a run's jobs; `now` where that is overdue."""
    if policy is None or policy.action == UtilizationAction.NOTIFY:
        return None
    found = []
    for job in Job.objects.filter(run=run, attempt=run.attempt, status=JobStatus.RUNNING):
        verdict = binding.verdict_if_bound(job, policy, to_ms(now))
        if verdict.stops_ms is not None:
            found.append(max(to_moment(verdict.stops_ms), now))
    return min(found, default=None)


def apply(profile: Profile, run_ids: Collection[int], shown: str, actor: User) -> int:
    """Give these runs the profile's policy where it applies and differs; returns how many changed.

    `shown` is the fingerprint of the policy that the actor saw. Raises Conflict when the profile has changed since.
    Each run has its own transaction: after an interruption, apply again to the rest.
    """
    policy = policy_set_by(profile)
    if fingerprint(policy) != shown:
        raise Conflict(_("the profile has changed since you opened this page: review the list again"))
    mine = dict(affected(profile).filter(pk__in=run_ids).order_by("pk").values_list("pk", "sweep"))
    for sweep_id in sorted({sweep_id for sweep_id in mine.values() if sweep_id is not None}):
        _apply_to_sweep(profile, policy, sweep_id)
    return sum(_apply(profile, policy, run_id, actor) for run_id in mine)


def _apply_to_sweep(profile: Profile, policy: UtilizationPolicy | None, sweep_id: int) -> None:
    """Give the policy to the runs of a sweep that are still to be created."""
    with shared_rows_last():
        lock_queue(Sweep.objects.values_list("queue_id", flat=True).get(pk=sweep_id))  # they are created behind it
        sweep = Sweep.objects.get(pk=sweep_id)
        Sweep.objects.filter(pk=sweep_id).update(**_with_policy(sweep, profile, policy))
        touch_sweep(sweep)


def _with_policy(row: Run | Sweep, profile: Profile, policy: UtilizationPolicy | None) -> dict[str, Any]:
    """The spec and provenance of a run or sweep with this policy of the profile, which may be none."""
    source: dict[str, Any] = {"source": "default"}
    if policy is not None:
        source = {"source": "profile", "profile": profile.name}
        source |= {"notifies": True} if row.spec.get("hold") else {}
    return {
        "spec": {**row.spec, "utilization_policy": policy.model_dump(mode="json") if policy else None},
        "provenance": {**row.provenance, "utilization_policy": source},
    }


def _apply(profile: Profile, policy: UtilizationPolicy | None, run_id: int, actor: User) -> bool:
    now = timezone.now()
    with transaction.atomic():
        run = lock_run(run_id)
        before, after = binding.policy_of(run), _for(policy, run.is_hold)
        if run.status not in NOT_ENDING or before == after:
            return False
        values = _with_policy(run, profile, after)
        Run.objects.filter(pk=run.pk).update(**values)
        run.spec, run.provenance = values["spec"], values["provenance"]
        data = {
            "profile": profile.name,
            "before": before.model_dump(mode="json") if before else None,
            "after": after.model_dump(mode="json") if after else None,
        }
        record(run, RunEventKind.UTILIZATION_POLICY_CHANGED, data, actor=actor, at=now)
        jobs = Job.objects.filter(run=run, attempt=run.attempt, status=JobStatus.RUNNING).order_by("node")
        for job in list(jobs):
            binding.rebind(job)
        touch(run.queue_id)
    return True
