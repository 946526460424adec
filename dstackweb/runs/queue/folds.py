"""Reads a queue with the waiting runs of each sweep as one line (`folding`)."""

from __future__ import annotations

from collections.abc import Collection

from django.db.models import Q, QuerySet

from dstackweb.lib import sql
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.queue.folding import Folding, FoldKey, fold
from dstackweb.runs.states import RunStatus

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
