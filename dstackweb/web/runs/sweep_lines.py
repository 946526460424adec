"""A sweep on one line, with a bar of its counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dstackweb.runs.models import Sweep
from dstackweb.runs.sweeps.selectors import SweepCounts
from dstackweb.wording import sweeps as words

SHOWN = 8
"""Active sweeps above a list of runs."""


class SweepSegment(NamedTuple):
    """A part of a bar: runs that are there, from a run on."""

    kind: str
    start: int
    width: int


class SweepLine(NamedTuple):
    sweep: Sweep
    counts: SweepCounts
    text: str
    state: str
    segments: list[SweepSegment]


def sweep_lines(sweeps: Iterable[Sweep]) -> list[SweepLine]:
    return [sweep_line(sweep) for sweep in sweeps]


def sweep_line(sweep: Sweep) -> SweepLine:
    counts = SweepCounts.of(sweep)
    return SweepLine(sweep, counts, words.counts(counts), words.state(sweep), list(_segments(counts)))


def _segments(counts: SweepCounts) -> Iterator[SweepSegment]:
    """What has ended first, then what runs, then what waits. What is to come is the rest of the bar."""
    start = 0
    ended = counts.terminated + counts.dropped + counts.removed
    for kind, width in (
        ("done", counts.done), ("failed", counts.failed), ("terminated", ended), ("running", counts.running),
        ("submitted", counts.waiting),
    ):  # fmt: skip
        if width:
            yield SweepSegment(kind, start, width)
        start += width
