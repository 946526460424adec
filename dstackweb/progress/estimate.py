"""How long tasks take, and the rate at which they finish, with an 80 % range. Pure.

Two exponential windows are kept (models.RateCounters): one minute follows changes, ten minutes smooth bursts. The more
tasks finished in the last minute, the more that window counts. A range contains the true value in four of five cases
while tasks finish independently, and is wider where the windows disagree.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dstackweb.lib.log_bins import LogBins

BINS = LogBins(least=0.001, per_octave=3, count=96)
"""Of durations in seconds, up to 39 days. Each prefix keeps such a histogram, so that a page reads no tasks."""
MINUTE_S = 60.0
TEN_MINUTES_S = 600.0

LEAST_S = 5.0
"""Shortest time that a rate is based on: reports come in bursts."""
_FEW = 20.0
"""With so many finished tasks in the last minute, both windows count equally."""
_FORGOTTEN = 0.05
"""Weight of one finished task after half an hour. Below this there is no rate."""
_Z = 1.2816
"""The 90 % quantile of the normal distribution."""


def added(histogram: str, bins: Mapping[int, int]) -> str:
    """The JSON of a histogram of durations with more tasks in it."""
    counts = Counter({int(number): count for number, count in json.loads(histogram).items()})
    counts.update(bins)
    return json.dumps({str(number): counts[number] for number in sorted(counts)})


class RateSample(NamedTuple):
    """The rate windows of a row (models.RateCounters), and the time of reading."""

    first_ms: int
    finished_1m: float
    finished_10m: float
    rated_ms: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class Rate:
    """Tasks per second, and its range."""

    per_s: float
    low: float
    high: float


def decayed(finished: float, age_ms: float, window_s: float) -> float:
    """The weight of finished tasks after another `age_ms`."""
    return finished * math.exp(-max(0.0, age_ms) / 1000 / window_s)


def rate(row: RateSample) -> Rate | None:
    """The current rate of a row. None when nothing has finished lately."""
    age_ms = row.now_ms - row.rated_ms
    if decayed(row.finished_10m, age_ms, TEN_MINUTES_S) < _FORGOTTEN:
        return None
    seen_s = max(LEAST_S, (row.now_ms - row.first_ms) / 1000)
    fast, fast_low, fast_high, finishes = _of_window(decayed(row.finished_1m, age_ms, MINUTE_S), MINUTE_S, seen_s)
    slow, slow_low, slow_high, _ = _of_window(decayed(row.finished_10m, age_ms, TEN_MINUTES_S), TEN_MINUTES_S, seen_s)
    weight = finishes / (finishes + _FEW)
    rest = 1 - weight
    low, high = weight * fast_low + rest * slow_low, weight * fast_high + rest * slow_high
    return Rate(
        per_s=weight * fast + rest * slow,
        low=min(low, weight * min(fast, slow) + rest * low),
        high=max(high, weight * max(fast, slow) + rest * high),
    )


def _of_window(finished: float, window_s: float, seen_s: float) -> tuple[float, float, float, float]:
    """Rate of one window, observed for `seen_s` seconds, its range, and the number of finished tasks behind it.

    Tasks that finish at a constant rate weigh `window_s * (1 - exp(-seen_s / window_s))` times that rate.
    """
    part = -math.expm1(-seen_s / window_s)
    finishes = 2 * finished / (2 - part)
    scale = (2 - part) / (2 * window_s * part)
    low, high = _quantile(finishes, -_Z) * scale, _quantile(finishes + 1, _Z) * scale
    return finishes * scale, low, high, finishes


def _quantile(shape: float, z: float) -> float:
    """Quantile of a gamma distribution (Wilson-Hilferty approximation)."""
    if shape <= 0:
        return 0.0
    root = 1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape))
    return shape * root * root * root if root > 0 else 0.0
