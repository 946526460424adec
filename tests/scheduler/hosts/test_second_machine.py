"""A second machine of the team, as real processes: it joins, works, is cut off, comes back, and leaves (R13, R25)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests import servers
from tests.second_machine import Machine, Network
from tests.server import Server
from tests.support import eventually

NVME = {"labels": {"disk": "nvme"}}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may enter."""
    with tempfile.TemporaryDirectory(prefix="second-", dir=os.environ["DSTACKWEB_TEST_HOME"]) as path:
        for part in ("server", "far"):
            (Path(path) / part).mkdir()
        Path(path).chmod(0o755)
        yield Path(path)


def host(server: Server, name: str = "far") -> dict[str, Any] | None:
    """The host as the API shows it; None where it is in no list."""
    items = server.http.get("/hosts").json()["items"]
    return next((item for item in items if item["name"] == name), None)


def is_online(server: Server) -> bool:
    return bool((host(server) or {}).get("online"))


def comes_online(server: Server, machine: Machine) -> None:
    """Wait for that. Where its process ends instead, what that said is the failure."""

    def there() -> bool:
        return is_online(server) or machine.has_ended

    eventually(there, deadline=60)
    assert not machine.has_ended, machine.said


def manage_host(server: Server, name: str, **changes: Any) -> None:
    assert server.http.patch(f"/hosts/{name}", json=changes).is_success


def token_of(server: Server) -> str:
    return str(server.http.post("/hosts/invites").json()["token"])


@pytest.mark.nightly
def test_a_second_process_with_its_own_name_and_home_takes_runs_by_label_and_leaves(
    folder: Path, deployment: dict[str, str]
) -> None:
    """Both hosts share this machine's network."""
    with Server(folder / "server") as server, ExitStack() as stack:
        machine = Machine(folder / "far")
        stack.callback(machine.stop)
        options = ["--name", "far", "--label", "disk=nvme"]
        machine.start("host", "join", server.url, "--token", token_of(server), "--home", str(machine.home), *options)
        comes_online(server, machine)
        run = server.wait(server.submit("echo made it to $PWD", **NVME), deadline=60)
        assert (run["status"], run["jobs"][0]["host"]) == ("done", "far")
        assert server.log(run["name"]) == f"made it to {machine.home}/runs/{run['id']}/node-0\n".encode()
        assert server.http.post("/hosts/far/leave").is_success
        assert machine.wait() == 0
        assert host(server) is None
        assert "host far was removed from the deployment" in machine.said


@pytest.fixture
def apart(folder: Path) -> Iterator[tuple[Server, Machine]]:
    """A server with PostgreSQL and Redis at the end of a link, and a machine at the other."""
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        postgres = servers.postgres(folder / "postgres", address=network.here)
        stack.callback(postgres.stop)
        redis = servers.redis(folder / "redis", address=network.here)
        stack.callback(redis.stop)
        server = Server(
            folder / "server",
            DATABASE_URL=postgres.url,
            REDIS_URL=redis.url,
            DSTACKWEB_HOST=network.here,
            DSTACKWEB_HOST_SILENT_S="3",
        )
        stack.enter_context(server)
        machine = Machine(folder / "far", network)
        stack.callback(machine.stop)
        yield server, machine


@pytest.mark.nightly
def test_a_remote_machine_joins_works_is_cut_off_reconnects_and_leaves(
    apart: tuple[Server, Machine],
) -> None:
    server, machine = apart
    token = token_of(server)
    where = ["host", "join", server.url, "--token", token, "--home", str(machine.home), "--name", "far"]
    if machine.network and machine.network.is_real:
        refused = machine.call(*where)
        assert (refused.returncode, "is not encrypted. Nothing was sent" in refused.stderr) == (2, True)
    machine.start(*where, "--insecure", "--label", "disk=nvme")
    comes_online(server, machine)
    joined = host(server)
    assert joined is not None
    assert joined["labels"] == {"disk": "nvme"}
    assert joined["cpus"] > 0
    assert (joined["error"], joined["address"]) == ("", machine.network.there if machine.network else "")

    # It takes the run that asks for it, and the log arrives over the link.
    run = server.wait(server.submit("echo $DSTACK_RUN_NAME is far away", **NVME), deadline=60)
    assert (run["status"], run["jobs"][0]["host"]) == ("done", "far")
    assert server.log(run["name"]) == f"{run['name']} is far away\n".encode()

    # Drained, it takes nothing new; what runs there goes on.
    long = server.submit("echo begun", "while [ ! -e done ]; do sleep 0.1; done", "echo over", **NVME)
    running = server.wait(long, "running", deadline=60)
    manage_host(server, "far", draining=True)
    waits = server.submit("echo later", **NVME)
    eventually(lambda: server.run(waits)["reason"] == "backend_unavailable", deadline=60)

    # Cut off, it goes offline; its run is kept as it was.
    machine.cut()
    eventually(lambda: not is_online(server), deadline=60)
    assert server.run(long)["status"] == "running"
    (machine.home / "runs" / running["id"] / "node-0" / "done").touch()

    # Back under its name, it reports what happened meanwhile, and takes runs again.
    machine.reconnect()
    comes_online(server, machine)
    assert server.wait(long, deadline=60)["status"] == "done"
    assert server.log(long) == b"begun\nover\n"
    manage_host(server, "far", draining=False)
    assert server.wait(waits, deadline=60)["status"] == "done"

    # It leaves once it holds nothing, its token ends with that, and it comes back by another with its label.
    assert server.http.post("/hosts/far/leave").is_success
    assert machine.wait() == 0
    assert host(server) is None
    machine.start("host", "run", "--home", str(machine.home))
    assert machine.wait() == 0
    assert host(server) is None
    machine.start("host", "join", server.url, "--token", token_of(server), *where[5:], "--insecure")
    comes_online(server, machine)
    back = host(server)
    assert back is not None
    assert (back["labels"], back["draining"]) == ({"disk": "nvme"}, False)
    assert server.manage("recount", "--check").returncode == 0
