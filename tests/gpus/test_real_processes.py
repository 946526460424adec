"""A policy of the default profile on a whole deployment: real processes, NVML's real module on a library that goes by a
script, and a minute that is a minute."""

from __future__ import annotations

import datetime as dt
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from standins.nvml import FakeGpu, Nvml
from tests.server import Server
from tests.support import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("gpus")]

POLICY = {"backends": ["hosts"], "utilization_policy": {"min_gpu_utilization": 50, "time_window": "1m"}}
GPUS = {"idle": "A100:1", "busy": "H100:2"}


@pytest.fixture
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="gpus-", dir=os.environ["DSTACKWEB_TEST_HOME"]) as folder:
        home = Path(folder)
        home.chmod(0o755)
        (home / "nvml").mkdir()
        nvml = Nvml(home / "nvml")
        # Ten seconds of use in fifty are enough to be left alone, and so are eight of which nothing is known.
        nvml.show(
            FakeGpu("GPU-idle", "NVIDIA A100-SXM4-40GB", util=3, mem=1200, power=60, temp=30),
            FakeGpu("GPU-busy", "NVIDIA H100 80GB HBM3", util="0:0,32:97,42:0", mem=70000, power=500, temp=66),
            FakeGpu("GPU-lost", "NVIDIA H100 80GB HBM3", util=0, mem=70000, status="0:0,42:15"),
            loop=50,
        )
        found = {key: nvml.env()[key] for key in ("LD_LIBRARY_PATH", "NVML_STUB")}
        with Server(home, DSTACKWEB_SAMPLE_EVERY_S="1", **found) as running:
            profile = "from dstackweb.profiles.models import Profile; "
            done = running.manage(
                "shell", "-c", f"{profile}Profile.objects.filter(is_default=True).update(settings={POLICY})"
            )
            assert done.returncode == 0, done.stderr
            yield running


def test_a_run_that_leaves_its_gpu_unused_for_a_minute_is_warned_and_stopped_and_no_other(server: Server) -> None:
    for name, gpu in GPUS.items():
        server.submit("sleep 600", name=name, resources={"cpu": "1", "memory": "64MB", "gpu": gpu})
    for name in GPUS:
        server.wait(name, "running")

    warned = eventually(lambda: (run := server.run("idle"))["policy"]["badge"] and run, deadline=60, every=0.5)
    assert warned["status"] == "running"
    assert warned["policy"]["stops_at"] is not None

    idle = server.wait("idle", "terminating", "terminated", deadline=60)
    began = dt.datetime.fromisoformat(_job(server, "idle")["started_at"])
    noticed_at = next(dt.datetime.fromisoformat(e["at"]) for e in idle["events"] if e["kind"] == "utilization_stop")
    assert 60 <= (noticed_at - began).total_seconds() < 75

    idle = server.wait("idle", "terminated")
    assert idle["termination_reason"] == "terminated_due_to_utilization_policy"
    assert idle["status_message"] == "GPU 0 was below 50 % for 1 min."
    assert server.processes_of(idle) == []
    assert eventually(lambda: _gpu(server, "GPU-idle")["run"] is None)

    time.sleep(15)  # the others began a moment later: their minute is over, too
    busy = server.run("busy")
    assert busy["status"] == "running"
    assert [event for event in busy["events"] if event["kind"].startswith("utilization")] == []
    assert server.manage("recount", "--check").returncode == 0


def _job(server: Server, name: str) -> dict[str, Any]:
    job: dict[str, Any] = server.run(name)["jobs"][0]
    return job


def _gpu(server: Server, uuid: str) -> dict[str, Any]:
    hosts = server.http.get("/hosts").json()["items"]
    return next(gpu for host in hosts for gpu in host["gpus"] if gpu["uuid"] == uuid)
