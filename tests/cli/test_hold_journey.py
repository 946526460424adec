"""Holding GPUs, against a whole deployment of real processes with two GPUs that a stub of NVML plays."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from standins.nvml import FakeGpu, Nvml
from tests.cli.conftest import Cli
from tests.server import TOKEN, Server
from tests.support import eventually

pytestmark = pytest.mark.nightly


def test_a_hold_is_extended_and_released_and_the_next_run_gets_its_gpus(
    open_home: Path, tmp_path: Path, work: Path
) -> None:
    nvml = Nvml(tmp_path)
    nvml.show(FakeGpu("GPU-one"), FakeGpu("GPU-two"))
    stub = {"LD_LIBRARY_PATH": str(nvml.folder), "NVML_STUB": str(nvml.file)}
    with Server(open_home, **stub) as server:
        cli = Cli(server.url, TOKEN, tmp_path / "config", work)
        try:
            held = cli("hold", "--gpu", "A100:2", "--for", "1h", "--name", "mine")
            assert held.exit_code == 0, held.output
            assert held.stdout.startswith("mine: box, 2 GPUs, held until ")
            assert "  export CUDA_VISIBLE_DEVICES=GPU-one,GPU-two\n" in held.stdout
            run = server.run("mine")
            log = eventually(lambda: server.log("mine").decode())
            assert "GPUs   GPU-one,GPU-two\n" in log
            assert "in a shell on box, the machine that dstackweb runs on" in log

            waiting = cli.spawn("hold", "--gpu", "1", "--for", "10m", "--name", "next")
            server.wait("next", "submitted")
            assert server.run("next")["status"] == "submitted"

            assert cli.ok("extend", "mine", "30m").startswith("mine: held until ")
            assert server.run("mine")["held_until"] > run["held_until"]

            cli.ok("stop", "mine", "-y")
            ended = server.wait("mine")
            assert (ended["status"], ended["termination_reason"]) == ("done", "given_back")
            out, err = waiting.communicate(timeout=30)
            assert out.decode().startswith("next: box, 1 GPU, held until "), err
        finally:
            cli.close()


def test_a_hold_ends_as_done_after_its_time(open_home: Path) -> None:
    with Server(open_home) as server:
        name = server.api("POST", "holds", json={"cpu": "1", "for": "6s"}).json()["name"]
        began = time.monotonic()
        server.wait(name, "running")
        server.api("POST", f"runs/{name}/extend", json={"for": "4s"})
        ended = server.wait(name, deadline=60)
        assert time.monotonic() - began > 9
        assert (ended["status"], ended["termination_reason"], ended["exit_code"]) == ("done", "hold_ended", 0)
        assert server.http.get("/hosts").json()["items"][0]["cpus_used"] == 0
