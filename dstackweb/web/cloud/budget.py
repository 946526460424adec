"""A project's spending and budget this month, and its warnings."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from decimal import Decimal

from dstackweb.accounts.models import Project
from dstackweb.backends.models import Instance
from dstackweb.runs import spend
from dstackweb.runs.models import BudgetMark

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


def month(project: Project, now: dt.datetime) -> Month:
    since = spend.month_of(now)
    costing = Instance.objects.filter(project=project, launched_at__isnull=False, ended_at=None)
    rate = sum(costing.values_list("price", flat=True), Decimal(0))
    return Month(since, spend.spent_this_month(project.pk, now), project.monthly_budget, rate)


def warned(project: Project, now: dt.datetime) -> tuple[int, Month] | None:
    """The highest mark that this month's spending exceeds, for every page. Without a budget it makes no query."""
    marks = BudgetMark.objects.filter(project=project, month=spend.month_of(now).date(), percent__gte=WARNED_FROM)
    if project.monthly_budget is None or not (percents := list(marks.values_list("percent", flat=True))):
        return None
    so_far = month(project, now)  # the budget may have been raised since
    above = [percent for percent in percents if (so_far.percent or 0) >= percent]
    return (max(above), so_far) if above else None


def passed(project: Project, now: dt.datetime) -> list[BudgetMark]:
    """The marks of its present budget that a project has passed this month, the first one first."""
    if project.monthly_budget is None:
        return []
    marks = BudgetMark.objects.filter(project=project, month=spend.month_of(now).date(), budget=project.monthly_budget)
    return list(marks.order_by("percent"))
