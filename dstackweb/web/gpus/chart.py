"""Samples of GPUs over time, as data for gpu-charts.js and as table rows."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, NamedTuple

from dstackweb.gpus.selectors import Columns
from dstackweb.lib.times import to_moment, to_ms

POINTS = 360
"""Points per GPU in a chart."""
ROWS = 120
"""Rows of the table with the same data."""


class SampleCell(NamedTuple):
    utilization: float | None
    memory_mib: float | None

    @property
    def known(self) -> bool:
        return self.utilization is not None or self.memory_mib is not None


class SampleRow(NamedTuple):
    at: dt.datetime
    cells: tuple[SampleCell, ...]


def chart_data(
    columns: Sequence[Columns],
    since: dt.datetime,
    until: dt.datetime,
    minimum: int | None = None,
    low: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The data for gpu-charts.js: `at_ms`, and per GPU a number or null for each of them.

    `minimum` is the policy's, in percent, and `low` the start and end (milliseconds) of the low stretch. Moments at the
    end without any sample (yet) are left out.
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


def table_rows(columns: Sequence[Columns]) -> list[SampleRow]:
    """The same data as rows, newest first; moments without any sample are left out."""
    at_ms = columns[0].at_ms if columns else []
    return [SampleRow(to_moment(ms), cells) for ms, cells in zip(at_ms, _cells(columns), strict=True) if _any(cells)][
        ::-1
    ]


def _cells(columns: Sequence[Columns]) -> list[tuple[SampleCell, ...]]:
    return list(zip(*(map(SampleCell, one.utilization, one.memory_used_mib) for one in columns), strict=True))


def _any(cells: Sequence[SampleCell]) -> bool:
    return any(cell.known for cell in cells)
