"""Whether a job's GPUs stayed below a minimum over a whole window. Pure; the same work for each sample.

A job is to stop when some GPU of it (or, with the scope `all`, every one) was below the minimum in every sample of the
window, and the samples cover it: no gap over `MAX_GAP` intervals, the newest not older than that, and the first of the
unbroken stretch of low samples not later than the window's start plus one interval, since a sample stands for the
interval before it. The window lies wholly within the time for which the job is judged. Equal to the minimum is use.

Moments and spans are milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

MAX_GAP = 3
"""Intervals between two samples, or since the newest, beyond which nothing is known of the time between."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """What is kept of a GPU's samples: since when all were low (None: the newest was not), and the newest's moment."""

    since_ms: int | None = None
    last_ms: int | None = None


NOTHING = Stretch()


def fold(stretch: Stretch, at_ms: int, utilization: int, minimum: int, interval_ms: int) -> Stretch:
    """The stretch after one more sample. Late or doubled ones count where they show use, and extend nothing else."""
    low, last_ms = utilization < minimum, stretch.last_ms
    if last_ms is not None and at_ms <= last_ms:
        if low or stretch.since_ms is None or at_ms < stretch.since_ms:
            return stretch
        # Of what came after it only the newest sample is surely low.
        return Stretch(last_ms if at_ms < last_ms else None, last_ms)
    if not low:
        return Stretch(None, at_ms)
    unbroken = last_ms is not None and at_ms - last_ms <= MAX_GAP * interval_ms
    return Stretch(stretch.since_ms if unbroken and stretch.since_ms is not None else at_ms, at_ms)


def replay(samples: Iterable[tuple[int, int]], minimum: int, interval_ms: int) -> Stretch:
    """The stretch after `(at_ms, utilization)` in this order, from nothing."""
    stretch = NOTHING
    for at_ms, utilization in samples:
        stretch = fold(stretch, at_ms, utilization, minimum, interval_ms)
    return stretch


@dataclass(frozen=True, slots=True)
class Window:
    """How long which GPUs must be low, and from when on the job is judged."""

    window_ms: int
    scope: Literal["any", "all"]
    from_ms: int


class Kind(StrEnum):
    KEEP = "keep"
    UNKNOWN = "unknown"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`low_since_ms` is from when the job has been low, None while it isn't or it is unknown. `gpu` is which of its
    GPUs that is, by place; None with the scope `all`. `stops_ms`: from then on a low sample stops it."""

    kind: Kind
    low_since_ms: int | None = None
    stops_ms: int | None = None
    gpu: int | None = None


USED, UNKNOWN = Verdict(Kind.KEEP), Verdict(Kind.UNKNOWN)


def judge(window: Window, gpus: Sequence[Stretch], now_ms: int, interval_ms: int) -> Verdict:
    """The verdict on a job with these GPUs, each of them, at a moment. Without any there is nothing to judge."""
    known = [stretch for stretch in gpus if stretch.last_ms is not None and _is_fresh(stretch, now_ms, interval_ms)]
    low = [stretch.since_ms for stretch in known if stretch.since_ms is not None]
    if window.scope == "all":
        if len(low) < len(known):
            return USED
        if len(known) < len(gpus) or not low:
            return UNKNOWN
        return _of_low(window, max(low), None, now_ms, interval_ms)
    if not low:
        return USED if known and len(known) == len(gpus) else UNKNOWN
    since_ms = min(low)
    place = next(
        place
        for place, stretch in enumerate(gpus)
        if stretch.since_ms == since_ms and _is_fresh(stretch, now_ms, interval_ms)
    )
    return _of_low(window, since_ms, place, now_ms, interval_ms)


def _of_low(window: Window, since_ms: int, gpu: int | None, now_ms: int, interval_ms: int) -> Verdict:
    stops_ms = max(since_ms - interval_ms, window.from_ms) + window.window_ms
    return Verdict(Kind.STOP if now_ms >= stops_ms else Kind.KEEP, since_ms, stops_ms, gpu)


def _is_fresh(stretch: Stretch, now_ms: int, interval_ms: int) -> bool:
    return stretch.last_ms is not None and abs(now_ms - stretch.last_ms) <= MAX_GAP * interval_ms
