from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from standins.ray import Ray


@pytest.fixture(scope="session")
def ray() -> Iterator[Ray]:
    """One cluster for all tests, which one process runs (the group `ray`)."""
    if Ray.missing():
        pytest.skip("needs requirements-ray.txt")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = Ray(Path(folder))
        try:
            yield cluster.start()
        finally:
            cluster.stop()
