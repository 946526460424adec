"""Rows that many tests begin with: made once, then copied."""

from __future__ import annotations

import copy
import functools
import sqlite3
import time
from collections.abc import Callable
from typing import TypeVar

from django.db import connection, transaction

T = TypeVar("T")
FRESH_S = 20.0
"""So long what is there counts as new: hosts are silent after 30 s."""


def once(build: Callable[[], T]) -> Callable[[], T]:
    """`build()`, whose rows replace all that the database has; they are kept for the tests of the next 20 s."""
    kept: sqlite3.Connection | None = None
    made_at, result = 0.0, None

    @functools.wraps(build)
    def wrapped() -> T:
        nonlocal kept, made_at, result
        if connection.vendor != "sqlite":
            with transaction.atomic():
                return build()
        if kept is None or time.monotonic() - made_at > FRESH_S:
            made_at = time.monotonic()
            with transaction.atomic():
                result = build()
            kept = sqlite3.connect(":memory:")
            connection.connection.backup(kept)
        else:
            connection.ensure_connection()
            kept.backup(connection.connection)
        return copy.deepcopy(result)

    return wrapped
