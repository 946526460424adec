"""The conformance suite on a real Slurm of two nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dstackweb.backends import registry, services
from dstackweb.backends.contract import Cloud, InstanceOrder
from dstackweb.backends.slurm import commands
from standins.slurm import Slurm
from tests.backends.contract.engine import Engine
from tests.backends.contract.suite import CloudContract

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("slurm")]

DEAF = """#!/bin/sh
PATH="{path}" "$(basename "$0")" "$@" >/dev/null 2>&1
echo "$(basename "$0"): error: Unable to contact slurm controller (connect failure)" >&2
exit 1
"""


class SlurmEngine(Engine):
    region = "main"
    instance_type = "cpu"

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.backend, _is_new = services.put("cluster", "slurm", {"projects": ["main"], "partitions": ["main"]})

    def driver(self) -> Cloud:
        return registry.cloud(self.backend)

    def started(self) -> int:
        reasons = self.slurm.command("squeue", "--noheader", "--states=all", "--format=%r").split()
        return len([why for why in reasons if why != "BadConstraints"])  # Slurm's list has those it refused

    def end(self, cloud_id: str) -> None:
        self.slurm.command("scancel", commands.number(cloud_id))

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        self.slurm.stop_controller()
        yield
        self.slurm.start_controller()

    @contextmanager
    def losing_answers(self) -> Iterator[None]:
        """A connection that breaks once the command has reached the controller."""
        path = os.environ["PATH"]
        for name in ("sbatch", "scancel"):
            (self.folder / name).write_text(DEAF.replace("{path}", path))
            (self.folder / name).chmod(0o755)
        os.environ["PATH"] = f"{self.folder}:{path}"
        yield
        os.environ["PATH"] = path

    def refused(self) -> InstanceOrder:
        return self.order(instance_type="gpu:a100", gpu_count=9)


class TestContract(CloudContract):
    @pytest.fixture
    def engine(self, slurm: Slurm, tmp_path: Path, db: Any) -> SlurmEngine:
        return SlurmEngine(slurm, tmp_path)
