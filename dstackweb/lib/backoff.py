"""The time to wait before a retry."""

from __future__ import annotations

import random
from collections.abc import Callable


def full_jitter(attempt: int, base_s: float, cap_s: float, rnd: Callable[[], float] = random.random) -> float:
    """Seconds to wait after failed attempt `attempt` (from 0): uniform from 0 to `base_s * 2**attempt`, at most
    `cap_s`. `rnd` returns numbers in [0, 1).

    Full jitter: clients that failed together don't retry together.
    (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/)
    """
    # The exponent is bounded: a large number of attempts must not overflow.
    return rnd() * min(cap_s, base_s * 2.0 ** min(attempt, 60))
