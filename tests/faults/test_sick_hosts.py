"""Hosts that can start nothing, or die: their runs are not lost, with real processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.second_machine import Machine
from tests.server import Server
from tests.support import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.both_sides]
SOON = {"DSTACKWEB_PASS_EVERY_S": "0.5", "DSTACKWEB_WATCH_EVERY_S": "0.3", "DSTACKWEB_HOST_SILENT_S": "3"}


def host(server: Server, name: str) -> dict[str, Any]:
    return next(item for item in server.http.get("/hosts").json()["items"] if item["name"] == name)


def test_a_host_that_can_start_nothing_is_held_back_and_loses_no_run(open_home: Path) -> None:
    with Server(open_home, **SOON) as server:
        jobs = server.home / "jobs"
        if jobs.exists():
            shutil.rmtree(jobs)
        jobs.write_text("not a directory")
        names = [server.submit(f"echo {number}") for number in range(6)]
        eventually(lambda: host(server, "box")["held_back_at"], deadline=60)
        eventually(lambda: {server.run(name)["status"] for name in names} <= {"submitted", "pending"})
        assert "File exists" in host(server, "box")["start_error"]
        assert 'dstackweb_host_held_back{host="box"} 1.0' in server.metrics()
        jobs.unlink()
        eventually(lambda: not host(server, "box")["held_back_at"], deadline=60)
        ended = [server.wait(name, deadline=60) for name in names]
        assert {run["status"] for run in ended} == {"done"}
        assert [server.log(name) for name in names] == [f"{number}\n".encode() for number in range(6)]


def kill(machine: Machine, run: dict[str, Any], server: Server) -> None:
    """All at once, as when the power fails: the host's agent, the runner, and the commands of the run."""
    assert machine.process is not None
    root = psutil.Process(machine.process.pid)
    runner = int((machine.home / "jobs" / run["jobs"][0]["id"] / "lock").read_text())
    for pid in [root.pid, *(child.pid for child in root.children(recursive=True)), runner, *server.processes_of(run)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    machine.process.wait(30)


def test_runs_placed_on_a_killed_host_start_elsewhere_and_its_running_job_can_be_ended(
    open_home: Path,
) -> None:
    far_home = open_home / "far"
    far_home.mkdir()
    with Server(open_home, **SOON) as server, ExitStack() as stack:
        machine = Machine(far_home)
        stack.callback(machine.stop)
        token = server.http.post("/hosts/invites").json()["token"]
        options = ["--token", token, "--home", str(far_home), "--name", "far", "--label", "disk=nvme"]
        machine.start("host", "join", server.url, *options)
        eventually(lambda: "far" in server.http.get("/hosts").text and host(server, "far")["online"], deadline=60)
        nvme = {"labels": {"disk": "nvme"}}
        ran = server.wait(server.submit("sleep 600", **nvme), "running", deadline=60)

        kill(machine, ran, server)
        placed = [server.submit(f"echo {number}", **nvme) for number in range(3)]
        eventually(lambda: not host(server, "far")["online"], deadline=60)
        eventually(lambda: {server.run(name)["status"] for name in placed} == {"submitted"})
        assert server.run(ran["name"])["status"] == "running"
        assert server.http.patch("/hosts/box", json={"labels": {"disk": "nvme"}}).is_success
        ended = [server.wait(name, deadline=60) for name in placed]
        assert {(run["status"], run["jobs"][0]["host"]) for run in ended} == {("done", "box")}

        stopped = server.api("POST", f"runs/{ran['name']}/stop", json={"abort": True}).json()
        assert stopped["status"] == "terminating"
        assert "Waits for far" in stopped["silent_detail"]
        refused = server.http.post("/hosts/box/gone", json={"reason": "it is slow"})
        assert refused.status_code == 409
        assert server.http.post("/hosts/far/gone", json={"reason": "its supervisor was killed"}).json() == {"ended": 1}
        assert server.wait(ran["name"])["status"] == "terminated"
        assert host(server, "far")["cpus_used"] == 0
