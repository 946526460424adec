"""A joined host's agent is killed, cut off and refused, with real processes: no job is lost and none starts twice."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.second_machine import Machine
from tests.server import Server
from tests.support import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.both_sides, pytest.mark.xdist_group("host agents")]
FAR = {"labels": {"disk": "nvme"}}
SOON = {"DSTACKWEB_PASS_EVERY_S": "0.5", "DSTACKWEB_WATCH_EVERY_S": "0.3", "DSTACKWEB_HOST_SILENT_S": "4"}


@pytest.fixture
def joined(open_home: Path) -> Iterator[tuple[Server, Machine]]:
    """A server, and a machine that joined it as `far`."""
    (open_home / "far").mkdir()
    with Server(open_home, **SOON) as server, ExitStack() as stack:
        machine = Machine(open_home / "far")
        stack.callback(machine.stop)
        machine.start("host", "join", server.url, *options(server, machine))
        eventually(lambda: is_online(server), deadline=60)
        yield server, machine


def options(server: Server, machine: Machine) -> list[str]:
    token = server.http.post("/hosts/invites").json()["token"]
    return ["--token", token, "--home", str(machine.home), "--name", "far", "--label", "disk=nvme"]


def far(server: Server) -> dict[str, Any]:
    return next(item for item in server.http.get("/hosts").json()["items"] if item["name"] == "far")


def is_online(server: Server) -> bool:
    return "far" in server.http.get("/hosts").text and far(server)["online"] and far(server)["cpus"] > 0


def start_again(machine: Machine) -> None:
    machine.start("host", "run", "--home", str(machine.home))


def test_an_agent_that_is_killed_and_a_server_that_restarts_lose_no_job_and_start_none_twice(
    joined: tuple[Server, Machine],
) -> None:
    server, machine = joined
    assert machine.process is not None
    long = server.submit("echo once >> count", "while [ ! -e done ]; do sleep 0.1; done", "echo over", **FAR)
    running = server.wait(long, "running", deadline=60)
    folder = machine.home / "runs" / running["id"] / "node-0"
    runner = int((machine.home / "jobs" / running["jobs"][0]["id"] / "lock").read_text())

    assert (machine.home / "host.lock").stat().st_mode & 0o777 == 0o600, "a job could lock it"
    # The machine has nothing that opens the deployment.
    settings = json.loads((machine.home / "host.json").read_text())
    assert set(settings) == {"url", "name", "token", "insecure", "job_user", "job_writable", "shared_uid",
                             "engine", "container_network", "job_volumes"}  # fmt: skip
    secret = (server.home / "secret_key").read_bytes().strip()
    assert not [path for path in machine.home.rglob("*") if path.is_file() and secret in path.read_bytes()]

    # The agent is killed while a run is on its way to it: the job goes on, and the new agent starts the waiting one.
    machine.process.send_signal(signal.SIGKILL)
    machine.process.wait(30)
    waiting = server.submit("echo later", **FAR)
    eventually(lambda: not far(server)["online"], deadline=60)
    assert server.run(long)["status"] == "running"
    start_again(machine)
    assert server.wait(waiting, deadline=60)["status"] == "done"
    assert psutil.pid_exists(runner)

    # The server restarts, all at once.
    server.stop(signal.SIGKILL)
    server.start()
    eventually(lambda: is_online(server), deadline=60)
    (folder / "done").touch()
    assert server.wait(long, deadline=60)["status"] == "done"
    assert server.log(long) == b"over\n"
    assert (folder / "count").read_text() == "once\n"

    # A stop reaches the job within seconds, and a job whose runner was killed is ended and reported.
    stopped = server.submit("sleep 600", **FAR)
    server.wait(stopped, "running", deadline=60)
    assert server.api("POST", f"runs/{stopped}/stop", json={}).is_success
    assert server.wait(stopped)["status"] == "terminated"
    orphan = server.wait(server.submit("sleep 600", **FAR), "running", deadline=60)
    psutil.Process(int((machine.home / "jobs" / orphan["jobs"][0]["id"] / "lock").read_text())).kill()
    (job,) = server.wait(orphan["name"], deadline=60)["jobs"]
    assert job["termination_reason"] == "instance_unreachable"
    eventually(lambda: not server.processes_of(orphan))
    assert server.manage("recount", "--check").returncode == 0


def test_a_second_machine_with_a_copied_file_gets_no_jobs_until_the_first_is_silent(
    joined: tuple[Server, Machine], open_home: Path
) -> None:
    server, machine = joined
    (open_home / "copy").mkdir()
    copy = Machine(open_home / "copy")
    (copy.home / "host.json").write_text((machine.home / "host.json").read_text())
    start_again(copy)
    try:
        eventually(lambda: "far is in use by another machine" in copy.said, deadline=60)
        names = [server.submit("pwd", **FAR) for _ in range(4)]
        for name in names:
            assert server.wait(name, deadline=60)["status"] == "done"
            assert str(machine.home).encode() in server.log(name)
        machine.stop()
        late = server.submit("pwd", **FAR)
        assert server.wait(late, deadline=120)["status"] == "done"
        assert str(copy.home).encode() in server.log(late)
    finally:
        copy.stop()


def test_a_revoked_host_finishes_its_jobs_and_takes_new_ones_after_it_rejoined(
    joined: tuple[Server, Machine],
) -> None:
    server, machine = joined
    long = server.submit("while [ ! -e done ]; do sleep 0.1; done", "echo over", **FAR)
    running = server.wait(long, "running", deadline=60)
    assert server.http.post("/hosts/far/revoke").is_success
    eventually(lambda: not far(server)["online"], deadline=60)
    (machine.home / "runs" / running["id"] / "node-0" / "done").touch()
    assert server.wait(long, deadline=60)["status"] == "done"
    waiting = server.submit("echo later", **FAR)

    # The running agent finds the new token by itself.
    done = machine.call("host", "join", server.url, *options(server, machine), "--no-start")
    assert done.returncode == 0, done.stderr
    assert server.wait(waiting, deadline=60)["status"] == "done"

    # A host that can start nothing is held back, and says why; it takes jobs again once a start works.
    jobs = machine.home / "jobs"
    jobs.rename(machine.home / "away")
    jobs.write_text("not a directory")
    names = [server.submit(f"echo {number}", **FAR) for number in range(3)]
    eventually(lambda: far(server)["held_back_at"], deadline=60)
    assert far(server)["start_error"]
    jobs.unlink()
    (machine.home / "away").rename(jobs)
    eventually(lambda: not far(server)["held_back_at"], deadline=60)
    assert {server.wait(name, deadline=60)["status"] for name in names} == {"done"}
