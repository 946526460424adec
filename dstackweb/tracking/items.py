"""`track`: the items of an iterable, counted as they are worked on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from operator import length_hint
from typing import TypeVar

from dstackweb.tracking.current import current_sender
from dstackweb.tracking.entries import plain_text
from dstackweb.tracking.sender import Sender

T = TypeVar("T")

Counts = tuple[dict[str, int], int, float]


def track(
    iterable: Iterable[T], total: int | None = None, *, prefix: str = "items", group: str | None = None
) -> Iterator[T]:
    """Iterate ended `iterable`, and report how many items are done, running and waiting.

    `total`: number of items, for an iterable without a length. `prefix` names the bar; `group` is a part of it and
    defaults to the prefix. An item is done when the next one is requested. When the loop is left early, the remaining
    items are released; when the iterable raises, one item has failed. Loops with the same prefix and group are counted
    together, within a process and across processes.
    """
    if current_sender() is None:
        return iter(iterable)
    return _walk(iterable, _Progress(_length(iterable, total)), (plain_text(prefix), plain_text(group or prefix)))


def _length(iterable: Iterable[object], total: int | None) -> int:
    """Expected number of items, 0 when unknown. Exceptions of a program's own `__len__` are ignored."""
    try:
        return int(length_hint(iterable) if total is None else total)
    except Exception:
        return 0


class _Progress:
    """One loop. The iterating thread writes it; the sender's thread reads `done` before `started`."""

    __slots__ = ("done", "failed", "released", "seconds", "started", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.started = self.done = self.failed = self.released = 0
        self.seconds = 0.0


def _walk(iterable: Iterable[T], progress: _Progress, place: tuple[str, str]) -> Iterator[T]:
    sender = current_sender()  # of the process that starts the loop
    if sender is None:
        yield from iterable
        return
    pid, clock = os.getpid(), time.perf_counter
    tally = _loop_counts(sender, place)
    tally.add(progress)
    try:
        for item in iterable:
            progress.started += 1
            began = clock()
            yield item
            progress.seconds += clock() - began
            progress.done += 1
        progress.total = progress.started
    except GeneratorExit:  # the loop was left
        progress.released = max(progress.total, progress.started) - progress.done
        raise
    except BaseException:  # the iterable raised
        progress.failed = 1
        progress.released = max(progress.total - progress.started - 1, 0)
        raise
    finally:
        if pid == os.getpid():
            tally.remove(progress)


class _LoopCounts:
    """All loops of this process with one prefix and group."""

    def __init__(self, sender: Sender, place: tuple[str, str]) -> None:
        self._sender, self._place = sender, place
        # The sender's own lock: the garbage collector may end a loop during a report, and two locks could deadlock.
        self._lock = sender.lock
        self._live: list[_Progress] = []
        self._ended = _Progress(0)
        self._last_reported: Counts | None = None

    def add(self, progress: _Progress) -> None:
        with self._lock:
            self._live.append(progress)
        self._sender.add_source(self.report)

    def remove(self, progress: _Progress) -> None:
        """Add a loop that has ended to the sums."""
        ended = self._ended
        with self._lock:
            self._live.remove(progress)
            ended.done += progress.done
            ended.failed += progress.failed
            ended.released += progress.released
            ended.seconds += progress.seconds
        if self._sender.spool is not None:  # before this process is terminated
            self.report()

    def report(self) -> bool:
        """Report the counts if they changed. Returns False once all loops have ended and were reported.

        Holds the lock: of two readings, the older must not be reported last.
        """
        with self._lock:
            ended = self._ended
            done, failed, released, seconds = ended.done, ended.failed, ended.released, ended.seconds
            running = waiting = 0
            for one in list(self._live):
                finished, started = one.done, one.started
                done += finished
                running += started - finished
                waiting += max(one.total - started, 0)
                seconds += one.seconds
            states = {
                "memory": done, "erred": failed, "released": released, "processing": running, "waiting": waiting,
            }  # fmt: skip
            counts = (states, done, seconds)
            if counts == self._last_reported:
                return bool(self._live)
            if self._sender.count(*self._place, states, done, seconds):
                self._last_reported = counts
            return True


_all_loop_counts: dict[tuple[str, tuple[str, str]], _LoopCounts] = {}
"""By reporter and (prefix, group): a forked child finds none of its parent's."""


def _loop_counts(sender: Sender, place: tuple[str, str]) -> _LoopCounts:
    with sender.lock:
        return _all_loop_counts.setdefault((sender.reporter, place), _LoopCounts(sender, place))
