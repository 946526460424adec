"""Usage as pages, the API and exports show it: added up by member, queue or project, and by day or month."""

from __future__ import annotations

import datetime as dt
from calendar import monthrange
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from dstackweb.accounts.models import Project, User
from dstackweb.runs import usage
from dstackweb.runs.models import Queue
from dstackweb.runs.usage import OUTCOMES, Amounts, UsageKey

HOUR_MS = 3_600_000
DAYS = (7, 30, 90)
"""Ranges up to today that pages offer; a month can be picked as well."""
MOST_DAYS = 366


class By(StrEnum):
    """What usage is added up by."""

    MEMBER = "member"
    QUEUE = "queue"
    PROJECT = "project"


@dataclass(frozen=True)
class Period:
    """Days (UTC), both included. `days` is their number where they end today, `month` the month (`2026-11`)."""

    first: dt.date
    last: dt.date
    days: int | None = None
    month: str = ""

    @classmethod
    def up_to(cls, now: dt.datetime, days: int) -> Period:
        """The last so many days, today included."""
        today = usage.day_of(now)
        return cls(today - dt.timedelta(days=days - 1), today, days=days)

    @classmethod
    def of_month(cls, month: str) -> Period:
        """A month, such as `2026-11`. Raises ValueError for anything else."""
        first = dt.datetime.strptime(month, "%Y-%m").date()
        return cls(first, first.replace(day=monthrange(first.year, first.month)[1]), month=f"{first:%Y-%m}")

    @property
    def dates(self) -> list[dt.date]:
        return [self.first + dt.timedelta(days=number) for number in range((self.last - self.first).days + 1)]


class Used(NamedTuple):
    """Sums in hours and USD. `idle_share` is the idle part of the measured GPU time; None where none was measured."""

    gpu_hours: float
    measured_gpu_hours: float
    idle_gpu_hours: float
    idle_share: float | None
    cpu_hours: float
    usd: float
    done: int
    failed: int
    terminated: int

    @classmethod
    def of(cls, amounts: Amounts) -> Used:
        measured = amounts["measured_ms"]
        return cls(
            gpu_hours=round(amounts["gpu_ms"] / HOUR_MS, 4),
            measured_gpu_hours=round(measured / HOUR_MS, 4),
            idle_gpu_hours=round(amounts["idle_ms"] / HOUR_MS, 4),
            idle_share=round(amounts["idle_ms"] / measured, 4) if measured else None,
            cpu_hours=round(amounts["cpu_ms"] / HOUR_MS, 4),
            usd=round(amounts["micro_usd"] / 1_000_000, 4),
            **{outcome: amounts[outcome] for outcome in OUTCOMES},
        )

    @property
    def runs(self) -> int:
        """Runs that ended."""
        return self.done + self.failed + self.terminated

    @property
    def unmeasured_share(self) -> float | None:
        """The part of the GPU time for which there are no samples; None without GPU time."""
        return max(0.0, 1 - self.measured_gpu_hours / self.gpu_hours) if self.gpu_hours else None


@dataclass(frozen=True)
class UsageLine:
    """What one member, queue or project used, in all and on each day of the period."""

    name: str
    used: Used
    gpu_hours: list[float]
    cpu_hours: list[float]


@dataclass(frozen=True)
class Report:
    """Usage in a period, the most GPU-hours first; of the whole deployment if `project` is None."""

    project: Project | None
    period: Period
    by: By
    lines: list[UsageLine]
    total: Used


class _Names:
    """Names of the rows that keys refer to."""

    def __init__(self, keys: Collection[UsageKey], project: Project | None) -> None:
        users = User.objects.filter(pk__in={key.user_id for key in keys})
        self.users = {user.pk: user.get_username() for user in users}
        known = [project] if project else Project.objects.filter(pk__in={key.project_id for key in keys})
        self.projects = {one.pk: one.name for one in known}
        self.queues = {
            queue.pk: queue.name if project else f"{self.projects[queue.project_id]}/{queue.name}"
            for queue in Queue.objects.filter(pk__in={key.queue_id for key in keys})
        }

    def of(self, key: UsageKey, by: By) -> str:
        match by:
            case By.MEMBER:
                return self.users[key.user_id]
            case By.QUEUE:
                return self.queues[key.queue_id]
            case By.PROJECT:
                return self.projects[key.project_id]


def report(project: Project | None, period: Period, by: By, now: dt.datetime) -> Report:
    """In a fixed number of statements."""
    used = usage.read(project, period.first, period.last, now)
    names, total = _Names(used, project), Counter[str]()
    of_name: defaultdict[str, Amounts] = defaultdict(Counter)
    by_day: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * len(period.dates))
    for key, amounts in used.items():
        name = names.of(key, by)
        of_name[name].update(amounts)
        for unit in ("gpu_ms", "cpu_ms"):
            by_day[name, unit][(key.day - period.first).days] += amounts[unit]
        total.update(amounts)
    hours = {key: [round(ms / HOUR_MS, 4) for ms in each] for key, each in by_day.items()}
    lines = [
        UsageLine(name, Used.of(amounts), hours[name, "gpu_ms"], hours[name, "cpu_ms"])
        for name, amounts in sorted(of_name.items(), key=lambda each: (-each[1]["gpu_ms"], each[0]))
    ]
    return Report(project, period, by, lines, Used.of(total))


def columns(by: By) -> list[str]:
    """Of `rows`."""
    return ["period", "project", *([] if by == By.PROJECT else [by.value]), *Used._fields]


def rows(project: Project | None, period: Period, by: By, now: dt.datetime) -> Iterator[dict[str, Any]]:
    """A row for each month and project, and in it for each member or queue, in this order."""
    used = usage.read(project, period.first, period.last, now)
    names, found = _Names(used, project), defaultdict[tuple[str, str, str], Amounts](Counter)
    for key, amounts in used.items():
        found[f"{key.day:%Y-%m}", names.projects[key.project_id], names.of(key, by)].update(amounts)
    for (span, of_project, name), amounts in sorted(found.items()):
        yield {"period": span, "project": of_project, by.value: name} | Used.of(amounts)._asdict()
