from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from standins.programs import NEEDS, is_installed
from standins.slurm import Slurm


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """A cluster of two nodes, to which Slurm's commands of this process lead."""
    if os.geteuid() or not is_installed("slurm"):
        pytest.skip(f"needs root and Debian's {NEEDS['slurm'].packages}")
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = Slurm(Path(folder))
        try:
            cluster.start()
            monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
            yield cluster
        finally:
            cluster.stop()
