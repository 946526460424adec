"""What the runner and the agent have to say for themselves."""

from __future__ import annotations

import contextlib
import sys
import time


def say(text: str) -> None:
    """A line in runner.log, if there is room for it."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        sys.stderr.flush()
