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
    def drawn(self) -> float:
        """The share as a bar shows it."""
        return min(100.0, self.percent or 0.0)

    @property
    def tone(self) -> str:
        """`full`, `near` or nothing."""
        share = self.percent or 0.0
        return "full" if share >= 100 else "near" if share >= WARNED_FROM else ""

    @property
    def over_at(self) -> dt.datetime:
        """When the next month begins and the budget resets."""
        return (self.since + dt.timedelta(days=32)).replace(day=1)


def month(project: Project, now: dt.datetime) -> Month:
    """What is spent so far."""
    since = spend.month_of(now)
    costing = Instance.objects.filter(project=project, launched_at__isnull=False, ended_at=None)
    rate = sum(costing.values_list("price", flat=True), Decimal(0))
    return Month(since, spend.spent_this_month(project.pk, now), project.monthly_budget, rate)


@dataclass(frozen=True)
class BudgetWarning:
    """The highest mark that this month's spending exceeds."""

    percent: int
    month: Month


def warned(project: Project, now: dt.datetime) -> BudgetWarning | None:
    """The warning for every page, if any. Without a budget it makes no query."""
    if project.monthly_budget is None:
        return None
    since = spend.month_of(now).date()
    marks = BudgetMark.objects.filter(project=project, month=since, percent__gte=WARNED_FROM)
    if not (told := sorted(marks.values_list("percent", flat=True), reverse=True)):
        return None
    so_far = month(project, now)  # the budget may have been raised since
    above = [percent for percent in told if (so_far.percent or 0) >= percent]
    return BudgetWarning(above[0], so_far) if above else None


def passed(project: Project, now: dt.datetime) -> list[BudgetMark]:
    """The marks of its present budget that a project has passed this month, the first one first, with when it did."""
    if project.monthly_budget is None:
        return []
    since = spend.month_of(now).date()
    marks = BudgetMark.objects.filter(project=project, month=since, budget=project.monthly_budget)
    return list(marks.order_by("percent"))
