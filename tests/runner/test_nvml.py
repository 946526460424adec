"""Reading a machine's GPUs by NVML, for which a small C library stands in."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstackweb.runner import nvml as looking
from dstackweb.runner.machine import probe_gpus
from dstackweb.runner.nvml import Sample, Snapshot, read
from standins.nvml import FakeGpu, Nvml, build

BUSY = FakeGpu("GPU-a", util=93, mem=30000, power=350, limit=400, temp=61, throttle=4)
READ = """
import json
from dataclasses import asdict
from dstackweb.runner.nvml import read
print(json.dumps(asdict(read())))
"""


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvml]:
    """GPUs in this very process."""
    monkeypatch.setattr(looking, "GPM_S", 0)
    stub = Nvml(tmp_path)
    with stub.here():
        yield stub


def snapshot(env: dict[str, str]) -> dict[str, Any]:
    """What a new process sees."""
    done = subprocess.run([sys.executable, "-c", READ], env=env, check=True, capture_output=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_all_values_of_a_gpu_are_read(nvml: Nvml) -> None:
    nvml.show(replace(BUSY, pids=[f"{os.getpid()}:2048"]))
    seen = read()
    process = {"pid": os.getpid(), "user": getpass.getuser(), "memory_mib": 2048}
    assert seen.samples == (Sample("GPU-a", 0, "NVIDIA A100-SXM4-40GB", 40960, 93, 30000, 350, 400, 61, 4, (process,)),)
    assert (seen.library, seen.error) == (True, "")
    assert seen.took_ms > 0


def test_an_unsupported_value_is_unknown_and_no_error(nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a"))
    seen = read()
    assert seen.samples == (Sample("GPU-a", 0, "NVIDIA A100-SXM4-40GB", 40960, memory_used_mib=0),)
    assert seen.error == ""


def test_a_failing_value_is_unknown_and_reported_and_the_others_are_read(nvml: Nvml) -> None:
    nvml.show(replace(BUSY, util="!999"))
    seen = read()
    assert seen.samples[0].utilization is None
    assert seen.samples[0].power_w == 350
    assert seen.error == "GPU 0: utilization: Unknown Error"


def test_numbers_that_no_gpu_has_are_unknown_and_named(nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a", util=101, power=40_000, limit=400, temp=2**31 - 1, throttle=2**63 - 1))
    seen = read()
    odd = seen.samples[0]
    assert (odd.utilization, odd.power_w, odd.power_limit_w, odd.temperature_c, odd.throttle) == (
        None, None, 400, None, None,
    )  # fmt: skip
    values = ("utilization", "temperature", "clocks", "power")
    assert seen.error == "; ".join(f"GPU 0: {value}: value out of range" for value in values)


@pytest.mark.parametrize("used_mib", [(2**64 - 2**20) // 2**20, 40961])
def test_more_memory_in_use_than_the_gpu_has_is_unknown_and_the_rest_is_read(nvml: Nvml, used_mib: int) -> None:
    nvml.show(replace(BUSY, mem=used_mib), FakeGpu("GPU-b", util=5))
    seen = read()
    assert [(gpu.uuid, gpu.memory_used_mib, gpu.power_w) for gpu in seen.samples] == [
        ("GPU-a", None, 350),
        ("GPU-b", 0, None),
    ]
    assert seen.error == "GPU 0: memory: value out of range"


def test_a_gpu_of_an_impossible_size_does_not_count_and_the_others_do(nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a", memory_mib=2**42), FakeGpu("GPU-b"))
    seen = read()
    assert [gpu.uuid for gpu in seen.samples] == ["GPU-b"]
    assert seen.error == "GPU 0: memory: value out of range"


def test_a_process_with_impossible_numbers_is_listed_without_them_or_left_out(nvml: Nvml) -> None:
    nvml.show(replace(BUSY, pids=[f"41:{2**43}", 2**31]))
    seen = read()
    assert [(process["pid"], process["memory_mib"]) for process in seen.samples[0].processes] == [(41, None)]


def test_a_process_of_unknown_memory_and_user_is_listed_without_them(nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a", pids=[2**22 + 1]))
    assert read().samples[0].processes == ({"pid": 2**22 + 1, "user": None, "memory_mib": None},)


def test_a_gpu_that_is_lost_while_it_is_watched_is_an_error_and_no_reading(nvml: Nvml) -> None:
    gpus = replace(BUSY, status="0:0,30:15"), FakeGpu("GPU-b", util=5)
    nvml.show(*gpus, now=29.9)
    assert [one.uuid for one in read().samples] == ["GPU-a", "GPU-b"]
    nvml.show(*gpus, now=30)
    seen = read()
    assert [(one.uuid, one.utilization) for one in seen.samples] == [("GPU-b", 5)]
    assert seen.error == "GPU 0: GPU is lost"


@pytest.mark.parametrize(("answer", "error"), [("!9", "Driver Not Loaded"), ("!18", "Driver/library version mismatch")])
def test_a_driver_that_is_replaced_is_an_error_until_it_is_there_again(nvml: Nvml, answer: str, error: str) -> None:
    steps = f"0:0,10:{answer[1:]},20:0"
    nvml.show(BUSY, driver=steps, now=15)
    assert replace(read(), took_ms=0) == Snapshot((), True, f"NVML: {error}", 0)
    nvml.show(BUSY, driver=steps, now=25)
    assert read().samples[0].utilization == 93


def test_after_a_driver_update_its_new_library_is_used(tmp_path: Path) -> None:
    stub = Nvml(tmp_path, old=True)
    stub.show(BUSY, driver=18)
    twice = f"""
import sys
{READ}
sys.stdout.flush()
sys.stdin.readline()
print(json.dumps(asdict(read())))
"""
    with subprocess.Popen(
        [sys.executable, "-c", twice], env=stub.env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert "version mismatch" in json.loads(process.stdout.readline())["error"]
        stub.library.unlink()
        build(stub.library)
        stub.show(BUSY)
        process.stdin.write("\n")
        process.stdin.flush()
        (reading,) = json.loads(process.stdout.readline())["samples"]
    assert reading["throttle"] == 4  # the older one doesn't report it


def test_a_gpu_with_unknown_mig_mode_is_an_error(nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a", util=1, mig="!999"), FakeGpu("GPU-b", util=2))
    seen = read()
    assert [one.uuid for one in seen.samples] == ["GPU-b"]
    assert seen.error == "GPU 0: Unknown Error"


def test_the_fake_load_follows_its_schedule(nvml: Nvml) -> None:
    gpu = FakeGpu("GPU-a", util="0:95,30:0,40:-")
    seen = []
    for now in (0, 29, 39.9, 45, 61):
        nvml.show(gpu, now=now, loop=60)
        seen.append(read().samples[0].utilization)
    assert seen == [95, 95, 0, None, 95]


@pytest.mark.parametrize(("now", "percent"), [(19.9, 0), (24.9, 48), (29.9, 96), (30.9, 86)])
def test_utilization_is_the_mean_of_what_the_driver_kept_of_the_last_ten_seconds(
    nvml: Nvml, now: float, percent: int
) -> None:
    """Not what a GPU does at the moment of the look, which may be in step with what it computes."""
    nvml.show(FakeGpu("GPU-a", util="0:0,20:96,30:0"), now=now)
    assert read().samples[0].utilization == percent


def test_moments_that_the_driver_could_not_count_are_left_out_of_the_mean(nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a", util="0:0,21:!999,29:80"), now=29.95)
    assert read().samples[0].utilization == 40


def test_a_driver_that_keeps_nothing_is_asked_for_the_newest_moment(tmp_path: Path) -> None:
    stub = Nvml(tmp_path, old=True)
    stub.show(FakeGpu("GPU-a", util="0:0,20:96"), now=21)
    env = stub.env()
    seen = subprocess.run([sys.executable, "-c", READ], env=env, capture_output=True, text=True, check=True).stdout
    assert [one["utilization"] for one in json.loads(seen)["samples"]] == [96]


def test_mig_devices_are_read_in_the_place_of_the_gpu_that_they_are_parts_of(nvml: Nvml) -> None:
    nvml.show(
        FakeGpu("GPU-a", power=300, temp=50, throttle=1, gpm=1, util=99),
        FakeGpu(
            "MIG-1", name="NVIDIA H100 MIG 3g.40gb", memory_mib=40000, util=80, mem=1000, pids=[f"{2**22 + 7}:900"]
        ),
        FakeGpu("MIG-2", name="NVIDIA H100 MIG 1g.10gb", memory_mib=10000, util=0),
        FakeGpu("GPU-b", util=12),
    )
    first, second, third = read().samples
    assert (first.uuid, first.index, first.name, first.memory_mib) == ("MIG-1", 0, "NVIDIA H100 MIG 3g.40gb", 40000)
    assert (first.utilization, first.memory_used_mib, first.power_w) == (80, 1000, None)
    assert (first.temperature_c, first.throttle) == (50, 1)
    assert first.processes[0]["pid"] == 2**22 + 7
    assert (second.uuid, second.index, second.utilization) == ("MIG-2", 0, 0)
    assert (third.uuid, third.index, third.utilization) == ("GPU-b", 1, 12)


def test_without_performance_counters_a_mig_devices_utilization_is_unknown(nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a", util=99), FakeGpu("MIG-1", util=80))
    seen = read()
    assert [(one.uuid, one.utilization) for one in seen.samples] == [("MIG-1", None)]
    assert seen.error == ""


def test_a_counter_that_fails_leaves_the_utilization_unknown(nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a", gpm=1), FakeGpu("MIG-1", util="!999"), FakeGpu("MIG-2", util=7))
    assert [one.utilization for one in read().samples] == [None, 7]


def test_a_split_gpu_without_devices_is_none(nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a", util=99, mig=1), BUSY)
    assert [one.uuid for one in read().samples] == ["GPU-a"]
    assert read().samples[0].index == 1


def test_mig_devices_are_listed_as_gpus_of_their_own(nvml: Nvml) -> None:
    nvml.show(
        FakeGpu("GPU-a"), FakeGpu("MIG-1", memory_mib=10000, pids=[2**22 + 41]), FakeGpu("MIG-2", memory_mib=20000)
    )
    gpus, error = probe_gpus(lambda pid: False)
    assert [(gpu.uuid, gpu.memory_mib) for gpu in gpus] == [("MIG-1", 10000), ("MIG-2", 20000)]
    assert gpus[0].stranger == {"pid": 2**22 + 41, "user": None}
    assert error == ""


def test_an_old_driver_without_some_functions_is_no_error(tmp_path: Path) -> None:
    stub = Nvml(tmp_path, old=True)
    stub.show(replace(BUSY, pids=[2**22 + 41]))
    seen = snapshot(stub.env())
    assert seen["error"] == ""
    assert seen["samples"] == [
        {
            "uuid": "GPU-a", "index": 0, "name": "NVIDIA A100-SXM4-40GB", "memory_mib": 40960, "utilization": 93,
            "memory_used_mib": 30000, "power_w": 350, "power_limit_w": 400, "temperature_c": 61, "throttle": None,
            "processes": [],
        }
    ]  # fmt: skip


def test_a_machine_without_the_library_is_reported_as_such_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    seen = snapshot({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert (seen["samples"], seen["library"], seen["error"]) == ([], False, "")


def test_many_processes_on_one_gpu_are_all_listed(nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a", pids=[f"{2**22 + n}:{n}" for n in range(40, 0, -1)]))
    assert [one["memory_mib"] for one in read().samples[0].processes] == list(range(1, 41))
