"""`track`: the items of an iterable, counted as they are worked on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from operator import length_hint
from typing import TypeVar

from dstackweb.tracking.current import current
from dstackweb.tracking.entries import plain
from dstackweb.tracking.sender import Sender

T = TypeVar("T")

Label = tuple[dict[str, int], int, float]


def track(
    iterable: Iterable[T], total: int | None = None, *, prefix: str = "items", group: str | None = None
) -> Iterator[T]:
    """Iterate over `iterable`, and report its items: done, the one being worked on, and those that wait.

    `total`: how many there will be, for an iterable that does not know its length. `prefix` names the bar; `group`, a
    part of it, is the prefix where it is not given. An item is done when the next one is asked for; the rest is
    released when the loop is left early, and an item that the iterable could not give (it raised) has failed. Loops
    with one prefix and group are counted together, in one process and in several.
    """
    if current() is None:
        return iter(iterable)
    return _walk(iterable, _Progress(_length(iterable, total)), (plain(prefix), plain(group or prefix)))


def _length(iterable: Iterable[object], total: int | None) -> int:
    """How many items are known to come; 0 where nobody knows. What a program's own `len` raises is not raised here."""
    try:
        return int(length_hint(iterable) if total is None else total)
    except Exception:
        return 0


class _Progress:
    """One loop. Written by the thread that iterates, read by the sender's: `done` before `started`."""

    __slots__ = ("done", "failed", "released", "seconds", "started", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.started = self.done = self.failed = self.released = 0
        self.seconds = 0.0


def _walk(iterable: Iterable[T], progress: _Progress, place: tuple[str, str]) -> Iterator[T]:
    sender = current()  # of the process that begins the loop
    if sender is None:
        yield from iterable
        return
    pid, clock = os.getpid(), time.perf_counter
    tally = _tally(sender, place)
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
    except BaseException:  # the iterable has raised
        progress.failed = 1
        progress.released = max(progress.total - progress.started - 1, 0)
        raise
    finally:
        if pid == os.getpid():
            tally.remove(progress)


class _Tally:
    """All loops of this process with one prefix and group."""

    def __init__(self, sender: Sender, place: tuple[str, str]) -> None:
        self._sender, self._place = sender, place
        # The sender's: the garbage collector may end a loop amid a report, and two locks would be taken in two orders.
        self._lock = sender.lock
        self._live: list[_Progress] = []
        self._over = _Progress(0)
        self._told: Label | None = None

    def add(self, progress: _Progress) -> None:
        with self._lock:
            self._live.append(progress)
        self._sender.ask(self.tell)

    def remove(self, progress: _Progress) -> None:
        """Count a loop that is over among those that were."""
        over = self._over
        with self._lock:
            self._live.remove(progress)
            over.done += progress.done
            over.failed += progress.failed
            over.released += progress.released
            over.seconds += progress.seconds
        if self._sender.journal is not None:  # before this process is ended
            self.tell()

    def tell(self) -> bool:
        """Tell the counts, if they are other than those told last; false when all loops are over and were told.

        Within the lock: of two looks, the older must not be told last.
        """
        with self._lock:
            over = self._over
            done, failed, released, seconds = over.done, over.failed, over.released, over.seconds
            running = ahead = 0
            for one in list(self._live):
                finished, started = one.done, one.started
                done += finished
                running += started - finished
                ahead += max(one.total - started, 0)
                seconds += one.seconds
            states = {
                "memory": done, "erred": failed, "released": released, "processing": running, "waiting": ahead,
            }  # fmt: skip
            told = (states, done, seconds)
            if told == self._told:
                return bool(self._live)
            if self._sender.count(*self._place, states, done, seconds):
                self._told = told
            return True


_tallies: dict[tuple[str, tuple[str, str]], _Tally] = {}
"""By reporter and place: a fork's child finds none of its parent's."""


def _tally(sender: Sender, place: tuple[str, str]) -> _Tally:
    with sender.lock:
        return _tallies.setdefault((sender.reporter, place), _Tally(sender, place))
