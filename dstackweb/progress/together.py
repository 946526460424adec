"""Apply batches that wait for the same scope together: one transaction, one lock, for many small reporters."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from dstackweb.lib.errors import TooLarge
from dstackweb.progress.ingest import ingest_batch, ingest_batches
from dstackweb.progress.reports import Batch, Receipt

MOST = 16
"""Batches of one transaction."""


@dataclass(slots=True)
class _Waiting:
    """A batch of a thread. Once `ready`: it has its result, else its thread applies it and those that follow.

    `alone`: it was among batches that failed together.
    """

    batch: Batch
    ready: threading.Event = field(default_factory=threading.Event)
    result: Receipt | TooLarge | None = None
    alone: bool = False


class Together:
    """Batches of this process. A thread applies its own and those that wait, then hands over to the next thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, list[_Waiting]] = {}

    def ingest(self, scope_id: int, batch: Batch, now_ms: int) -> Receipt:
        """As `ingest_batch`."""
        if batch.is_empty:
            return ingest_batch(scope_id, batch, now_ms)
        mine = _Waiting(batch)
        with self._lock:
            waiting = self._waiting.get(scope_id)
            if waiting is None:
                self._waiting[scope_id] = []
            else:
                waiting.append(mine)
        if waiting is not None:
            mine.ready.wait()
        if mine.result is None:
            self._apply(scope_id, mine, now_ms)
        if isinstance(mine.result, TooLarge):
            raise mine.result
        assert mine.result is not None
        return mine.result

    def _apply(self, scope_id: int, mine: _Waiting, now_ms: int) -> None:
        """Apply this thread's batch and those that wait. If that fails, each thread applies its own."""
        with self._lock:
            waiting = self._waiting[scope_id]
            most = 0 if mine.alone or any(one.alone for one in waiting) else MOST - 1
            taken, self._waiting[scope_id] = waiting[:most], waiting[most:]
        try:
            try:
                _apply_all(scope_id, [mine, *taken], now_ms)
            except Exception:
                if not taken:
                    raise
                for one in taken:
                    one.alone = True
                _apply_all(scope_id, [mine], now_ms)
        finally:
            with self._lock:
                # Those without a result come first: the next of them takes over.
                left = [one for one in taken if one.result is None] + self._waiting[scope_id]
                self._waiting[scope_id] = left[1:]
                if not left:
                    del self._waiting[scope_id]
            for one in taken:
                if one.result is not None:
                    one.ready.set()
            if left:
                left[0].ready.set()


def _apply_all(scope_id: int, waiting: list[_Waiting], now_ms: int) -> None:
    results = ingest_batches(scope_id, [one.batch for one in waiting], now_ms)
    for one, result in zip(waiting, results, strict=True):
        one.result = result
