"""GPU samples that a runner sends on cloud instances: a real runner, and a small C library in the place of NVML."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstackweb.api.runner_schemas import SamplesIn
from dstackweb.runner import samples
from dstackweb.runner.client import Unreachable
from standins.nvml import CRASHES, HANGS, FakeGpu, Nvml
from tests.runner.conftest import Box, runs
from tests.support import eventually

MakeBox = Callable[..., Box]
WORK = "while [ ! -e enough ]; do sleep 0.02; done"
BUSY = FakeGpu(
    "GPU-b", util=93, mem=30000, power=350, limit=400, temp=61, throttle=4, pids=[f"{os.getpid()}:2048", 2**22 + 1]
)


@pytest.fixture
def nvml(open_home: Path) -> Nvml:
    folder = open_home / "nvml"
    folder.mkdir()
    return Nvml(folder)


@pytest.fixture
def on_gpus(box: MakeBox, nvml: Nvml) -> Callable[..., Box]:
    """Makes jobs on a machine with the stand-in."""

    def make(*commands: str, **spec: object) -> Box:
        job = box(*commands, **{"gpus": ["GPU-b"], "sample_every_s": 0.05} | spec)
        job.env = {"LD_LIBRARY_PATH": str(nvml.folder), "NVML_STUB": str(nvml.file)}
        return job

    return make


def finish(job: Box) -> None:
    (job.run_dir / "enough").touch()
    assert job.end(nudged=True)["exit_code"] == 0


def test_only_the_jobs_own_gpus_are_reported_with_all_their_values(on_gpus: MakeBox, nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a", util=5), BUSY)
    job = on_gpus("echo up", WORK)
    job.launch()
    eventually(lambda: len(job.api.samples) >= 2)
    finish(job)
    user = eventually(lambda: Path(f"/proc/{os.getpid()}").owner())
    assert job.api.samples[0]["gpus"] == [
        {
            "uuid": "GPU-b", "index": 1, "name": "NVIDIA A100-SXM4-40GB", "memory_mib": 40960, "memory_used_mib": 30000,
            "utilization": 93, "power_w": 350, "power_limit_w": 400, "temperature_c": 61, "throttle": 4,
            "processes": [
                {"pid": os.getpid(), "user": user, "memory_mib": 2048},
                {"pid": 2**22 + 1, "user": None, "memory_mib": None},
            ],
        }
    ]  # fmt: skip
    assert all(0 <= sample["age_s"] < 10 for sample in job.api.samples)


def test_a_job_whose_host_samples_its_gpus_sends_no_samples(on_gpus: MakeBox, nvml: Nvml) -> None:
    nvml.show(BUSY)
    job = on_gpus("sleep 0.3", sample_every_s=None)
    job.launch()
    job.end()
    assert job.api.count("samples") == 0


def test_samples_are_buffered_during_an_api_outage_and_keep_their_age(on_gpus: MakeBox, nvml: Nvml) -> None:
    nvml.show(BUSY)
    job = on_gpus("echo up", WORK)
    job.launch()
    job.wait_for("up")
    job.api.go_down()
    time.sleep(0.6)
    job.api.come_back()
    heard = len(job.api.samples)
    eventually(lambda: job.nudge() and len(job.api.samples) > heard + 5)
    assert max(sample["age_s"] for sample in job.api.samples[heard:]) > 0.4
    finish(job)


@pytest.mark.parametrize("answer", [404, 422, 500])
def test_an_api_that_refuses_samples_does_not_affect_the_job(on_gpus: MakeBox, nvml: Nvml, answer: int) -> None:
    nvml.show(BUSY)
    job = on_gpus("echo up", WORK)
    job.api.trouble = lambda what: answer if what == "samples" else None
    job.launch()
    job.wait_for("up")
    beats = job.api.count("heartbeat")
    eventually(lambda: job.api.count("heartbeat") > beats + 5)
    finish(job)
    assert ("refuses samples" in job.said()) == (answer != 500)


def test_a_lost_gpu_is_missing_and_no_zero(on_gpus: MakeBox, nvml: Nvml) -> None:
    nvml.show(FakeGpu("GPU-a", util=7), FakeGpu("GPU-b", status=15))
    job = on_gpus("echo up", WORK, gpus=["GPU-a", "GPU-b"])
    job.launch()
    eventually(lambda: len(job.api.samples) >= 2)
    finish(job)
    assert {gpu["uuid"] for sample in job.api.samples for gpu in sample["gpus"]} == {"GPU-a"}


def test_impossible_gpu_values_are_omitted_and_processes_are_capped_at_the_api_limit(
    on_gpus: MakeBox, nvml: Nvml
) -> None:
    nvml.show(replace(BUSY, power=40_000, temp=2000, throttle=2**62, pids=range(2**22 + 1, 2**22 + 81)))
    job = on_gpus("echo up", WORK)
    job.launch()
    eventually(lambda: job.api.samples)
    finish(job)
    found = job.api.samples[0]["gpus"][0]
    SamplesIn.model_validate({"samples": job.api.samples[:1]})
    assert (found["utilization"], found["power_w"], found["temperature_c"], found["throttle"]) == (93, None, None, None)
    assert len(found["processes"]) == 64


def test_a_machine_without_the_library_is_logged_once_and_sends_no_samples(box: MakeBox, open_home: Path) -> None:
    (open_home / "libnvidia-ml.so.1").write_text("not a library")
    job = box("echo up", WORK, gpus=["GPU-b"], sample_every_s=0.05)
    job.env = {"LD_LIBRARY_PATH": str(open_home)}
    job.launch()
    eventually(lambda: "no NVML library" in job.said())
    finish(job)
    assert job.said().count("the GPUs can't be read") == 1
    assert job.api.count("samples") == 0


def test_a_driver_error_is_logged_once_and_a_fixed_driver_is_read_again(on_gpus: MakeBox, nvml: Nvml) -> None:
    nvml.show(BUSY, driver=9)
    job = on_gpus("echo up", WORK)
    job.launch()
    eventually(lambda: "Driver Not Loaded" in job.said())
    assert job.api.count("samples") == 0
    nvml.show(BUSY)
    eventually(lambda: job.api.samples)
    finish(job)
    assert job.said().count("the GPUs can't be read") == 1


def test_a_sampling_process_that_crashes_is_replaced(on_gpus: MakeBox, nvml: Nvml) -> None:
    nvml.show(BUSY, driver=CRASHES)
    job = on_gpus("echo up", WORK)
    job.launch()
    eventually(lambda: "the process that samples the GPUs ended with code -9" in job.said())
    nvml.show(BUSY)
    eventually(lambda: job.api.samples)
    finish(job)
    assert job.said().count("the process that samples the GPUs ended") == 1


def test_a_broken_gpu_that_never_answers_holds_up_nothing(on_gpus: MakeBox, nvml: Nvml) -> None:
    nvml.show(BUSY, driver=HANGS)
    job = on_gpus("echo up", WORK)
    job.launch()
    beats = job.api.count("heartbeat")
    eventually(lambda: job.api.count("heartbeat") > beats + 5)
    finish(job)
    for pid in set(_knowing(nvml)):
        os.kill(pid, signal.SIGKILL)


def test_the_gpu_reader_exits_with_the_runner(on_gpus: MakeBox, nvml: Nvml) -> None:
    nvml.show(BUSY)
    job = on_gpus("echo up", WORK)
    job.launch()
    eventually(lambda: job.api.samples)
    beside = set(_knowing(nvml)) - job.processes()
    assert len(beside) == 4  # it, who replaces it, the runner, and the relay of the output
    job.kill()
    eventually(lambda: len(set(_knowing(nvml)) - job.processes()) == 1)


def _knowing(nvml: Nvml) -> Iterator[int]:
    """Processes with the stand-in in their environment."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"NVML_STUB={nvml.file}".encode() in Path(f"/proc/{name}/environ").read_bytes() and runs(int(name)):
                yield int(name)
        except OSError:
            continue


class Away:
    """An API that is not there."""

    def post(self, *_: object) -> None:
        raise Unreachable("away")


def test_the_sample_buffer_is_bounded_and_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "KEPT", 3)
    source, sink = os.pipe()
    os.set_blocking(source, False)
    api: Any = Away()
    kept = samples.Samples(api, source)
    for at in range(5):
        os.write(sink, b'{"at": %d, "gpus": [{}]}\n' % at)
    kept.send()
    found: list[float] = []
    monkeypatch.setattr(api, "post", lambda _what, body: found.extend(one["age_s"] for one in body["samples"]))
    kept.send_last()
    assert len(found) == 3
    os.close(sink)


def test_half_a_sample_of_a_reader_that_was_killed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    source, sink = os.pipe()
    os.set_blocking(source, False)
    api: Any = Away()
    found: list[dict[str, object]] = []
    monkeypatch.setattr(api, "post", lambda _what, body: found.extend(body["samples"]))
    os.write(sink, b'{"at": 1, "gp\n{"at": 2, "gpus": [{}]}\n')
    samples.Samples(api, source).send()
    assert len(found) == 1
    os.close(sink)
