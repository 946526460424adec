from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from standins.programs import require
from standins.slurm import Slurm


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """A cluster of two nodes, to which Slurm's commands of this process lead."""
    require("root", "slurm")
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = Slurm(Path(folder))
        try:
            cluster.start()
            monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
            yield cluster
        finally:
            cluster.stop()
