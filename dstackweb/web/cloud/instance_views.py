"""The project's cloud instances: their runs, cost, and terminating idle ones; its spending and budget this month."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.db.models import Q
from django.http import HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.models import Project
from dstackweb.backends import registry
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.lib.errors import Conflict, NotFound
from dstackweb.runs import usage
from dstackweb.runs.models import BudgetMark, Job, Run
from dstackweb.scheduler.cloud.instances import end_idle
from dstackweb.web.cloud import offer_rows
from dstackweb.web.common.pages import PageRequest, done, fingerprint, polled, project_action, project_page
from dstackweb.wording import offers, statuses
from dstackweb.wording.events import REPEATED

POLL_S = 3
GONE_SHOWN = 12
GONE_FOR = dt.timedelta(hours=24)
HOUR_S = Decimal(3600)


@dataclass(frozen=True)
class InstanceLine:
    """One instance as a row; `run` is the one it serves, or served last; `cost` is in USD up to now."""

    of: Instance
    run: Run | None
    cost: Decimal

    @property
    def idle(self) -> bool:
        """Whether it runs without a job."""
        return self.of.status == InstanceStatus.RUNNING and self.of.holder is None

    @property
    def grows(self) -> bool:
        """Whether it is being billed."""
        return self.of.launched_at is not None and self.of.ended_at is None

    @property
    def gpu(self) -> str:
        return offer_rows.gpu(self.of.gpu_name, self.of.gpu_count, self.of.gpu_memory_mib)

    @property
    def status(self) -> str:
        return statuses.instance_status("idle" if self.idle else self.of.status)

    @property
    def tone(self) -> str:
        if self.idle or self.of.interrupted_at or self.of.status == InstanceStatus.STOPPING:
            return "wait"
        return "go" if self.of.status == InstanceStatus.RUNNING else "info"

    @property
    def why(self) -> str:
        return statuses.instance_end(self.of.why) if self.of.why else ""

    @property
    def error(self) -> str:
        of = self.of
        return of.error or (offers.failure(of.backend.kind, of.error_detail) if of.error_detail else "")


def cost(instance: Instance, now: dt.datetime) -> Decimal:
    """USD from its launch to its end, or to now; by the second, at the price it was launched at."""
    if instance.launched_at is None:
        return Decimal(0)
    seconds = ((instance.ended_at or now) - instance.launched_at).total_seconds()
    return instance.price * Decimal(str(max(0.0, seconds))) / HOUR_S


@project_page()
def instances_page(request: PageRequest) -> HttpResponse:
    """Current and recently terminated instances; also answers the page's polls."""
    now = timezone.now()
    instances = Instance.objects.filter(project=request.project)
    there = list(instances.exclude(status=InstanceStatus.GONE).select_related("backend"))
    lately = Q(ended_at__gt=now - GONE_FOR) | Q(ended_at=None, created_at__gt=now - GONE_FOR)
    went, refused = instances.filter(lately, status=InstanceStatus.GONE), Q(cloud_id="", why__in=REPEATED)
    gone = list(went.exclude(refused).select_related("backend").order_by("-created_at")[:GONE_SHOWN])
    refusals = went.filter(refused).count()
    shown = [
        (one.pk, one.status, one.holder, one.why, one.cloud_id, one.launched_at, one.idle_until, one.interrupted_at)
        for one in [*there, *gone]
    ]
    marks = passed_marks(request.project, now)
    version = fingerprint(shown, refusals, [mark.pk for mark in marks])

    def context() -> dict[str, Any]:
        runs = _runs([*there, *gone])
        lines = [InstanceLine(one, runs.get(one.pk), cost(one, now)) for one in there]
        return {
            "lines": lines,
            "gone": [InstanceLine(one, runs.get(one.pk), cost(one, now)) for one in gone],
            "idle": sum(line.idle for line in lines),
            "refusals": refusals,
            "by_status": Counter(line.status for line in lines).items(),
            "month": this_month(request.project, now),
            "marks": marks,
            "has_clouds": Backend.objects.filter(enabled=True).exclude(kind__in=registry.host_kinds()).exists(),
            "now": now,
            "poll_s": POLL_S,
        }

    return polled(request, "cloud/instances.html", "cloud/instances_body.html", version, context)


def _runs(instances: Iterable[Instance]) -> dict[UUID, Run]:
    jobs = Job.objects.filter(instance__in=[one.pk for one in instances]).select_related("run").order_by("placed_at")
    return {job.instance_id: job.run for job in jobs if job.instance_id}


@project_action("admin")
def stop(request: PageRequest, instance: UUID) -> HttpResponse:
    found = Instance.objects.filter(project=request.project, pk=instance).first()
    if found is None:
        raise NotFound(_("no such instance in this project"))
    if not end_idle(found.pk):
        raise Conflict(_("the instance is in use or already terminating; to end it, stop its run"))
    return done(request, _("Terminating %s") % found.instance_type, "web:instances", request.project.name)


WARNED_FROM = 80
"""Every page warns from this share on; lower marks appear only on the instances page."""


@dataclass(frozen=True)
class Month:
    """USD spent in this month (UTC), what an hour costs now, and the budget, if there is one."""

    since: dt.datetime
    spent: Decimal
    budget: Decimal | None
    rate: Decimal = Decimal(0)

    @property
    def percent(self) -> float | None:
        """The share that is spent; None without a budget."""
        if self.budget is None:
            return None
        return float(100 * self.spent / self.budget) if self.budget else 100.0

    @property
    def tone(self) -> str:
        """`full`, `near` or nothing."""
        share = self.percent or 0.0
        return "full" if share >= 100 else "near" if share >= WARNED_FROM else ""


def this_month(project: Project, now: dt.datetime) -> Month:
    since = usage.month_of(now)
    costing = Instance.objects.filter(project=project, launched_at__isnull=False, ended_at=None)
    rate = sum(costing.values_list("price", flat=True), Decimal(0))
    return Month(since, usage.spent_this_month(project.pk, now), project.monthly_budget, rate)


def budget_warning(project: Project, now: dt.datetime) -> tuple[int, Month] | None:
    """The highest mark that this month's spending exceeds, for every page. Without a budget it makes no query."""
    marks = BudgetMark.objects.filter(project=project, month=usage.month_of(now).date(), percent__gte=WARNED_FROM)
    if project.monthly_budget is None or not (percents := list(marks.values_list("percent", flat=True))):
        return None
    so_far = this_month(project, now)  # the budget may have been raised since
    above = [percent for percent in percents if (so_far.percent or 0) >= percent]
    return (max(above), so_far) if above else None


def passed_marks(project: Project, now: dt.datetime) -> list[BudgetMark]:
    """The marks of its present budget that a project has passed this month, the first one first."""
    if project.monthly_budget is None:
        return []
    marks = BudgetMark.objects.filter(project=project, month=usage.month_of(now).date(), budget=project.monthly_budget)
    return list(marks.order_by("percent"))
