"""django-q2's brokers, one module each: a process imports only its own.

From both, a cluster that is too old for the database takes no tasks (`lib.schema`).
"""

from __future__ import annotations

import time

IDLE_S = 1.0


def nothing() -> None:
    """The tasks are left to newer clusters. The supervisor stops this one soon."""
    time.sleep(IDLE_S)
