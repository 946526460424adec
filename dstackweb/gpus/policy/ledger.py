"""The ledger: the runs that utilization policies stopped, or would have, and the GPU-hours and money that saved."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass

from django.utils.translation import gettext as _

from dstackweb.accounts.access import allows
from dstackweb.accounts.models import Project
from dstackweb.gpus.models import PolicyStop, ProjectPolicies
from dstackweb.lib.errors import Forbidden

DAYS = 30
SHOWN = 50
MOST = 5000
"""Newest entries that are summed up."""


@dataclass(frozen=True)
class StopEntry:
    """One stop, with the hours for which its GPUs were, or would have been, free for others; None if unknown."""

    stop: PolicyStop
    hours: float | None

    @property
    def gpu_hours(self) -> float | None:
        return None if self.hours is None else self.hours * len(self.stop.gpus)

    @property
    def usd(self) -> float | None:
        return None if self.hours is None else self.hours * float(self.stop.price)


@dataclass(frozen=True)
class Total:
    """Sums of entries; the hours and money of `unknown` entries are not included."""

    runs: int
    gpu_hours: float
    usd: float
    unknown: int

    @classmethod
    def of(cls, entries: Iterable[StopEntry]) -> Total:
        listed = list(entries)
        known = [entry for entry in listed if entry.hours is not None]
        return cls(
            runs=len(listed),
            gpu_hours=sum(entry.gpu_hours or 0 for entry in known),
            usd=sum(entry.usd or 0 for entry in known),
            unknown=len(listed) - len(known),
        )


@dataclass(frozen=True)
class Ledger:
    """The last `days`: the newest entries, and the totals of stopped and of only observed runs."""

    days: int
    entries: list[StopEntry]
    stopped: Total
    observed: Total


def ledger(project: Project, now: dt.datetime, days: int = DAYS) -> Ledger:
    """The project's ledger. A run that was only observed counts once: its first stop would have ended it."""
    since = now - dt.timedelta(days=days)
    rows = PolicyStop.objects.filter(project=project, at__gte=since).select_related("run", "next_run", "user")
    seen: set[int] = set()
    entries = []
    for stop in reversed(rows[:MOST]):
        if stop.observed and stop.run_id is not None:
            if stop.run_id in seen:
                continue
            seen.add(stop.run_id)
        entries.append(StopEntry(stop, _reclaimed_hours(stop, now)))
    entries.reverse()
    return Ledger(
        days=days,
        entries=entries[:SHOWN],
        stopped=Total.of(entry for entry in entries if not entry.stop.observed),
        observed=Total.of(entry for entry in entries if entry.stop.observed),
    )


def _reclaimed_hours(stop: PolicyStop, now: dt.datetime) -> float | None:
    """Hours so far that others got, or would have got, the GPUs instead of the run; None if unknown.

    For a stopped run they end with its `max_duration`; without one they are unknown. A run that was only observed held
    its GPUs until it ended, which is known while its row exists.
    """
    until = stop.until
    if stop.observed:
        until = (stop.run.ended_at or now) if stop.run else None
    return None if until is None else max(0.0, (min(until, now) - stop.at).total_seconds() / 3600)


def set_observe_only(project: Project, role: str, observe_only: bool) -> ProjectPolicies:
    """Have a project's policies only report, or be enforced again. Raises Forbidden."""
    if not allows(role, "manager"):
        raise Forbidden(
            _("only managers of %(project)s can change whether its utilization policies are enforced")
            % {"project": project}
        )
    return ProjectPolicies.objects.update_or_create(project=project, defaults={"observe_only": observe_only})[0]
