"""Limits of task reports per web process: concurrent requests, and entries per run. Beyond them: 429.

Requests are refused immediately and never wait, so that reports of one run don't block pages.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from dstackweb.lib.errors import TooMany
from dstackweb.lib.models import room

PER_RUN = 2
"""Concurrent requests of one run: one is counted while the next one is parsed."""
COST = 50
"""The cost of a request in addition to its entries, in entries."""
ENTRY_BYTES = 1000
"""Bytes of a body that cost as much as an entry: so invalid bodies are not free."""
AGAIN_S = 1.0
REMEMBERED = 1000
"""The most buckets of runs before full ones are dropped."""


class Gate:
    """Shared by the threads of a process: `at_once` requests, `rate` entries a second per run, `burst` saved up."""

    def __init__(self, at_once: int, rate: float, burst: float) -> None:
        self._at_once, self._rate, self._burst = at_once, rate, burst
        self._lock = threading.Lock()
        self._inside: Counter[int] = Counter()
        self._buckets: dict[int, tuple[float, int]] = {}

    @contextmanager
    def enter(self, run_id: int) -> Iterator[None]:
        """Enter a limited section. Raises TooMany if it is full."""
        with self._lock:
            if self._inside.total() >= self._at_once or self._inside[run_id] >= PER_RUN:
                raise TooMany("too many task reports at once", AGAIN_S)
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
                detail = f"this run reports more than {self._rate:,.0f} tasks per second"
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
