"""Waiting that ends early: when a child ends, when somebody nudges (SIGUSR1), when somebody asks to end (SIGTERM)."""

from __future__ import annotations

import os
import select
import signal

NOTICED = (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ASKED_TO_END = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class Wake:
    """From its making on these signals do nothing but end the next wait."""

    def __init__(self) -> None:
        self._read_end, write_end = os.pipe()
        for end in (self._read_end, write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in NOTICED:
            signal.signal(number, lambda _number, _frame: None)

    def wait(self, seconds: float) -> set[int]:
        """Wait, at most so long; returns the signals that came since the last wait."""
        readable, _, _ = select.select([self._read_end], [], [], seconds)
        return set(os.read(self._read_end, 4096)) if readable else set()
