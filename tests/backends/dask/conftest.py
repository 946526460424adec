from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from standins.dask import Dask


@pytest.fixture(scope="module")
def dask() -> Iterator[Dask]:
    """A cluster of two workers, for a module's tests."""
    with tempfile.TemporaryDirectory(prefix="dask-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        cluster = Dask(Path(folder))
        try:
            yield cluster.start()
        finally:
            cluster.stop()
