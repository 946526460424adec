"""How fast tasks finish, and how long the rest takes, with the range either may well be in. Pure.

Two windows are kept (models.Rated): the last minute follows changes, the last ten smooth what comes in bursts.
The more has finished in the last minute, the more it counts; ranges are those in which four of five estimates are
right while tasks finish independently, wider where the two windows disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

MINUTE_S = 60.0
TEN_MINUTES_S = 600.0

LEAST_S = 5.0
"""Reports come in bursts: of less time than this no rate is made."""
_FEW = 20.0
"""So many finishes in the last minute count as much as the ten minutes do."""
_FORGOTTEN = 0.05
"""What one finish weighs after half an hour. With less than this nothing has finished lately."""
_Z = 1.2816
"""Of a normal distribution a tenth lies above."""


class Rated(Protocol):
    """The fields of models.Rated."""

    @property
    def first_ms(self) -> int: ...
    @property
    def finished_1m(self) -> float: ...
    @property
    def finished_10m(self) -> float: ...
    @property
    def rated_ms(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Rate:
    """Tasks per second, and from where to where it may be."""

    per_s: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Left:
    """Seconds until all is finished, and from where to where it may be; `high` is math.inf where nobody can say."""

    seconds: float
    low: float
    high: float


def decayed(finished: float, age_ms: float, window_s: float) -> float:
    """What finishes weigh when they are older by `age_ms`."""
    return finished * math.exp(-max(0.0, age_ms) / 1000 / window_s)


def rate(row: Rated, now_ms: int) -> Rate | None:
    """How fast the tasks of a row finish now. None when nothing has finished lately."""
    age_ms = now_ms - row.rated_ms
    if decayed(row.finished_10m, age_ms, TEN_MINUTES_S) < _FORGOTTEN:
        return None
    seen_s = max(LEAST_S, (now_ms - row.first_ms) / 1000)
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


def left(remaining: int, rate: Rate | None, stuck: int = 0) -> Left | None:
    """How long so many tasks take at a rate. None when nothing moves on, or the rate is not known.

    `stuck` of them have nobody to run them: when these will finish, nobody can say.
    """
    moving = remaining - stuck
    if moving <= 0 or rate is None or rate.per_s <= 0:
        return None
    high = moving / rate.low if rate.low > 0 and not stuck else math.inf
    return Left(moving / rate.per_s, moving / rate.high, high)


def _of_window(finished: float, window_s: float, seen_s: float) -> tuple[float, float, float, float]:
    """The rate that one window tells when tasks were seen for so long, its range, and on how many finishes it rests.

    Finishes at an even rate weigh `window_s * (1 - exp(-seen_s / window_s))` times that rate.
    """
    part = -math.expm1(-seen_s / window_s)
    finishes = 2 * finished / (2 - part)
    scale = (2 - part) / (2 * window_s * part)
    low, high = _quantile(finishes, -_Z) * scale, _quantile(finishes + 1, _Z) * scale
    return finishes * scale, low, high, finishes


def _quantile(shape: float, z: float) -> float:
    """Of a gamma distribution (Wilson and Hilferty's approximation)."""
    if shape <= 0:
        return 0.0
    root = 1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape))
    return shape * root * root * root if root > 0 else 0.0
