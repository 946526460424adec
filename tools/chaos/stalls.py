"""How long nothing went on after each fault, and the table of it."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence

import httpx

from tools.chaos.faults import Fault
from tools.chaos.workload import now_s

HORIZON_S = 10.0
"""What stands still that long after a fault's end may be its doing."""


class Prober:
    """Asks for the API twice a second, and remembers when it answered."""

    def __init__(self, url: str) -> None:
        self.answered: list[float] = []
        self._url, self._over = url, threading.Event()
        self._thread = threading.Thread(target=self._probe, daemon=True)
        self._thread.start()

    def _probe(self) -> None:
        while not self._over.wait(0.5):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self._url}/readyz", timeout=2).is_success:
                    self.answered.append(now_s())

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def longest_gap(times: Sequence[float], begin: float, end: float, idle: Iterable[float] = ()) -> float:
    """The longest time without any of `times` (ascending) that reaches into `begin` to `end`, counted from `begin`.

    A gap with one of `idle` in it doesn't count: then there was nothing to wait for.
    """
    longest = 0.0
    for before, after in zip([begin, *times], [*times, end], strict=True):
        first, last = max(before, begin), after
        if last > begin and first < end and not any(first <= at <= last for at in idle):
            longest = max(longest, last - first)
    return longest


def table(
    faults: Sequence[Fault], starts: Sequence[float], answers: Sequence[float], idle: Sequence[float], over: float
) -> str:
    """Each kind of fault: how often, and in seconds the longest without a start of a run and without an API.

    `idle`: moments when no run waited. `over`: when all faults had been repaired and the queue was empty.
    """
    kinds: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        kinds[fault.kind].append(fault)
    lines = [f"{'fault':32}{'times':>8}{'no start, s':>14}{'no API, s':>12}"]
    for kind, found in sorted(kinds.items()):
        stall = max(_after(fault, starts, idle, over) for fault in found)
        away = max(_after(fault, answers, (), over) for fault in found)
        lines.append(f"{kind:32}{len(found):>8}{stall:>14.1f}{away:>12.1f}")
    return "\n".join(lines)


def _after(fault: Fault, times: Sequence[float], idle: Sequence[float], over: float) -> float:
    end = min(over, fault.until + HORIZON_S)
    return longest_gap(times, fault.began, max(end, fault.began), idle)
