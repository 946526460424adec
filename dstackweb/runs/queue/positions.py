"""Reads positions of waiting runs: neighbours, ranges, and how many are ahead. What every move needs is short SQL."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from django.db.models import Exists, F, OuterRef, QuerySet

from dstackweb.accounts.models import User
from dstackweb.lib.sql import rows
from dstackweb.runs import selectors
from dstackweb.runs.models import Queue, QueueCount, Run
from dstackweb.runs.queue import ordering
from dstackweb.runs.queue.moves import NUDGE_US, Slot
from dstackweb.runs.states import RunStatus

FEW = 4
"""Neighbours read at first."""
CHUNK = 5000
COLUMNS = (
    *("uid", "name", "project", "queue", "user", "user__username", "status", "attempt"),
    *("priority", "seniority_us", "penalty_s", "rank", "moved_at", "moved_by"),
)
"""Columns that moves need."""
MAX_INT = 2**63 - 1
FIRST, LAST = (-(2**63), 0), (MAX_INT, MAX_INT)
"""Keys (rank, id) ahead of every run, and behind."""

RankKey = tuple[int, int]


def to_slot(run: Run) -> Slot:
    return Slot(run.pk, run.rank, run.seniority_us + run.penalty_s * ordering.SECOND_US, run.priority)


def read_runs(queue: Queue, run_ids: Iterable[int], *, lock: bool = False) -> dict[int, Run]:
    """These runs by id, with COLUMNS. Locked in the order of ids, after the queue's row."""
    found: dict[int, Run] = {}
    keys = sorted(set(run_ids))
    for start in range(0, len(keys), CHUNK):
        runs = Run.objects.filter(pk__in=keys[start : start + CHUNK]).order_by("pk")
        if lock:
            runs = runs.select_for_update(of=("self",), no_key=True)
        for run in runs.select_related("user").only(*COLUMNS):
            if run.queue_id == queue.pk:
                run.queue, run.project = queue, queue.project
            found[run.pk] = run
    return found


def to_slots(runs: QuerySet[Run]) -> list[Slot]:
    late = F("seniority_us") + F("penalty_s") * ordering.SECOND_US
    return [Slot(*row) for row in runs.values_list("pk", "rank", late, "priority")]


_OLDEST = """
SELECT seniority_us FROM runs_run WHERE queue_id = %s AND status = 'submitted' ORDER BY seniority_us LIMIT 1
"""
_WALK = """
SELECT id, rank, seniority_us + penalty_s * 1000000, priority FROM runs_run
WHERE queue_id = %s AND status = 'submitted' AND (rank, id) {0} (%s, %s)
ORDER BY rank {1}, id {1} LIMIT %s
"""
_COUNT = """
SELECT COUNT(*) FROM (
    SELECT 1 FROM runs_run
    WHERE queue_id = %s AND status = 'submitted' AND (rank, id) >= (%s, %s) AND (rank, id) < (%s, %s)
    ORDER BY rank, id LIMIT %s
) AS counted
"""


def walk_from(queue: Queue, cut: RankKey, up: bool, skip: Collection[int]) -> Iterator[Slot]:
    """The runs ahead of a key (`up`) or from there on, nearest first, without those in `skip`."""
    size = FEW
    while True:
        sql = _WALK.format(*(("<", "DESC") if up else (">=", "ASC")))
        found = [Slot(*row) for row in rows(sql, [queue.pk, *cut, size])]
        yield from (place for place in found if place.id not in skip)
        if len(found) < size:
            return
        cut = found[-1].key if up else (found[-1].rank, found[-1].id + 1)
        size = min(size * 8, 5000)


def seniorities(queue: Queue, now_us: int) -> tuple[int, int]:
    """The oldest seniority (µs) of the waiting runs, and the newest that a run may have now."""
    newest = max(now_us, queue.last_seniority_us)
    found = rows(_OLDEST, [queue.pk])
    return (found[0][0] if found else newest), newest


def runs_between(waiting: QuerySet[Run], *places: RankKey) -> QuerySet[Run]:
    """The runs from the first of these keys up to the last."""
    first, last = min(places), max(places)
    from_first = waiting.filter(rank__gte=first[0]).exclude(rank=first[0], pk__lt=first[1])
    return from_first.filter(rank__lte=last[0]).exclude(rank=last[0], pk__gte=last[1])


def runs_ahead(queue: Queue, cuts: Iterable[RankKey], most: int | None = None) -> dict[RankKey, int | None]:
    """How many waiting runs are ahead of each key; None where more than `most`."""
    counted: int | None = 0
    since = FIRST
    found: dict[RankKey, int | None] = {}
    for cut in sorted(set(cuts)):
        if cut == LAST:
            counted = QueueCount.objects.values_list("submitted", flat=True).get(queue=queue)
        elif cut != FIRST and counted is not None:
            [[more]] = rows(_COUNT, [queue.pk, *since, *cut, MAX_INT if most is None else most + 1 - counted])
            counted = None if most is not None and counted + more > most else counted + more
        found[cut], since = counted, cut
    return found


def nearby_ranks(queue: Queue, slots: list[Slot], user: User) -> list[Slot]:
    """Other members' runs with ranks within NUDGE_US of these: usually none."""
    waiting = selectors.in_order(queue)
    close = waiting.filter(rank__gte=OuterRef("rank") - NUDGE_US, rank__lte=OuterRef("rank") + NUDGE_US)
    own = waiting.filter(user=user, rank__gte=slots[0].rank, rank__lte=slots[-1].rank)
    ranks = set(own.filter(Exists(close.exclude(user=user))).values_list("rank", flat=True))
    mine = {slot.id for slot in slots}
    found: dict[int, Slot] = {}
    for rank in ranks | {slots[0].rank, slots[-1].rank}:
        beside = to_slots(waiting.filter(rank__gte=rank - NUDGE_US, rank__lte=rank + NUDGE_US))
        found |= {place.id: place for place in beside if place.id not in mine}
    return list(found.values())


@dataclass(frozen=True)
class RankFactors:
    """What a run's position comes from.

    `aged_points`: the points of priority that its seniority is worth compared with a run submitted now; moves change
    them. `position` counts from 1, None while it is not waiting. New runs with a priority below `ahead_of_priority`
    queue behind it; None if all would, or while it is not waiting. `penalty_s` is what its member's share puts it
    behind, and `penalty_basis` the numbers of it (`ordering.Basis`).
    """

    priority: int
    submitted_at: dt.datetime
    aged_points: float
    moved_by: User | None
    moved_at: dt.datetime | None
    position: int | None
    ahead_of_priority: int | None
    penalty_s: int
    penalty_basis: dict[str, float]


def rank_factors(run: Run, now: dt.datetime) -> RankFactors:
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
        penalty_s=run.penalty_s,
        penalty_basis=run.penalty_basis,
    )


def overtaking_priority(rank: int, newest_us: int, step: int) -> int | None:
    """The lowest priority with which a run of seniority `newest_us` goes ahead of `rank`; None if not even 100 does."""
    least = max(ordering.PRIORITY_MIN, (newest_us - rank) // step + 1)
    return least if least <= ordering.PRIORITY_MAX else None
