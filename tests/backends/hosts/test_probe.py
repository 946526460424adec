"""What a machine finds out about itself, with the real Python module over a small C library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstackweb.runner import machine as probing
from standins.nvml import FakeGpu, Nvml

OURS = 'lambda pid: pid in {int(word) for word in os.environ.get("OURS", "").split()}'
PROBE = f"""
import json, os
from dataclasses import asdict
from dstackweb.runner.machine import probe_gpus
gpus, error = probe_gpus({OURS})
print(json.dumps({{"gpus": [asdict(gpu) for gpu in gpus], "error": error}}))
"""


@pytest.fixture
def nvml(tmp_path: Path) -> Nvml:
    return Nvml(tmp_path)


def snapshot(env: dict[str, str]) -> dict[str, Any]:
    """What a new process sees: the library is looked up once in a process's life."""
    done = subprocess.run([sys.executable, "-c", PROBE], env=env, check=True, capture_output=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_gpus_are_found_with_their_uuid_name_and_memory(nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a"), FakeGpu("GPU-b", name="NVIDIA L4", memory_mib=23034))
    assert snapshot(nvml.env()) == {
        "gpus": [
            {"uuid": "GPU-a", "index": 0, "name": "NVIDIA A100-SXM4-40GB", "memory_mib": 40960, "stranger": None},
            {"uuid": "GPU-b", "index": 1, "name": "NVIDIA L4", "memory_mib": 23034, "stranger": None},
        ],
        "error": "",
    }


def test_a_process_without_a_job_is_reported_as_foreign(nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a", pids=[os.getpid()]), FakeGpu("GPU-b"))
    first, second = snapshot(nvml.env())["gpus"]
    user = subprocess.check_output(["id", "-un"], text=True).strip()
    assert first["stranger"] == {"pid": os.getpid(), "user": user}
    assert second["stranger"] is None


def test_a_process_of_another_pid_namespace_is_foreign_and_unnamed(nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a", pids=[2**22 + 1]))
    assert snapshot(nvml.env())["gpus"][0]["stranger"] == {"pid": 2**22 + 1, "user": None}


def test_a_process_of_a_job_is_not_foreign_but_one_without_a_job_is(nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a", pids=[41]), FakeGpu("GPU-b", pids=[41, 42]))
    first, second = snapshot(nvml.env(OURS="41"))["gpus"]
    assert first["stranger"] is None
    assert second["stranger"]["pid"] == 42


def test_a_lost_gpu_is_left_out_and_named_while_the_others_stay(nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a", status=15), FakeGpu("GPU-b"))
    seen = snapshot(nvml.env())
    assert [gpu["uuid"] for gpu in seen["gpus"]] == ["GPU-b"]
    assert seen["error"] == "GPU 0: GPU is lost"


def test_a_driver_that_does_not_answer_is_an_error_and_no_crash(nvml: Nvml) -> None:
    assert snapshot(nvml.env(NVML_STUB_BROKEN="999")) == {"gpus": [], "error": "NVML: Unknown Error"}


def test_a_machine_without_the_library_has_no_gpus_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    assert snapshot(env) == {"gpus": [], "error": ""}


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup to fill, on a machine with 16 CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    cgroups = tmp_path / "cgroup"
    (cgroups / "user.slice/server.service").mkdir(parents=True)
    mounted = f"30 23 0:26 / {cgroups} rw - cgroup2 cgroup2 rw"
    write(tmp_path / "proc/self", cgroup="0::/user.slice/server.service", mountinfo=mounted)
    return tmp_path / "proc", cgroups


def test_a_quota_of_a_cgroup_above_limits_the_cpus(machine: tuple[Path, Path]) -> None:
    proc, cgroups = machine
    write(cgroups / "user.slice", cpu__max="350000 100000")
    write(cgroups / "user.slice/server.service", cpu__max="max 100000")
    assert probing.usable_cpus(str(proc)) == 3


def test_half_a_cpu_still_counts_as_one(machine: tuple[Path, Path]) -> None:
    proc, cgroups = machine
    write(cgroups, cpu__max="50000 100000")
    assert probing.usable_cpus(str(proc)) == 1


def test_the_limits_of_older_cgroups_count_too(machine: tuple[Path, Path]) -> None:
    proc, cgroups = machine
    mounted = [
        f"{number} 23 0:26 /docker/abc {cgroups / name} rw - cgroup cgroup rw,{name}"
        for number, name in ((30, "memory"), (31, "cpu,cpuacct"))
    ]
    write(proc / "self", cgroup="4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc", mountinfo="\n".join(mounted))
    write(cgroups / "cpu,cpuacct", cpu__cfs_quota_us="400000", cpu__cfs_period_us="100000")
    write(cgroups / "memory", memory__limit_in_bytes=str(8 * 1024**3))
    assert probing.usable_cpus(str(proc)) == 4
    assert probing.usable_memory_mib(64 * 1024**3, str(proc)) == 8192 - 512


def test_without_limits_the_whole_machine_is_offered(machine: tuple[Path, Path]) -> None:
    proc, cgroups = machine
    write(cgroups, cpu__max="max 100000", memory__max="max")
    assert probing.usable_cpus(str(proc)) == 16


@pytest.mark.parametrize(("total_gib", "usable_mib"), [(4, 4096 - 512), (64, 65536 - 3277)])
def test_memory_is_reserved_for_the_system(machine: tuple[Path, Path], total_gib: int, usable_mib: int) -> None:
    assert probing.usable_memory_mib(total_gib * 1024**3, str(machine[0])) == usable_mib


def test_a_memory_limit_of_the_own_cgroup_counts(machine: tuple[Path, Path]) -> None:
    proc, cgroups = machine
    write(cgroups / "user.slice/server.service", memory__max=str(2 * 1024**3))
    assert probing.usable_memory_mib(64 * 1024**3, str(proc)) == 2048 - 512


def test_the_probe_of_this_machine_works() -> None:
    seen = probing.probe(lambda _pid: True)
    assert seen.cpus >= 1
    assert seen.memory_mib > 0
    assert seen.boot_id
