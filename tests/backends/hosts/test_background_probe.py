"""Looking at a machine whose driver may hang."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

from dstackweb.runner.machine import BackgroundProbe, GpuProbe, Probe
from tests.support import eventually

SEEN = Probe(8, 16000, (GpuProbe("GPU-a", 0, "NVIDIA L4", 23034),), "boot")


def test_the_last_probe_is_available_at_once_and_refreshed() -> None:
    cpus: Iterator[int] = count(1)
    background_probe = BackgroundProbe(lambda: Probe(next(cpus), 1000, (), "boot"), every_s=0.01)
    eventually(lambda: (seen := background_probe.current()) is not None and seen.cpus > 2)


def test_a_driver_that_hangs_at_the_first_probe_yields_a_machine_without_gpus() -> None:
    hangs = threading.Event()

    def look() -> Probe:
        hangs.wait()
        return SEEN

    assert BackgroundProbe(look).current() is None
    background_probe = BackgroundProbe(look, every_s=60, hung_s=0)
    seen = eventually(background_probe.current)
    assert seen is not None
    assert (seen.gpus, seen.cpus > 0) == ((), True)
    assert "does not answer" in seen.error
    hangs.set()
    eventually(lambda: background_probe.current() == SEEN)


def test_a_driver_that_hangs_later_leaves_the_gpus_as_last_seen() -> None:
    calls, hangs = count(), threading.Event()

    def look() -> Probe:
        if next(calls):
            hangs.wait()
        return SEEN

    background_probe = BackgroundProbe(look, every_s=0.01, hung_s=0.05)
    found = eventually(lambda: (seen := background_probe.current()) is not None and seen.error and seen)
    assert found
    assert found.gpus == SEEN.gpus
    hangs.set()
