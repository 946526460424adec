"""A gate through which an engine's answers to orders pass, so that tests can do something between order and note."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Open, except within `closed()`."""

    def __init__(self) -> None:
        self._open, self._reached = threading.Event(), threading.Event()
        self._open.set()

    def pass_through(self) -> None:
        self._reached.set()
        self._open.wait(60)

    @contextmanager
    def closed(self) -> Iterator[threading.Event]:
        """Keep back all that comes. The event is set when something has come."""
        self._reached.clear()
        self._open.clear()
        try:
            yield self._reached
        finally:
            self._open.set()
