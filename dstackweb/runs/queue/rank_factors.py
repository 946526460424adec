"""The factors of a waiting run's rank, in numbers that people know."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from dstackweb.accounts.models import User
from dstackweb.runs import selectors
from dstackweb.runs.models import Run
from dstackweb.runs.queue import ordering
from dstackweb.runs.states import RunStatus


@dataclass(frozen=True)
class RankFactors:
    """What a run's position comes from.

    `aged_points`: the points of priority that its seniority is worth compared with a run submitted now; moves change
    them. `position` counts from 1, None while it is not waiting. New runs with a priority below `ahead_of_priority`
    queue behind it; None if all would, or while it is not waiting.
    """

    priority: int
    submitted_at: dt.datetime
    aged_points: float
    moved_by: User | None
    moved_at: dt.datetime | None
    position: int | None
    ahead_of_priority: int | None


def rank_factors(run: Run, now: dt.datetime) -> RankFactors:
    """The factors of a run at this time."""
    newest = ordering.next_seniority(round(now.timestamp() * 1_000_000), run.queue.last_seniority_us)
    step = run.queue.step_us
    waits = run.status == RunStatus.SUBMITTED
    return RankFactors(
        priority=run.priority,
        submitted_at=run.submitted_at,
        aged_points=max(0, newest - run.seniority_us) / step,
        moved_by=run.moved_by,
        moved_at=run.moved_at,
        position=selectors.position(run),
        ahead_of_priority=overtaking_priority(run.rank, newest, step) if waits else None,
    )


def overtaking_priority(rank: int, newest_us: int, step: int) -> int | None:
    """The lowest priority with which a run of seniority `newest_us` goes ahead of `rank`; None if not even 100 does.

    At an equal rank the later run is behind.
    """
    least = max(ordering.PRIORITY_MIN, (newest_us - rank) // step + 1)
    return least if least <= ordering.PRIORITY_MAX else None
