"""What GPUs did over time, as gpu-charts.js draws it and as a table says it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, NamedTuple

from dstackweb.gpus.clock import to_moment, to_ms
from dstackweb.gpus.samples.selectors import Columns

POINTS = 360
"""Of a chart, for each GPU."""
ROWS = 120
"""Of the table that says the same."""


class Cell(NamedTuple):
    """One GPU at one moment of the table."""

    utilization: float | None
    memory_mib: float | None

    @property
    def known(self) -> bool:
        """Whether anything is."""
        return self.utilization is not None or self.memory_mib is not None


class Row(NamedTuple):
    """One moment of the table, with a cell for each GPU."""

    at: dt.datetime
    cells: tuple[Cell, ...]


def drawn(
    columns: Sequence[Columns],
    since: dt.datetime,
    until: dt.datetime,
    minimum: int | None = None,
    low: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """What gpu-charts.js draws: `at_ms`, and per GPU a number or null for each of them.

    `minimum` is a policy's, percent, and `low` from when to when (milliseconds) it was not reached. Moments at the end
    of which nothing is known (yet) are left out.
    """
    known = max((place for place, cells in enumerate(_cells(columns), start=1) if _any(cells)), default=0)
    return {
        "since_ms": to_ms(since),
        "until_ms": to_ms(until),
        "minimum": minimum,
        "low_since_ms": low[0] if low else None,
        "low_until_ms": low[1] if low else None,
        "at_ms": columns[0].at_ms[:known] if columns else [],
        "gpus": [
            {
                "uuid": one.series.uuid,
                "index": one.series.index,
                "memory_mib": one.series.memory_mib,
                "utilization": one.utilization[:known],
                "memory_used_mib": one.memory_used_mib[:known],
            }
            for one in columns
        ],
    }


def rows(columns: Sequence[Columns]) -> list[Row]:
    """The same as rows, newest first; moments of which nothing is known are left out."""
    at_ms = columns[0].at_ms if columns else []
    return [Row(to_moment(ms), cells) for ms, cells in zip(at_ms, _cells(columns), strict=True) if _any(cells)][::-1]


def _cells(columns: Sequence[Columns]) -> list[tuple[Cell, ...]]:
    """For each moment, a cell for each GPU."""
    return list(zip(*(map(Cell, one.utilization, one.memory_used_mib) for one in columns), strict=True))


def _any(cells: Sequence[Cell]) -> bool:
    return any(cell.known for cell in cells)
