"""Runs on a real GPU, on a whole deployment with the default isolation: what they see of it, and what a policy of one
minute makes of those that use it and those that don't."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dstackweb.runner.nvml import Sample
from tests.gpu.conftest import LOAD
from tests.gpu.load import MEMORY_MIB
from tests.server import Server
from tests.support import eventually

SETTINGS = {"backends": ["hosts"], "utilization_policy": {"min_gpu_utilization": 20, "time_window": "1m"}}
COMPUTE = f"cat > load.py <<'END'\n{LOAD.read_text()}\nEND\npython3 load.py $CUDA_VISIBLE_DEVICES 75"


@pytest.fixture
def server(gpu: Sample) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=os.environ["DSTACKWEB_TEST_HOME"]) as folder:
        home = Path(folder)
        home.chmod(0o755)
        with Server(home, DSTACKWEB_SAMPLE_EVERY_S="1") as running:
            update = f"Profile.objects.filter(is_default=True).update(settings={SETTINGS})"
            done = running.manage("shell", "-c", f"from dstackweb.profiles.models import Profile; {update}")
            assert done.returncode == 0, done.stderr
            yield running


def submit(server: Server, name: str, command: str, gpus: int = 1) -> None:
    server.submit(command, name=name, resources={"cpu": "1", "memory": "2GB..", "gpu": gpus})


def shown(server: Server, gpu: Sample) -> dict[str, Any]:
    """The GPU as the API shows it, once it has been read."""
    hosts = server.http.get("/hosts").json()["items"]
    found: dict[str, Any] = next(one for host in hosts for one in host["gpus"] if one["uuid"] == gpu.uuid)
    return found


def test_a_run_that_computes_is_left_alone_and_one_that_leaves_its_gpu_unused_is_stopped(
    server: Server, gpu: Sample
) -> None:
    submit(server, "computes", COMPUTE)
    server.wait("computes", "running")
    busy = eventually(lambda: (now := shown(server, gpu))["sample"]["utilization"] and now, deadline=30, every=0.5)
    assert busy["run"] == "computes"
    assert busy["stranger"] is None
    assert busy["sample"]["memory_used_mib"] - (gpu.memory_used_mib or 0) >= MEMORY_MIB
    ended = server.wait("computes", deadline=150)
    assert ended["status"] == "done", (ended, server.log("computes"))
    assert [event for event in ended["events"] if event["kind"].startswith("utilization")] == []

    submit(server, "idles", "sleep 600")
    idle = server.wait("idles", deadline=120)
    assert idle["status"] == "terminated", idle
    assert idle["termination_reason"] == "terminated_due_to_utilization_policy"
    assert idle["status_message"] == f"GPU {gpu.index} was below 20 % for 1 min."
    assert eventually(lambda: shown(server, gpu)["run"] is None)


def test_a_run_has_the_gpus_that_it_asked_for_and_no_others(server: Server, gpu: Sample) -> None:
    submit(server, "with-one", "nvidia-smi --query-gpu=uuid --format=csv,noheader; echo $CUDA_VISIBLE_DEVICES")
    assert server.wait("with-one")["status"] == "done", server.log("with-one")
    assert server.log("with-one").decode().split() == [gpu.uuid, gpu.uuid]
    submit(server, "without", COMPUTE.replace("$CUDA_VISIBLE_DEVICES", gpu.uuid), gpus=0)
    assert server.wait("without")["status"] == "failed"
    assert b"cuInit" in server.log("without")
