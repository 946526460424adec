"""The lock that a server holds while it sets up a database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from dstackweb.lib.process import try_lock
from dstackweb.lib.schema import LOCK


@contextmanager
def set_up_elsewhere(url: str) -> Iterator[None]:
    """As if another server set up this database meanwhile."""
    if url.startswith("sqlite:///"):
        lock = try_lock(Path(f"{url.removeprefix('sqlite:///')}.setup-lock"))
        assert lock is not None
        with lock:
            yield
    else:
        with psycopg.connect(url.partition("?")[0]) as other:
            other.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
            yield
