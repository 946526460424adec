"""What NVML says of a real GPU: `make test-gpu`. Prints what a poll costs."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from dstackweb.runner.nvml import Sample, read
from tests.gpu.conftest import IDLE
from tests.gpu.load import MEMORY_MIB

Load = Callable[..., AbstractContextManager[int]]
Look = Callable[[], Sample]
POLLS = 20
SMI = [
    "nvidia-smi",
    "--query-gpu=uuid,index,name,memory.total,utilization.gpu,enforced.power.limit",
    "--format=csv,noheader,nounits",
]


def several(look: Look) -> list[int]:
    """Utilization, five times within two seconds."""
    seen = []
    for _ in range(5):
        seen.append(look().utilization)
        time.sleep(0.4)
    assert None not in seen, "this GPU doesn't report its utilization"
    return [one for one in seen if one is not None]


def test_a_gpu_reports_its_model_and_its_activity(gpu: Sample) -> None:
    assert gpu.uuid.startswith("GPU-")
    assert gpu.name
    assert gpu.memory_mib > 0
    assert gpu.utilization is not None
    assert gpu.temperature_c is None or 0 < gpu.temperature_c < 120


def test_real_load_is_seen_as_load_and_idle_as_idle(look: Look, load: Load) -> None:
    assert max(several(look)) <= IDLE
    with load():
        assert min(several(look)) >= 90
    assert max(several(look)) <= IDLE


def test_half_the_time_is_seen_as_about_half_at_each_look(look: Look, load: Load) -> None:
    with load(50):
        assert all(35 <= one <= 65 for one in several(look))


def test_allocated_memory_is_reported(gpu: Sample, look: Look, load: Load) -> None:
    with load():
        used = look().memory_used_mib
    assert used is not None
    assert gpu.memory_used_mib is not None
    assert used - gpu.memory_used_mib >= MEMORY_MIB


def test_computing_processes_are_listed(look: Look, load: Load) -> None:
    with load() as pid:
        processes = look().processes
    if pid not in [one["pid"] for one in processes]:
        pytest.skip(f"NVML numbers processes otherwise than this container: {processes}")
    (mine,) = [one for one in processes if one["pid"] == pid]
    assert mine["user"]
    assert mine["memory_mib"] is None or mine["memory_mib"] >= MEMORY_MIB


def test_the_values_are_those_of_nvidia_smi(gpu: Sample, look: Look, load: Load) -> None:
    if not shutil.which("nvidia-smi"):
        pytest.skip("needs nvidia-smi")
    with load():
        rows = subprocess.run(SMI, capture_output=True, check=True, text=True).stdout.splitlines()
        seen = look()
    (row,) = [line.split(", ") for line in rows if line.startswith(gpu.uuid)]
    assert row[1:4] == [str(seen.index), seen.name, str(seen.memory_mib)]
    assert float(row[4]) >= 90
    assert seen.power_limit_w is None or round(float(row[5])) == seen.power_limit_w


def test_what_a_poll_costs(gpu: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    count = len(read().samples)
    cpu = time.process_time()
    polls = [read().took_ms for _ in range(POLLS)]
    cpu = (time.process_time() - cpu) / POLLS * 1000
    lines = [f"{gpu.name}, {count} GPUs: a poll takes {statistics.median(polls):.1f} ms, {cpu:.1f} ms of CPU"]
    if shutil.which("nvidia-smi"):
        times = []
        for _ in range(5):
            began = time.perf_counter()
            subprocess.run(SMI, capture_output=True, check=True)
            times.append((time.perf_counter() - began) * 1000)
        lines.append(f"nvidia-smi for the same: {statistics.median(times):.1f} ms")
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert statistics.median(polls) < 5000
