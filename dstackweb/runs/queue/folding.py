"""Which waiting runs of a queue are shown as one line: those of a sweep that are at one place of it. Pure."""

from __future__ import annotations

import datetime as dt
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_TEXT = re.compile(r"s(\d{1,18})(?:p(\d{1,3})|m(\d{1,17}))", re.ASCII)
PlaceKey = tuple[int, int]
"""Rank and id: the queue's order."""


class FoldKey(NamedTuple):
    """The runs of a sweep that are one line. `priority` is None for those that were moved, in µs since the epoch."""

    sweep_id: int
    priority: int | None
    moved_us: int | None

    @classmethod
    def of(cls, sweep_id: int, priority: int, moved_at: dt.datetime | None) -> FoldKey:
        if moved_at is None:
            return cls(sweep_id, priority, None)
        return cls(sweep_id, None, (moved_at - EPOCH) // dt.timedelta(microseconds=1))

    @classmethod
    def parse(cls, text: str) -> FoldKey | None:
        """What `str` made of one; None for any other text."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        sweep_id, priority, moved = found.groups()
        return cls(int(sweep_id), int(priority) if priority else None, int(moved) if moved else None)

    def __str__(self) -> str:
        return f"s{self.sweep_id}" + (f"p{self.priority}" if self.moved_us is None else f"m{self.moved_us}")

    @property
    def moved_at(self) -> dt.datetime | None:
        return None if self.moved_us is None else EPOCH + dt.timedelta(microseconds=self.moved_us)


@dataclass(frozen=True)
class Folding:
    """The waiting runs of sweeps in a queue. `key_of` has each of them by id, in the order of the queue; of those in
    `opened` sweeps each is a line too.
    """

    key_of: Mapping[int, FoldKey]
    opened: frozenset[int]
    sizes: Mapping[FoldKey, int]
    """How many runs are in each fold."""
    heads: Mapping[int, FoldKey]
    """The first run of each fold, which stands for the others."""
    hidden: Sequence[PlaceKey]
    """The places of runs that are not lines, in order."""

    @property
    def closed(self) -> set[int]:
        """The sweeps whose runs are not all lines."""
        return {key.sweep_id for key in self.sizes if key.sweep_id not in self.opened}

    def position(self, line: int, place: PlaceKey) -> int:
        """The position in the queue (from 1) of the run at this place, which is the line of this number (from 0)."""
        return line + 1 + bisect_left(self.hidden, place)

    def stands_for(self, line_ids: Iterable[int]) -> dict[int, int]:
        """How many runs each of these lines of the whole queue stands for."""
        keys = ((pk, self.heads.get(pk)) for pk in line_ids)
        return {pk: 1 if key is None or key.sweep_id in self.opened else self.sizes[key] for pk, key in keys}

    def lines_of(self, run_ids: Iterable[int]) -> dict[int, int]:
        """How many of these runs each line stands for, by the first of them, in their order."""
        lines: dict[int, int] = {}
        firsts: dict[FoldKey, int] = {}
        for pk in run_ids:
            key = self.key_of.get(pk)
            if key is None or key.sweep_id in self.opened:
                lines[pk] = 1
            else:
                first = firsts.setdefault(key, pk)
                lines[first] = lines.get(first, 0) + 1
        return lines


def fold(runs: Iterable[tuple[PlaceKey, FoldKey]], opened: frozenset[int]) -> Folding:
    """Fold the waiting runs of sweeps, given in the order of the queue."""
    key_of: dict[int, FoldKey] = {}
    sizes: dict[FoldKey, int] = {}
    heads: dict[int, FoldKey] = {}
    hidden: list[PlaceKey] = []
    for place, key in runs:
        key_of[place[1]] = key
        if key not in sizes:
            heads[place[1]] = key
        elif key.sweep_id not in opened:
            hidden.append(place)
        sizes[key] = sizes.get(key, 0) + 1
    return Folding(key_of, opened, sizes, heads, hidden)
