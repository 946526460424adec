"""The order inside one queue as a single sortable integer (docs/design.md#scheduling). Pure.

    rank = seniority_us + penalty - priority * step_us        ascending, then id

Times are microseconds since the epoch. The penalty comes from the member's load as the run enters its queue
(docs/decisions/0024-fair-share.md), in GPU-milliseconds, so that nothing is rounded on the way.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypedDict

PRIORITY_MIN, PRIORITY_MAX, PRIORITY_DEFAULT = 0, 100, 50
DEFAULT_AGEING_MINUTES = 30
STRICT_STEP_US = 10 * 365 * 24 * 3600 * 1_000_000
"""`strict` is a step of ten years: no wait is worth a point of priority."""
MIN_GAP_US = 1000
"""Runs submitted at the same instant get seniorities this far apart, so that there is room between them."""
SECOND_US = 1_000_000


def step_us(ageing_minutes: int | None) -> int:
    """How long a wait (µs) is worth one point of priority; None means strict."""
    return STRICT_STEP_US if ageing_minutes is None else ageing_minutes * 60 * 1_000_000


def rank(seniority_us: int, priority: int, step: int, penalty_s: int = 0) -> int:
    """A run's rank: smaller goes first. Fits 64 bits until the year 5000. The penalty is that of its member's share."""
    return seniority_us + penalty_s * SECOND_US - priority * step


def next_seniority(now_us: int, last_us: int) -> int:
    """The seniority of a run submitted now behind one that has `last_us`: never equal, never earlier."""
    return max(now_us, last_us + MIN_GAP_US)


HOUR_MS = 3_600_000
DAY = dt.timedelta(days=1)
HALF_LIVES = 10
"""Older usage counts for less than a thousandth, and is left out."""


class Load(NamedTuple):
    """What counts of a member in one queue: `used_ms` GPU-milliseconds after decay, and GPUs held and queued now."""

    used_ms: int = 0
    held_gpus: int = 0
    queued_gpus: int = 0

    @property
    def total_ms(self) -> int:
        """GPU-milliseconds; a GPU that is held or queued counts as one hour."""
        return self.used_ms + (self.held_gpus + self.queued_gpus) * HOUR_MS


class Basis(TypedDict):
    """The numbers of a penalty: GPU-hours that a member used (after decay), and the median load of all in GPU-hours."""

    used_gpu_hours: float
    held_gpus: int
    queued_gpus: int
    median_gpu_hours: float


class Penalty(NamedTuple):
    """Seconds by which a run ranks behind its seniority, and the load and the median that they come from."""

    seconds: int = 0
    load: Load = Load()
    median_ms: int = 0

    @property
    def basis(self) -> Basis | dict[str, float]:
        """The numbers as they are stored with a run; empty without a penalty."""
        if not self.seconds:
            return {}
        hours = [round(one / HOUR_MS, 1) for one in (self.load.used_ms, self.median_ms)]
        return Basis(
            used_gpu_hours=hours[0],
            held_gpus=self.load.held_gpus,
            queued_gpus=self.load.queued_gpus,
            median_gpu_hours=hours[1],
        )


NO_PENALTY = Penalty()


def decayed_ms(used: Iterable[tuple[dt.date, int]], now: dt.datetime, half_life_days: int) -> int:
    """GPU-milliseconds of days (UTC), halved for each half-life since the middle of the day, or of its part so far."""
    total = 0.0
    for day, gpu_ms in used:
        begin = dt.datetime.combine(day, dt.time(), dt.UTC)
        middle = begin + (min(now, begin + DAY) - begin) / 2
        total += gpu_ms * 0.5 ** (max(0.0, (now - middle) / DAY) / half_life_days)
    return round(total)


def penalty(own: Load, everyone: Sequence[Load], bound_s: int, gpus: int = 1) -> Penalty:
    """The penalty of a run with so many GPUs, of a member with the load `own`, which is one of `everyone`'s.

    bound × (1 − median ÷ load) for a load above the median, otherwise 0: half the bound for twice the median, three
    quarters for four times, and never more than the bound. The median is of the members who hold or wait for GPUs, and
    of a newcomer who has submitted one such run, with a GPU at least: so a burst in an empty queue leaves room for
    those who come next.
    """
    present = (load.total_ms for load in everyone if load.held_gpus or load.queued_gpus)
    loads = sorted([max(gpus, 1) * HOUR_MS, *present])
    twice = loads[(len(loads) - 1) // 2] + loads[len(loads) // 2]  # the median's double, which is a whole number
    above = max(0, 2 * own.total_ms - twice)
    seconds = bound_s * above // (2 * own.total_ms) if above else 0
    return Penalty(seconds, own, twice // 2)
