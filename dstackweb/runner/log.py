"""Log messages of the runner and the agent."""

from __future__ import annotations

import contextlib
import sys
import time


def say(text: str) -> None:
    """Write a line to runner.log, if the disk has room."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        sys.stderr.flush()
