"""The order inside one queue as a single sortable integer (docs/design.md#scheduling).

    rank = seniority_us + penalty - priority * step_us        ascending, then id

Times are microseconds since the epoch. Pure: time and steps are arguments.
"""

from __future__ import annotations

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
