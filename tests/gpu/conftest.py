"""A real GPU that nobody uses, for tests of what NVML truly says. Without one they are left out, and say so."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dstackweb.runner.nvml import LOOK_BACK_S, Sample, read

IDLE = 5
"""Percent that an idle GPU may show."""
LOAD = Path(__file__).with_name("load.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("gpu")
    if config.option.markexpr == "gpu" and (trouble := without_gpu()):
        raise pytest.UsageError(f"make test-gpu {trouble}")


def without_gpu() -> str:
    """A sentence on a machine that has none."""
    look = read()
    why = look.error or ("NVML finds none" if look.library else "no NVML library")
    return "" if look.samples else f"needs a machine with an NVIDIA GPU; here: {why}"


@pytest.fixture
def gpu() -> Sample:
    """A whole GPU without any process, as it is read first."""
    if trouble := without_gpu():
        pytest.skip(trouble)
    for one in read().samples:
        if not one.processes and one.uuid.startswith("GPU-") and (one.utilization or 0) <= IDLE:
            return one
    pytest.skip("needs an NVIDIA GPU that nobody uses; all of this machine's are in use")


@pytest.fixture
def load(gpu: Sample) -> Callable[..., object]:
    """A context in which the GPU works."""

    @contextmanager
    def working(percent: int = 100) -> Iterator[int]:
        command = [sys.executable, str(LOAD), gpu.uuid, "120", str(percent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said == "busy\n", said
            try:
                time.sleep(LOOK_BACK_S + 1)  # the driver's clock counts: all that a reading is the mean of
                yield process.pid
            finally:
                process.terminate()
        time.sleep(LOOK_BACK_S + 1)  # until nothing of the load is in a reading any more

    return working


@pytest.fixture
def look(gpu: Sample) -> Callable[[], Sample]:
    """Reads that GPU again."""

    def again() -> Sample:
        return next(one for one in read().samples if one.uuid == gpu.uuid)

    return again
