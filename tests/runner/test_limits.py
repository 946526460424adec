"""A limit that people lengthen while the job runs, and a hold that keeps what it has until then."""

from __future__ import annotations

import time
from collections.abc import Callable

from dstackweb.runs.holds import hold_script
from tests.runner.conftest import Box
from tests.support import eventually

MakeBox = Callable[..., Box]
WORK = "while :; do sleep 0.02; done"


def test_a_heartbeat_lengthens_a_limit(box: MakeBox) -> None:
    job = box("echo up", WORK, max_duration_s=1.5)
    job.api.action = {"action": "go", "max_duration_s": 3}
    began = time.monotonic()
    job.launch()
    assert job.end()["reason"] == "max_duration_exceeded"
    assert time.monotonic() - began > 2.5


def test_without_limits_from_the_server_those_of_the_spec_hold(box: MakeBox) -> None:
    job = box("echo up", WORK, max_duration_s=0.5)
    job.launch()
    assert job.end()["reason"] == "max_duration_exceeded"


def test_a_hold_prints_how_to_connect_and_ends_as_done_at_its_time(box: MakeBox) -> None:
    where = {"host": "gpu-box", "host_address": "10.0.0.5", "gpus": ["GPU-a", "GPU-b"]}
    job = box(hold_script(3600), max_duration_s=600, **where)
    job.launch()
    job.wait_for("Release: dstackweb stop night")
    job.api.action = {"action": "go", "max_duration_s": 0.1}
    end = job.end()
    assert (end["reason"], end["exit_code"]) == ("max_duration_exceeded", 0)
    text = job.api.log.decode()
    assert "host   gpu-box (10.0.0.5)\nGPUs   GPU-a,GPU-b\nuntil  20" in text
    assert "  ssh 10.0.0.5\n  export CUDA_VISIBLE_DEVICES=GPU-a,GPU-b\n" in text
    assert "dstackweb stop night" in text


def test_a_hold_on_the_server_s_own_machine_needs_no_ssh(box: MakeBox) -> None:
    job = box(hold_script(3600), max_duration_s=600, host="box", host_address="127.0.0.1")
    job.launch()
    job.wait_for("Release: dstackweb stop night")
    assert "ssh" not in job.api.log.decode()
    assert "GPUs   none" in job.lines()
    job.api.action = {"action": "stop", "reason": "terminated_by_user", "grace_s": 20}
    end = job.end()
    assert (end["reason"], end["exit_code"]) == ("terminated_by_user", 0)
    eventually(lambda: not job.processes())
