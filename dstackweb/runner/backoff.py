"""How long to wait before trying again."""

from __future__ import annotations

import random

BACKOFF_BASE_S, BACKOFF_CAP_S = 0.2, 5.0


def backoff(failures: int) -> float:
    """Full jitter between the base and a doubling ceiling (seconds)."""
    ceiling = min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2 ** min(failures, 10))
    return random.uniform(BACKOFF_BASE_S, ceiling)
