"""The waiting runs of a sweep as one line of the queue page, with the sweep's bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from django.urls import reverse

from dstackweb.accounts.models import Project
from dstackweb.runs.queue.folding import Folding, FoldKey
from dstackweb.runs.row_fields import QueuePageRow
from dstackweb.runs.sweeps.selectors import find_sweeps
from dstackweb.web.runs.sweep_lines import SweepLine, sweep_line
from dstackweb.wording import sweeps as words
from dstackweb.wording.queue_filters import ALL, Filters


class FoldLine(NamedTuple):
    """A line of the queue that is a fold, or the first of an opened one (`is_open`), whose runs are all lines."""

    key: FoldKey
    runs: int
    line: SweepLine
    is_open: bool
    toggle: str
    """The address of the list with it opened or closed."""

    def cells(self, project: Project) -> dict[str, Any]:
        """What its row shows instead of its first run's values."""
        if self.is_open:
            return {"fold": self}
        sweep, key = self.line.sweep, str(self.key)
        counts = self.line.counts
        return {
            "fold": self,
            "pk": key,
            "token": key,
            "id": sweep.uid,
            "name": sweep.name,
            "url": reverse("web:sweep", args=[project.name, sweep.uid]),
            "stop": words.stops(counts.waiting + counts.running, counts.left),
            "hold": False,
        }


def fold_lines(
    rows: Sequence[QueuePageRow], lines: Mapping[int, int], folding: Folding | None, filters: Filters, page: int
) -> dict[int, FoldLine]:
    """Those among these rows that stand for `lines` runs or begin an opened fold, by run."""
    if folding is None:
        return {}
    keys = {row.pk: folding.key_of[row.pk] for row in rows if _is_fold(row.pk, lines, folding)}
    if not keys:
        return {}
    sweeps = {sweep.pk: sweep_line(sweep) for sweep in find_sweeps({key.sweep_id for key in keys.values()})}
    found, more = {}, {"page": page} if page > 1 else {}
    for pk, key in keys.items():
        if (line := sweeps.get(key.sweep_id)) is not None:  # else removed at this moment
            is_open = key.sweep_id in folding.opened
            runs = folding.sizes[key] if is_open else lines[pk]
            found[pk] = FoldLine(key, runs, line, is_open, filters.toggled(key.sweep_id).address(**more) or f"?{ALL}")
    return found


def _is_fold(pk: int, lines: Mapping[int, int], folding: Folding) -> bool:
    key = folding.key_of.get(pk)
    if key is not None and key.sweep_id in folding.opened:
        return pk in folding.heads and folding.sizes[key] > 1
    return lines[pk] > 1
