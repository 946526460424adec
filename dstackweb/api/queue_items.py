"""The waiting runs of a queue as items, those of each sweep as one if it is folded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from django.http import QueryDict
from ninja import Field, Schema

from dstackweb.api.app import Id
from dstackweb.api.sweep_schemas import SweepCountsOut
from dstackweb.runs import rows
from dstackweb.runs.models import Queue, Sweep
from dstackweb.runs.queue.folds import folding_of, page_of
from dstackweb.runs.row_fields import QueueExportRow, QueueRow
from dstackweb.runs.sweeps.selectors import SweepCounts, find_sweeps
from dstackweb.wording.queue_filters import Filters, Front
from dstackweb.wording.tables import queue_items


class FoldedOut(Schema):
    """The waiting runs of a sweep that an item stands for. The item itself is the first of them."""

    sweep: str = Field(description="The name of the sweep")
    id: Id
    runs: int
    size: int = Field(description="All runs of the sweep")
    counts: SweepCountsOut

    @classmethod
    def of(cls, sweep: Sweep, runs: int) -> FoldedOut:
        counts = SweepCountsOut.from_orm(SweepCounts.of(sweep))
        return cls(sweep=sweep.name, id=str(sweep.uid), runs=runs, size=sweep.size, counts=counts)


@dataclass(slots=True, kw_only=True)
class QueueItem(QueueRow):
    """A waiting run and its position."""

    reason_detail: str
    folded: Annotated[FoldedOut | None, Field(description="Only with `folded=true`; null for a single run")] = None


def read_items(
    queue: Queue, limit: int, offset: int, *, folded: bool, query: str = ""
) -> tuple[list[dict[str, Any]], bool]:
    """A page of runs, or of lines, or of the runs that a view's `query` shows, and whether there are more."""
    if query:
        items, more = _in_view(queue, limit, offset, query)
        return [item | {"folded": None} for item in items] if folded else items, more
    if folded:
        return _folded(queue, limit, offset)
    found = rows.queue_rows(queue, limit + 1, offset)
    return queue_items(found[:limit]), len(found) > limit


def _in_view(queue: Queue, limit: int, offset: int, query: str) -> tuple[list[dict[str, Any]], bool]:
    filters = Filters.read(QueryDict(query))
    positions = Front.read(queue, filters).positions(queue, filters, limit + 1, offset)
    shown = dict(list(positions.items())[:limit])
    return queue_items(rows.queue_rows_at(queue, shown, kind=QueueExportRow)), len(positions) > limit


def _folded(queue: Queue, limit: int, offset: int) -> tuple[list[dict[str, Any]], bool]:
    folding = folding_of(queue)
    if folding is None:
        items, more = read_items(queue, limit, offset, folded=False)
        return [item | {"folded": None} for item in items], more
    positions = page_of(queue, folding, limit + 1, offset)
    shown = rows.queue_rows_at(queue, dict(list(positions.items())[:limit]), kind=QueueExportRow)
    runs = folding.stands_for(row.pk for row in shown)
    sweeps = {one.pk: one for one in find_sweeps({folding.heads[pk].sweep_id for pk, n in runs.items() if n > 1})}
    items = queue_items(shown)
    for item, row in zip(items, shown, strict=True):
        key = folding.heads.get(row.pk)
        sweep = sweeps.get(key.sweep_id) if key is not None and runs[row.pk] > 1 else None
        item["folded"] = FoldedOut.of(sweep, runs[row.pk]).model_dump() if sweep else None
    return items, len(positions) > limit
