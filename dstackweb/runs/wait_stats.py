"""How long runs waited and how many were waiting, as sums that add up over hours, priority bands and queues. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

BANDS = 4
"""Quarters of the priorities: 0–24, 25–49, 50–74, 75–100."""

BOUNDS_S = (60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400)
"""The longest wait (whole seconds) that each bucket but the last takes."""

BUCKETS = ("waited_1m", "waited_5m", "waited_15m", "waited_1h", "waited_4h", "waited_12h", "waited_1d", "waited_longer")
"""The columns of `QueueSpan` that count waits up to each bound, above the one before."""


def band_of(priority: int) -> int:
    return min(priority // 25, BANDS - 1)


def band_limits(band: int) -> tuple[int, int]:
    return band * 25, 100 if band == BANDS - 1 else band * 25 + 24


def bucket_of(waited_s: int) -> int:
    """Which bucket a wait belongs to, as an index into `BUCKETS`."""
    return bisect_left(BOUNDS_S, waited_s)


NONE = (0,) * len(BUCKETS)


class WaitStats(NamedTuple):
    """Sums over a span, which add up over hours, bands and queues.

    `counts` has one number per bucket. `lengths` are waiting runs, added up over the hours in which they were
    `sampled`; `length_max` is the most of one sample, None when there was none.
    """

    placed: int = 0
    wait_s: int = 0
    longest_s: int = 0
    counts: tuple[int, ...] = NONE
    lengths: int = 0
    sampled: int = 0
    length_max: int | None = None

    @property
    def median_s(self) -> float | None:
        """None when no run was placed."""
        return percentile(self.counts, self.longest_s, 0.5)

    @property
    def p90_s(self) -> float | None:
        """None when no run was placed."""
        return percentile(self.counts, self.longest_s, 0.9)

    @property
    def length(self) -> float | None:
        """Mean number of waiting runs in the sampled hours; None when none was sampled."""
        return self.lengths / self.sampled if self.sampled else None


def join_spans(tallies: Iterable[WaitStats]) -> WaitStats:
    """Spans that follow each other, as one."""
    parts = list(tallies)
    return _sum(parts, sum(part.sampled for part in parts), _most(parts))


def add_up(tallies: Iterable[WaitStats]) -> WaitStats:
    """Bands or queues in the same hour, as one. They were sampled at once, so lengths add up; their maxima don't."""
    parts = list(tallies)
    if len(parts) == 1:
        return parts[0]
    sampled = max((part.sampled for part in parts), default=0)
    at_once = sum(part.lengths for part in parts) if sampled else None
    return _sum(parts, sampled, max((most for most in (at_once, _most(parts)) if most is not None), default=None))


def _sum(parts: Sequence[WaitStats], sampled: int, length_max: int | None) -> WaitStats:
    started = [part for part in parts if part.placed]
    return WaitStats(
        placed=sum([part.placed for part in started]),
        wait_s=sum([part.wait_s for part in started]),
        longest_s=max([part.longest_s for part in started], default=0),
        counts=tuple(map(sum, zip(*[part.counts for part in started], strict=True))) if started else NONE,
        lengths=sum([part.lengths for part in parts]),
        sampled=sampled,
        length_max=length_max,
    )


def _most(parts: Sequence[WaitStats]) -> int | None:
    return max([part.length_max for part in parts if part.length_max is not None], default=None)


def percentile(counts: Sequence[int], longest_s: int, share: float) -> float | None:
    """An estimate of the wait (s) that `share` of the runs stay within; None when there are no runs.

    The true one (nearest rank) lies in the same bucket. Within it, waits are taken to lie evenly between its bounds,
    where the longest wait of all bounds the last; the last run's own wait is therefore exact.
    """
    placed = sum(counts)
    if not placed:
        return None
    rank = max(1, math.ceil(share * placed - 1e-9))
    if rank == placed:
        return float(longest_s)
    passed = list(accumulate(counts, initial=0))
    bucket = next(index for index, (_before, after) in enumerate(pairwise(passed)) if after >= rank)
    low, high = bucket_span(bucket, longest_s)
    return low + (high - low) * (rank - passed[bucket] - 0.5) / counts[bucket]


def bucket_span(bucket: int, longest_s: int) -> tuple[int, int]:
    """The least and the longest wait (s) that a bucket may hold when none was longer than `longest_s`."""
    low = BOUNDS_S[bucket - 1] + 1 if bucket else 0
    high = min(BOUNDS_S[bucket], longest_s) if bucket < len(BOUNDS_S) else longest_s
    return low, high


def columns(tallies: list[WaitStats]) -> dict[str, list[Any]]:
    """One list per number of `numbers`."""
    spans = [numbers(tally) for tally in tallies]
    return {name: [span[name] for span in spans] for name in spans[0]}


def numbers(tally: WaitStats) -> dict[str, Any]:
    """The numbers of a span: waits in seconds and lengths in runs, None where unknown."""
    return {
        "placed": tally.placed,
        "wait_median_s": None if tally.median_s is None else round(tally.median_s),
        "wait_p90_s": None if tally.p90_s is None else round(tally.p90_s),
        "wait_max_s": tally.longest_s if tally.placed else None,
        "length": None if tally.length is None else round(tally.length, 1),
        "length_max": tally.length_max,
    }
