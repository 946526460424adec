"""What projects spend on paid backends, by the second, and what a run has cost so far. Months are UTC's.

A cloud instance costs from its launch to its end, whatever it serves; what is placed on another paid backend costs
from its placement. Prices are those at the start, kept with the rows.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable
from decimal import Decimal
from itertools import chain

from django.db import transaction
from django.db.models import Q, QuerySet
from django.dispatch import Signal

from dstackweb.accounts.models import Project
from dstackweb.backends.models import Instance
from dstackweb.runs.models import BudgetMark, Job, RemovedSpend, Run

HOUR_S = Decimal(3600)
MICROSECOND = dt.timedelta(microseconds=1)
MARKS = (50, 80, 100)
"""Percent of its budget at which a project is warned."""
budget_marked = Signal()
"""Sent in the transaction that notes shares of a budget, with `marks`. It may come more than once for each of them."""


def spent_this_month(project_id: int, now: dt.datetime) -> Decimal:
    """USD for the part of each instance and job within `now`'s month; what still runs counts up to `now`."""
    since = month_of(now)
    in_month = Q(ended_at=None) | Q(ended_at__gt=since)
    instances = Instance.objects.filter(in_month, project=project_id, launched_at__lt=now)
    removed = RemovedSpend.objects.filter(project=project_id, month=since.date()).values_list("usd", flat=True).first()
    # The condition on the price is the partial index's.
    jobs = Job.objects.filter(in_month, price__gt=0, run__project=project_id, instance=None, placed_at__lt=now)
    # By price, in whole numbers: there may be ten thousand, and few prices.
    held_us: defaultdict[Decimal, int] = defaultdict(int)
    for price, began, ended in chain(
        instances.order_by().values_list("price", "launched_at", "ended_at"),
        jobs.order_by().values_list("price", "placed_at", "ended_at"),
    ):
        if began is not None:
            held_us[price] += max(0, ((ended or now) - max(since, began)) // MICROSECOND)
    so_far = sum((price * held for price, held in held_us.items()), Decimal(0)) / (HOUR_S * 1_000_000)
    return so_far + (removed or 0)


def of_jobs(jobs: QuerySet[Job], now: dt.datetime) -> dict[int, Decimal]:
    """USD by project for the part of these ended jobs within `now`'s month, without those on instances."""
    since = month_of(now)
    spent: dict[int, Decimal] = {}
    priced = jobs.filter(price__gt=0, instance=None, ended_at__gt=since)
    for project_id, price, began, ended in priced.values_list("run__project", "price", "placed_at", "ended_at"):
        spent[project_id] = spent.get(project_id, Decimal(0)) + price * _hours(max(since, began), ended or now)
    return spent


def costs_by_run(runs: Iterable[Run], now: dt.datetime) -> dict[int, Decimal]:
    """USD that each of these runs (by its key) has cost so far, all attempts; those that cost nothing are left out.

    An instance started for a job costs it from its launch, an idle one from its placement.
    """
    cost: dict[int, Decimal] = {}
    jobs = Job.objects.filter(run__in=[run.pk for run in runs], price__gt=0)
    columns = ("run_id", "price", "placed_at", "ended_at", "instance_id", "instance__launched_at")
    for run_id, price, placed, ended, instance_id, launched in jobs.values_list(*columns):
        if instance_id is not None and launched is None:
            continue
        began = placed if launched is None else max(placed, launched)
        cost[run_id] = cost.get(run_id, Decimal(0)) + price * _hours(began, ended or now)
    return cost


def has_budgets() -> bool:
    return Project.objects.exclude(monthly_budget=None).exists()


def mark_budgets(now: dt.datetime) -> int:
    """Note each share of its budget that a project has spent, once a month; returns how many crossed one."""
    month, crossed = month_of(now).date(), 0
    for project_id, budget in Project.objects.exclude(monthly_budget=None).values_list("pk", "monthly_budget"):
        assert budget is not None
        # Those of another budget say nothing of this one.
        BudgetMark.objects.filter(project=project_id, month=month).exclude(budget=budget).delete()
        known = set(BudgetMark.objects.filter(project=project_id, month=month).values_list("percent", flat=True))
        if known.issuperset(MARKS):
            continue
        so_far = spent_this_month(project_id, now)
        reached = [percent for percent in MARKS if percent not in known and so_far and so_far * 100 >= budget * percent]
        if not reached:
            continue
        marks = [
            BudgetMark(project_id=project_id, month=month, percent=percent, at=now, spent=so_far, budget=budget)
            for percent in reached
        ]
        with transaction.atomic():
            BudgetMark.objects.bulk_create(marks, ignore_conflicts=True)
            budget_marked.send(sender=BudgetMark, marks=marks)
        crossed += 1
    return crossed


def month_of(now: dt.datetime) -> dt.datetime:
    return now.astimezone(dt.UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def _hours(since: dt.datetime, until: dt.datetime) -> Decimal:
    """Never negative, also where the clock was put back."""
    return max(Decimal(0), Decimal(str((until - since).total_seconds())) / HOUR_S)
