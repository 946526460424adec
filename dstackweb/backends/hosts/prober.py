"""Looking at the machine again and again, beside the heartbeat: NVML may take seconds, or hang with a broken GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from dstackweb.backends.hosts.probe import Probe, boot_id, usable_cpus, usable_memory_mib

EVERY_S = 10.0
HUNG_S = 30.0


class Prober:
    """Calls `look` in a thread of its own, every `every_s` seconds; `current` never waits for it."""

    def __init__(self, look: Callable[[], Probe], *, every_s: float = EVERY_S, hung_s: float = HUNG_S) -> None:
        self._look, self._every_s, self._hung_s = look, every_s, hung_s
        self._latest: Probe | None = None
        self._began = time.monotonic()
        self._busy = True
        # A daemon: a hanging driver must not keep the process from ending.
        threading.Thread(target=self._run, name="prober", daemon=True).start()

    def current(self) -> Probe | None:
        """The last look; None before the first. A look that hangs is named in `error`, with the last GPUs known."""
        if not self._busy or time.monotonic() - self._began < self._hung_s:
            return self._latest
        known = self._latest or Probe(usable_cpus(), usable_memory_mib(), (), boot_id())
        return replace(known, error="NVML does not answer: the GPUs are shown as last seen")

    def _run(self) -> None:
        while True:
            self._began, self._busy = time.monotonic(), True
            self._latest = self._look()
            self._busy = False
            time.sleep(self._every_s)
