"""The lines that a queue's page lists: runs that match what a reader looks for, or each sweep as one (`folding`).

Searches and counts look at the front of the queue only, so that they cost the same in a queue of any length.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.db.models import Q, QuerySet

from dstackweb.lib import sql
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.queue.folding import Folding, FoldKey, fold
from dstackweb.runs.states import RunStatus

FRONT = 2_000
"""Waiting runs that are searched and counted, from the front of the queue."""


@dataclass(frozen=True)
class QueueSearch:
    """What waiting runs must have; what is empty or None says nothing.

    `text` is part of the name in any case, `priority` the lowest, `shapes` those that the run's must be among.
    """

    text: str = ""
    user: str = ""
    priority: int | None = None
    shapes: frozenset[str] | None = None


class ShapeCount(NamedTuple):
    """So many of the runs at the front of a queue have this shape; `run_id` is one of them. All are of one member."""

    shape: str
    runs: int
    run_id: int
    user_id: int
    user: str


class Match(NamedTuple):
    """A run that matches, and its position in the queue."""

    run_id: int
    position: int
    shape: str
    user_id: int


_FRONT = """
SELECT ROW_NUMBER() OVER (ORDER BY rank, id) AS position, id, shape, name, user_id, priority FROM (
    SELECT rank, id, shape, name, user_id, priority FROM runs_run
    WHERE queue_id = %s AND status = 'submitted' ORDER BY rank, id LIMIT %s
) AS head
"""
_SHAPES = """
SELECT shape, runs, run_id, user_id, (SELECT username FROM accounts_user WHERE id = user_id) FROM (
    SELECT shape, COUNT(*) AS runs, MIN(id) AS run_id, MIN(user_id) AS user_id FROM (
        SELECT shape, id, user_id FROM runs_run WHERE queue_id = %s AND status = 'submitted' ORDER BY rank, id LIMIT %s
    ) AS front GROUP BY shape
) AS counted ORDER BY runs DESC, run_id
"""


def find(queue: Queue, search: QueueSearch, limit: int, offset: int) -> tuple[dict[int, int], int]:
    """A page of the matching runs, their positions in the queue by id, and how many match in all."""
    where, values = _conditions(search)
    matching = f"FROM ({_FRONT}) AS front WHERE {where}"
    page = f"SELECT id, position, COUNT(*) OVER () {matching} ORDER BY position LIMIT %s OFFSET %s"
    found = sql.rows(page, [queue.pk, FRONT, *values, limit, offset])
    if not found and offset:
        [[total]] = sql.rows(f"SELECT COUNT(*) {matching}", [queue.pk, FRONT, *values])
        return {}, total
    return {pk: position for pk, position, _total in found}, found[0][2] if found else 0


def find_all(queue: Queue, search: QueueSearch) -> list[Match]:
    """All matching runs in true order; FRONT at most."""
    where, values = _conditions(search)
    statement = f"SELECT id, position, shape, user_id FROM ({_FRONT}) AS front WHERE {where} ORDER BY position"
    return [Match(*row) for row in sql.rows(statement, [queue.pk, FRONT, *values])]


def _conditions(search: QueueSearch) -> tuple[str, list[Any]]:
    conditions: list[str] = ["1 = 1"]
    values: list[Any] = []
    if search.text:
        escaped = search.text.lower().replace("!", "!!").replace("%", "!%").replace("_", "!_")
        conditions.append("LOWER(name) LIKE %s ESCAPE '!'")
        values.append(f"%{escaped}%")
    if search.user:
        conditions.append("user_id = (SELECT id FROM accounts_user WHERE username = %s)")
        values.append(search.user)
    if search.priority is not None:
        conditions.append("priority >= %s")
        values.append(search.priority)
    if search.shapes is not None:
        shapes = sorted(search.shapes) or [""]
        conditions.append(f"shape IN ({sql.places(shapes)})")
        values += shapes
    return " AND ".join(conditions), values


def shape_counts(queue: Queue) -> list[ShapeCount]:
    """How many of the first FRONT waiting runs have each shape, the most frequent first."""
    return [ShapeCount(*row) for row in sql.rows(_SHAPES, [queue.pk, FRONT])]


def needs_of(run_ids: Iterable[int]) -> dict[int, dict[str, Any]]:
    """What these runs need, as much of their specs as `requirements` and `nodes`, by id."""
    found = Run.objects.filter(pk__in=list(run_ids)).values_list("pk", "spec__requirements", "spec__nodes")
    return {pk: {"requirements": requirements, "nodes": nodes} for pk, requirements, nodes in found}


MOST_SWEEPS = 200
"""Sweeps of a project that are folded, the oldest first: each has a hundred waiting runs at most."""


def folding_of(queue: Queue, opened: Collection[int] = ()) -> Folding | None:
    """The folds of a queue, but for these `opened` sweeps; None where no line stands for several runs of one."""
    runs = (
        ((rank, pk), FoldKey.of(sweep_id, priority, moved_at))
        for rank, pk, sweep_id, priority, moved_at in sql.rows(_FOLDED, [queue.project_id, MOST_SWEEPS, queue.pk])
    )
    found = fold(runs, frozenset(opened))
    return found if len(found.sizes) < len(found.key_of) else None


_FOLDED = """
SELECT rank, id, sweep_id, priority, moved_at FROM runs_run
WHERE sweep_id IN (SELECT id FROM runs_sweep WHERE project_id = %s AND ended_at IS NULL ORDER BY id LIMIT %s)
    AND status = 'submitted' AND queue_id = %s ORDER BY rank, id
"""


def page_of(queue: Queue, folding: Folding, limit: int, offset: int) -> dict[int, int]:
    """The runs that are these lines of the queue, with their positions by id, in order."""
    where, values = "queue_id = %s AND status = 'submitted'", [queue.pk]
    if closed := sorted(folding.closed):
        heads = folding.heads
        # CASE, since OR made the planner read all of it by other indexes.
        is_folded = f"sweep_id IN ({sql.places(closed)}) AND id NOT IN ({sql.places(heads)})"
        where += f" AND CASE WHEN sweep_id IS NULL THEN 0 WHEN {is_folded} THEN 1 ELSE 0 END = 0"
        values += [*closed, *heads]
    page = f"SELECT rank, id FROM runs_run WHERE {where} ORDER BY rank, id LIMIT %s OFFSET %s"
    found = sql.rows(page, [*values, limit, offset])
    return {pk: folding.position(offset + line, (rank, pk)) for line, (rank, pk) in enumerate(found)}


def runs_of(queue: Queue, key: FoldKey) -> QuerySet[Run]:
    """The runs of a fold that wait in this queue, in its order."""
    waiting = Run.objects.filter(queue=queue, status=RunStatus.SUBMITTED, sweep=key.sweep_id)
    mine = Q(moved_at=key.moved_at) if key.priority is None else Q(moved_at=None, priority=key.priority)
    return waiting.filter(mine).select_related("queue", "project", "user").order_by("rank", "id")
