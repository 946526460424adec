"""How many requests of one kind a web process works on at once, and how much each run may tell: beyond that, 429.

Refused at once and never made to wait, so that requests that queue for one run's counters keep no page waiting.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from dstackweb.lib.errors import TooMany
from dstackweb.lib.limiter import room

PER_RUN = 2
"""Requests of one run at once: one at work, and one that is understood meanwhile."""
COST = 50
"""What a request costs besides its entries, in entries."""
ENTRY_BYTES = 1000
"""Of a body that cost as much as an entry: entries are smaller, and what is none is not read for nothing."""
AGAIN_S = 1.0
REMEMBERED = 1000
"""Runs whose bucket is kept at most before full ones are forgotten."""


class Gate:
    """Shared by the threads of a process: `at_once` requests, `rate` entries a second per run, `burst` saved up."""

    def __init__(self, at_once: int, rate: float, burst: float) -> None:
        self._at_once, self._rate, self._burst = at_once, rate, burst
        self._lock = threading.Lock()
        self._inside: Counter[int] = Counter()
        self._buckets: dict[int, tuple[float, int]] = {}

    @contextmanager
    def enter(self, run_id: int) -> Iterator[None]:
        """Be among those at work. Raises TooMany where there are enough."""
        with self._lock:
            if self._inside.total() >= self._at_once or self._inside[run_id] >= PER_RUN:
                raise TooMany("tasks of others are being counted just now", AGAIN_S)
            self._inside[run_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside[run_id] -= 1
                if not self._inside[run_id]:
                    del self._inside[run_id]

    def spend(self, run_id: int, size: int, now_us: int) -> None:
        """Take what a request of `size` bytes costs from the run's bucket, before its body is understood, which is
        work. Raises TooMany while the bucket is empty.

        The last one may go into debt: any request that is allowed at all gets through in the end.
        """
        with self._lock:
            tokens, at_us = self._buckets.get(run_id, (self._burst, now_us))
            left = room(tokens, at_us, self._rate, self._burst, now_us)
            if left <= 0:
                detail = f"this run tells more than {self._rate:,.0f} tasks a second"
                raise TooMany(detail, max(AGAIN_S, -left / self._rate))
            if len(self._buckets) >= REMEMBERED:
                self._forget_full(now_us)
            self._buckets[run_id] = (left - size / ENTRY_BYTES - COST, now_us)

    def owe(self, run_id: int, entries: int) -> None:
        """Take what its entries cost, now that they are known."""
        with self._lock:
            if run_id in self._buckets:
                tokens, at_us = self._buckets[run_id]
                self._buckets[run_id] = (tokens - entries, at_us)

    def _forget_full(self, now_us: int) -> None:
        self._buckets = {
            run_id: (tokens, at_us)
            for run_id, (tokens, at_us) in self._buckets.items()
            if room(tokens, at_us, self._rate, self._burst, now_us) < self._burst
        }
