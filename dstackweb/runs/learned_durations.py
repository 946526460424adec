"""How long runs last, by prefix of their names and member: counters in bins, shifted where a run ends or is removed. A
retried run is left out: the time between its attempts is not its own.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from django.db.models import F

from dstackweb.lib import sql
from dstackweb.lib.log_bins import LogBins
from dstackweb.runs.models import LearnedDuration, Run
from dstackweb.runs.prefix_counters import prefix_and_group, took_s

BINS = LogBins(least=1.0, per_octave=3, count=64)
"""Seconds, up to 24 days."""
KEYS_MAX = 1000
"""Prefixes and members of a project that are counted apart; the rest are counted under the prefix ""."""
RUNS_MIN = 5
"""Fewer runs teach nothing."""
POINTS = 64
"""Durations that stand for a histogram."""


class DurationKey(NamedTuple):
    """The columns of a counter."""

    project_id: int
    prefix: str
    user_id: int
    bin: int


def key_of(run: Run, ended_at: dt.datetime | None) -> DurationKey | None:
    """Where an ended run counts; None for one that never started, or was retried."""
    seconds = took_s(run.started_at, ended_at)
    if seconds is None or run.attempt > 1:
        return None
    return DurationKey(run.project_id, prefix_and_group(run.name)[0], run.user_id, BINS.bin_of(seconds))


def write(changed: Counter[DurationKey]) -> None:
    """Shift the counters, in one order in all transactions, behind all others."""
    for key, runs in sorted(changed.items()):
        if runs > 0:
            _add(key, runs)
        elif runs < 0:
            _subtract(key, -runs)


def _add(key: DurationKey, runs: int) -> None:
    row = LearnedDuration.objects.filter(**key._asdict())
    if row.update(runs=F("runs") + runs):
        return
    if not _may_count(key):
        key = key._replace(prefix="")
    sql.shift(LearnedDuration, key._asdict(), {"runs": F("runs") + runs})


def _may_count(key: DurationKey) -> bool:
    """Whether the prefix and member are counted apart already, or there is room for them."""
    mine = LearnedDuration.objects.filter(project=key.project_id)
    if mine.filter(prefix=key.prefix, user=key.user_id).exists():
        return True
    return mine.exclude(prefix="").values("prefix", "user").distinct().count() < KEYS_MAX


def _subtract(key: DurationKey, runs: int) -> None:
    """Also from the rest, where some were counted when there was no room."""
    for each in (key, key._replace(prefix="")):
        row = LearnedDuration.objects.filter(**each._asdict())
        there = min(runs, row.values_list("runs", flat=True).first() or 0)
        if there and row.filter(runs__gte=there).update(runs=F("runs") - there):
            row.filter(runs=0).delete()
            runs -= there


@dataclass(frozen=True)
class Learned:
    """What a prefix's runs last: counts by bin, of one member where they have enough runs, and of all members."""

    by_user: Mapping[int, Counter[int]] = field(default_factory=dict)

    def of(self, user_id: int) -> tuple[Counter[int], int]:
        """Counts by bin for a member's next run, and of how many runs; nothing where too few have ended."""
        mine = self.by_user.get(user_id, Counter())
        found = mine if mine.total() >= RUNS_MIN else sum(self.by_user.values(), Counter())
        return (found, found.total()) if found.total() >= RUNS_MIN else (Counter(), 0)


def load(project_ids: Collection[int], prefixes: Collection[str]) -> dict[tuple[int, str], Learned]:
    found: defaultdict[tuple[int, str], defaultdict[int, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))
    rows = LearnedDuration.objects.filter(project__in=project_ids, runs__gt=0).exclude(prefix="")
    wanted = set(prefixes)
    for project_id, prefix, user_id, number, runs in rows.values_list("project", "prefix", "user", "bin", "runs"):
        if prefix in wanted:
            found[project_id, prefix][user_id][number] += runs
    return {key: Learned(dict(by_user)) for key, by_user in found.items()}


def quantiles(project_id: int, prefixes: Collection[str], shares: Sequence[float]) -> dict[str, list[float]]:
    """Seconds that these shares of a project's ended runs took at most, by prefix; only of prefixes with RUNS_MIN."""
    found = {}
    for (_project, prefix), learned in load([project_id], prefixes).items():
        counts = sum(learned.by_user.values(), Counter())
        if counts.total() >= RUNS_MIN:
            found[prefix] = [BINS.quantile(counts, share) or 0.0 for share in shares]
    return found


def equal_parts(counts: Mapping[int, int], lasted_s: float = 0.0) -> tuple[float, ...]:
    """Durations that are equally likely, in rising order, of those above `lasted_s`; empty without any."""
    return tuple(BINS.quantiles(counts, [(point + 0.5) / POINTS for point in range(POINTS)], lasted_s))
