"""How long to wait before trying again."""

from __future__ import annotations

import random
from collections.abc import Callable


def full_jitter(attempt: int, base_s: float, cap_s: float, rnd: Callable[[], float] = random.random) -> float:
    """Seconds to wait after failed attempt `attempt` (from 0): evenly spread from 0 to `base_s * 2**attempt`,
    at most `cap_s`. `rnd` gives numbers in [0, 1).

    Full jitter: of many that failed together, few come back together.
    (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/)
    """
    # The exponent is bounded, so that an attempt counted for years can't overflow.
    return rnd() * min(cap_s, base_s * 2.0 ** min(attempt, 60))
