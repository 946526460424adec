"""What members use and projects spend: GPU and CPU time, money and ended runs, by project, queue, member and UTC day.

Counters, shifted where a job or a run ends, and never computed from runs: a page about a quarter costs the same however
many runs there were. Times are in milliseconds, money in millionths of a USD: whole numbers that a recount repeats.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any, NamedTuple

from django.db import models, transaction
from django.db.models import F, Q, QuerySet, Sum
from django.dispatch import Signal

from dstackweb.accounts.models import Project
from dstackweb.backends.models import Instance
from dstackweb.lib import sql
from dstackweb.lib.times import to_ms
from dstackweb.runs.models import BudgetMark, Job, RemovedSpend, RemovedUsage, Run, UsageDay
from dstackweb.runs.states import ENDED, JOB_ACTIVE, JOB_ENDED, RunStatus

DAY_MS = 86_400_000
EPOCH = dt.date(1970, 1, 1)
OF_JOBS = ("gpu_ms", "cpu_ms", "micro_usd")
OUTCOMES = tuple(status.value for status in ENDED)
MEASURED = ("measured_ms", "idle_ms")
NUMBERS = (*OF_JOBS, *OUTCOMES, *MEASURED)
"""The columns of `UsageDay` that are added up."""

Amounts = Counter[str]
"""Some of NUMBERS."""
MARKS = (50, 80, 100)
"""Percent of its budget at which a project is warned."""
budget_marked = Signal()
"""Sent in the transaction that notes shares of a budget, with `marks`. It may come more than once for each of them."""


class UsageKey(NamedTuple):
    """The columns of a counter, in the order in which everyone locks them."""

    project_id: int
    day: dt.date
    user_id: int
    queue_id: int


class HeldJob(NamedTuple):
    """What a job holds and costs (USD per hour) from a moment on; it costs nothing while `costs_from_ms` is None."""

    gpus: int
    cpus: int
    price: Decimal
    since_ms: int
    costs_from_ms: int | None

    def by_day(self, until_ms: int) -> Iterator[tuple[dt.date, Amounts]]:
        """What it used up to a moment, day by day."""
        for day, since_ms, end_ms in split_days(self.since_ms, until_ms):
            lasted_ms = end_ms - since_ms
            cost = self._paid(end_ms) - self._paid(since_ms)
            yield day, Counter(gpu_ms=self.gpus * lasted_ms, cpu_ms=self.cpus * lasted_ms, micro_usd=cost)

    def _paid(self, until_ms: int) -> int:
        """Millionths of a USD from its start to a moment, rounded down: the parts of all days add up to the whole."""
        if self.costs_from_ms is None or until_ms <= self.costs_from_ms:
            return 0
        return int(self.price * 10_000) * (until_ms - self.costs_from_ms) // 36_000


def split_days(since_ms: int, until_ms: int) -> Iterator[tuple[dt.date, int, int]]:
    """The parts of a span that lie on different days (UTC): the day, its begin and its end."""
    while since_ms < until_ms:
        number = since_ms // DAY_MS
        end_ms = min((number + 1) * DAY_MS, until_ms)
        yield EPOCH + dt.timedelta(days=number), since_ms, end_ms
        since_ms = end_ms


HELD = ("gpu_count", "cpus", "price", "placed_at", "instance_id", "instance__launched_at")


def held(gpus: int, cpus: int, price: Decimal, placed: dt.datetime, instance: Any, launched: Any) -> HeldJob:
    """From the columns HELD, as `costs_by_run`: an instance started for a job costs it from its launch."""
    since_ms = to_ms(placed)
    if not price or instance is None:
        return HeldJob(gpus, cpus, price, since_ms, since_ms if price else None)
    return HeldJob(gpus, cpus, price, since_ms, None if launched is None else max(since_ms, to_ms(launched)))


class UsageDeltas:
    """What a transaction changes of the counters, until `write` writes it."""

    def __init__(self) -> None:
        self._used: defaultdict[UsageKey, Amounts] = defaultdict(Counter)
        self._removed: defaultdict[tuple[int, dt.date, int], Amounts] = defaultdict(Counter)

    def add_job(self, job: Job, now: dt.datetime) -> None:
        """A job, with its run, that ends; one query for a job on an instance that costs something."""
        run, launched = job.run, job.instance.launched_at if job.price and job.instance else None
        one = held(job.gpu_count, job.cpus, job.price, job.placed_at, job.instance_id, launched)
        for day, amounts in one.by_day(to_ms(now)):
            self._used[UsageKey(run.project_id, day, run.user_id, run.queue_id)].update(amounts)

    def add_run(self, run: Run, outcome: RunStatus, now: dt.datetime) -> None:
        self._used[UsageKey(run.project_id, day_of(now), run.user_id, run.queue_id)][outcome.value] += 1

    def add_measured(self, run: Run, day: dt.date, measured_ms: int, idle_ms: int) -> None:
        """Time of a GPU of a run that its samples cover, and the idle part of it."""
        key = UsageKey(run.project_id, day, run.user_id, run.queue_id)
        self._used[key].update(measured_ms=measured_ms, idle_ms=idle_ms)

    def add_removed(self, runs: Sequence[Run]) -> None:
        """Ended runs that are about to be removed with their jobs."""
        for (project_id, day, user_id), amounts in of_ended(runs).items():
            self._removed[project_id, day, user_id].update(amounts)

    def write(self) -> None:
        """In one order in all transactions, behind all other counters."""
        for key, amounts in sorted(self._used.items()):
            _shift(UsageDay, key._asdict(), amounts)
        for (project_id, day, user_id), amounts in sorted(self._removed.items()):
            _shift(RemovedUsage, {"project_id": project_id, "day": day, "user_id": user_id}, amounts)


def _shift(model: type[models.Model], key: dict[str, int | dt.date], amounts: Amounts) -> None:
    if changes := {name: F(name) + more for name, more in amounts.items() if more}:
        sql.shift(model, key, changes)


def day_of(moment: dt.datetime) -> dt.date:
    return moment.astimezone(dt.UTC).date()


def of_ended(runs: Iterable[Run] | None = None) -> dict[tuple[int, dt.date, int], Amounts]:
    """A recount, by project, day and member: of the ended jobs of these runs (all, if None) and of ended runs."""
    found: defaultdict[tuple[int, dt.date, int], Amounts] = defaultdict(Counter)
    jobs = Job.objects.filter(status__in=JOB_ENDED, ended_at__isnull=False)
    ended = Run.objects.filter(status__in=ENDED, ended_at__isnull=False)
    if runs is not None:
        keys = [run.pk for run in runs]
        jobs, ended = jobs.filter(run__in=keys), ended.filter(pk__in=keys)
    columns = ("run__project", "run__user", "ended_at", *HELD)
    for project_id, user_id, ended_at, *job in jobs.values_list(*columns).iterator():
        for day, amounts in held(*job).by_day(to_ms(ended_at)):
            found[project_id, day, user_id].update(amounts)
    for project_id, user_id, ended_at, status in ended.values_list("project", "user", "ended_at", "status").iterator():
        assert ended_at is not None
        found[project_id, day_of(ended_at), user_id][status] += 1
    return found


def active(now: dt.datetime, project: Project | None = None) -> dict[UsageKey, Amounts]:
    """What active jobs have used up to now: as much work as there are active jobs."""
    jobs = list(Job.objects.filter(status__in=JOB_ACTIVE).values_list("run", *HELD))
    # Runs are not joined: SQLite would scan all jobs.
    runs = Run.objects.filter(pk__in={run_id for run_id, *_job in jobs})
    if project is not None:
        runs = runs.filter(project=project)
    of_run = {pk: rest for pk, *rest in runs.values_list("pk", "project", "user", "queue")}
    found: defaultdict[UsageKey, Amounts] = defaultdict(Counter)
    for run_id, *job in jobs:
        if run_id in of_run:
            project_id, user_id, queue_id = of_run[run_id]
            for day, amounts in held(*job).by_day(to_ms(now)):
                found[UsageKey(project_id, day, user_id, queue_id)].update(amounts)
    return found


def of_runs(run_ids: Collection[int], now: dt.datetime) -> dict[int, Amounts]:
    """OF_JOBS of each of these runs so far, all attempts."""
    found: dict[int, Amounts] = {run_id: Counter() for run_id in run_ids}
    for run_id, ended_at, *job in Job.objects.filter(run__in=run_ids).values_list("run", "ended_at", *HELD):
        for _day, amounts in held(*job).by_day(to_ms(ended_at or now)):
            found[run_id].update(amounts)
    return found


def read(project: Project | None, first: dt.date, last: dt.date, now: dt.datetime) -> dict[UsageKey, Amounts]:
    """What was used on these days, both included, in a project or in all, with what active jobs hold."""
    found: dict[UsageKey, Amounts] = {}
    rows = UsageDay.objects.filter(day__gte=first, day__lte=last)
    if project is not None:
        rows = rows.filter(project=project)
    for project_id, day, user_id, queue_id, *numbers in rows.values_list(*UsageKey._fields, *NUMBERS):
        found[UsageKey(project_id, day, user_id, queue_id)] = Counter(dict(zip(NUMBERS, numbers, strict=True)))
    for key, amounts in active(now, project).items():
        if first <= key.day <= last:
            found.setdefault(key, Counter()).update(amounts)
    return found


def kept() -> dict[tuple[int, dt.date, int], Amounts]:
    """The counters of runs that are still there, without what samples measured, in the form of `of_ended`."""
    names = (*OF_JOBS, *OUTCOMES)
    found: defaultdict[tuple[int, dt.date, int], Amounts] = defaultdict(Counter)
    for sign, model in ((1, UsageDay), (-1, RemovedUsage)):
        rows = model._default_manager.order_by().values_list("project", "day", "user")
        for project_id, day, user_id, *numbers in rows.annotate(**{f"{name}_sum": Sum(name) for name in names}):
            for name, number in zip(names, numbers, strict=True):
                found[project_id, day, user_id][name] += sign * number
    return found


def spent_this_month(project_id: int, now: dt.datetime) -> Decimal:
    """USD for the part of each instance and job within `now`'s month; what still runs counts up to `now`."""
    since = month_of(now)
    in_month = Q(ended_at=None) | Q(ended_at__gt=since)
    instances = Instance.objects.filter(in_month, project=project_id, launched_at__lt=now)
    removed = RemovedSpend.objects.filter(project=project_id, month=since.date()).values_list("usd", flat=True).first()
    # The condition on the price is the partial index's.
    jobs = Job.objects.filter(in_month, price__gt=0, run__project=project_id, instance=None, placed_at__lt=now)
    of_instances = instances.order_by().values_list("price", "launched_at", "ended_at")
    spans = chain(of_instances, jobs.order_by().values_list("price", "placed_at", "ended_at"))
    return _usd(((price, max(since, began), ended) for price, began, ended in spans if began), now) + (removed or 0)


def of_jobs(jobs: QuerySet[Job], now: dt.datetime) -> dict[int, Decimal]:
    """USD by project for the part of these ended jobs within `now`'s month, without those on instances."""
    since = month_of(now)
    spans = defaultdict[int, list[Span]](list)
    priced = jobs.filter(price__gt=0, instance=None, ended_at__gt=since)
    for project_id, price, began, ended in priced.values_list("run__project", "price", "placed_at", "ended_at"):
        spans[project_id].append((price, max(since, began), ended))
    return {project_id: _usd(each, now) for project_id, each in spans.items()}


def costs_by_run(runs: Iterable[Run], now: dt.datetime) -> dict[int, Decimal]:
    """USD by run so far, of all attempts, without 0: from the placement, or later from its instance's launch."""
    spans = defaultdict[int, list[Span]](list)
    jobs = Job.objects.filter(run__in=[run.pk for run in runs], price__gt=0)
    columns = ("run_id", "price", "placed_at", "ended_at", "instance_id", "instance__launched_at")
    for run_id, price, placed, ended, instance_id, launched in jobs.values_list(*columns):
        if instance_id is None or launched is not None:
            spans[run_id].append((price, max(placed, launched or placed), ended))
    return {run_id: _usd(each, now) for run_id, each in spans.items()}


Span = tuple[Decimal, dt.datetime, dt.datetime | None]
"""A price in USD per hour, and from when to when it was paid; None: still."""


def _usd(spans: Iterable[Span], now: dt.datetime) -> Decimal:
    """What they cost up to `now`: by price, in whole numbers, since there may be ten thousand, and few prices."""
    paid_us: defaultdict[Decimal, int] = defaultdict(int)
    for price, began, ended in spans:
        paid_us[price] += max(0, ((ended or now) - began) // dt.timedelta(microseconds=1))  # a clock may be put back
    return sum((price * paid for price, paid in paid_us.items()), Decimal(0)) / 3_600_000_000


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
