"""How a project enforces its utilization policies, and exempting a run from its own for a while. Verdicts go on."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection

from django.db import transaction
from django.db.models import Max
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.access import allows, may_change
from dstackweb.accounts.models import Project, User
from dstackweb.gpus.binding import policy_of
from dstackweb.gpus.models import PolicyExemption, ProjectPolicies
from dstackweb.lib.errors import Conflict, Forbidden, Invalid
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.models import Run
from dstackweb.runs.shared_rows import touch
from dstackweb.runs.states import RunStatus
from dstackweb.runs.transitions import lock_run, record
from dstackweb.spec.codes import UtilizationAction
from dstackweb.spec.source import unusable

REASON_MAX = 200
MINUTES_MAX = 24 * 60


def policies_of(project: Project) -> ProjectPolicies:
    """How a project enforces its policies; unsaved defaults where none are set."""
    return policies_by_project([project.pk])[project.pk]


def policies_by_project(project_ids: Collection[int]) -> dict[int, ProjectPolicies]:
    """The same for several projects, by ID, in one query."""
    found = ProjectPolicies.objects.in_bulk(set(project_ids))
    return {pk: found.get(pk) or ProjectPolicies(project_id=pk) for pk in project_ids}


def set_observe_only(project: Project, role: str, observe_only: bool) -> ProjectPolicies:
    """Have a project's policies only report, or be enforced again. Raises Forbidden."""
    if not allows(role, "manager"):
        raise Forbidden(
            _("only managers of %(project)s can change whether its utilization policies are enforced")
            % {"project": project}
        )
    return ProjectPolicies.objects.update_or_create(project=project, defaults={"observe_only": observe_only})[0]


def exempt_until(run_ids: Collection[int]) -> dict[int, dt.datetime]:
    """Return when the last exemption of each run ends or ended; runs that never had one are left out."""
    rows = PolicyExemption.objects.filter(run__in=run_ids).order_by().values_list("run")
    return dict(rows.annotate(until=Max("until")))


def exempt(run: Run, user: User, role: str, reason: str, *, minutes: int | None = None) -> PolicyExemption:
    """Keep a run from being stopped by its policy for `minutes` more: by default the project's usual time.

    Its owner and managers may, as often as the project allows; only managers for longer than usual. Raises Forbidden,
    Invalid (no reason, minutes out of range) or Conflict (no policy would stop it, or no exemptions left).
    """
    if not may_change(role, run.user_id, user):
        raise Forbidden(
            _("run %(run)s belongs to %(user)s: only they or a manager can keep it")
            % {"run": run.name, "user": run.user.get_username()}
        )
    reason = " ".join(reason.split())
    if not reason:
        raise Invalid.at("reason", msg=_("a reason is required: other runs may be waiting for its GPUs"))
    if why := unusable(reason):
        raise Invalid.at("reason", msg=why)
    if len(reason) > REASON_MAX:
        raise Invalid.at(
            "reason",
            msg=_("at most %(reason_max)s characters, got %(reason)s")
            % {"reason_max": REASON_MAX, "reason": len(reason)},
        )
    now = timezone.now()
    with transaction.atomic():
        fresh = lock_run(run.pk)
        policies = policies_of(fresh.project)
        duration = _minutes(minutes, policies.exemption_minutes, role)
        _check_stoppable(fresh, policies)
        used = fresh.policy_exemptions.count()
        if used >= policies.max_exemptions:
            raise Conflict(
                _("run %(run)s was kept %(used)s times already, the most that %(project)s allows")
                % {"run": fresh.name, "used": used, "project": fresh.project}
            )
        until = max(now, exempt_until([fresh.pk]).get(fresh.pk, now)) + dt.timedelta(minutes=duration)
        exemption = PolicyExemption.objects.create(run=fresh, by=user, at=now, until=until, reason=reason)
        left = policies.max_exemptions - used - 1
        data = {"minutes": duration, "until": until.isoformat(), "reason": reason, "left": left}
        record(fresh, RunEventKind.UTILIZATION_KEPT, data, actor=user, at=now)
        touch(fresh.queue_id)
    return exemption


def _minutes(requested: int | None, usual: int, role: str) -> int:
    most = MINUTES_MAX if allows(role, "manager") else usual
    minutes = usual if requested is None else requested
    if not 1 <= minutes <= most:
        raise Invalid.at(
            "minutes",
            msg=_("a run can be kept for 1 to %(most)s minutes at a time, not %(minutes)s")
            % {"most": most, "minutes": minutes},
        )
    return minutes


def _check_stoppable(run: Run, policies: ProjectPolicies) -> None:
    """Raises Conflict where no policy would stop the run."""
    if run.status not in (RunStatus.PROVISIONING, RunStatus.RUNNING):
        raise Conflict(
            _("run %(run)s is %(status)s: only provisioning or running runs can be kept")
            % {"run": run.name, "status": run.status}
        )
    policy = policy_of(run)
    if policy is None:
        raise Conflict(_("run %(run)s has no utilization policy: no policy would stop it") % {"run": run.name})
    if policy.action == UtilizationAction.NOTIFY:
        raise Conflict(
            _("the utilization policy of run %(run)s only notifies: it would not be stopped") % {"run": run.name}
        )
    if policies.observe_only:
        raise Conflict(
            _("%(project)s only observes its utilization policies: the run would not be stopped")
            % {"project": run.project}
        )
