"""Two at once, on threads and database connections of their own."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

from django.db import connection


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Start all calls at the same moment; what each returned or raised, in the order given."""
    outcomes: list[Any] = [None] * len(calls)
    start = threading.Barrier(len(calls), timeout=10)

    def one(index: int, call: Callable[[], Any]) -> None:
        try:
            start.wait()
            outcomes[index] = call()
        except Exception as error:
            outcomes[index] = error
        finally:
            connection.close()

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return outcomes


def all_read_before_any_writes(monkeypatch: Any, where: str, readers: int) -> None:
    """Make the function at `where` return to its callers only when `readers` of them have read."""
    module, _, name = where.rpartition(".")
    read = getattr(importlib.import_module(module), name)
    met = threading.Barrier(readers, timeout=10)

    def held(*args: Any, **kwargs: Any) -> Any:
        found = read(*args, **kwargs)
        met.wait()
        return found

    monkeypatch.setattr(where, held)
