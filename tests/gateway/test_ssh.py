"""Dev environments over SSH, with real clients, servers and runners."""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx
import pytest

from tests.gateway.conftest import Gateway
from tests.server import kill
from tests.servers import free_port
from tests.support import eventually

pytestmark = pytest.mark.nightly


def test_a_key_opens_a_shell_in_the_place_of_the_commands(gateway: Gateway, key: Path) -> None:
    other = gateway.key("other")
    name = gateway.submit(init=["export SEEN=no", "echo made > made"], env={"GREETING": "hello"})
    run = gateway.ready(name)
    assert f"{name}@127.0.0.1" in run["connect"]["ssh"]
    done = gateway.ssh(key, name, 'echo "$GREETING from $DSTACK_RUN_NAME"; cat made; echo bad >&2; exit 7')
    assert (done.returncode, done.stdout, done.stderr) == (7, f"hello from {name}\nmade\n".encode(), b"bad\n")
    echoed = gateway.ssh(key, f"main/{name}", "cat", given=b"x" * 3_000_000)
    assert len(echoed.stdout) == 3_000_000
    terminal = gateway.ssh(key, run["id"], "-tt", "test -t 0 && ps -o tpgid= -p $$ && exit 3")
    assert terminal.returncode == 3, terminal
    assert int(terminal.stdout) > 0, "the shell has a controlling terminal"
    for refused in (gateway.ssh(other, name, "id"), gateway.ssh(key, "no-such-run", "id")):
        assert (refused.returncode, refused.stdout) == (255, b"")
        assert b"Permission denied" in refused.stderr
    gateway.server.api("POST", f"runs/{name}/stop")
    gateway.server.wait(name)


def test_ports_are_reached_as_the_jobs_user_and_no_other_host_is(gateway: Gateway, key: Path) -> None:
    port, local = free_port(), free_port()
    name = gateway.submit(init=[f"cd /tmp && echo served > page && (python3 -m http.server {port} --bind 127.0.0.1 &)"])
    gateway.ready(name)
    forward = gateway.ssh_command(key, name, "-N", "-L", f"{local}:localhost:{port}", "-L", f"{free_port()}:10.0.0.1:1")
    with subprocess.Popen(forward, stderr=subprocess.PIPE) as client:
        try:
            got = eventually(lambda: fetched(local, "/page"), deadline=30)
            assert got == "served\n"
        finally:
            client.terminate()
    gateway.server.api("POST", f"runs/{name}/stop")
    gateway.server.wait(name)


def fetched(port: int, path: str) -> str:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}").text
    except httpx.HTTPError:
        return ""


def test_a_job_outlives_the_gateway_and_takes_logins_again(gateway: Gateway, key: Path) -> None:
    name = gateway.submit()
    run = gateway.ready(name)
    with subprocess.Popen(
        gateway.ssh_command(key, name, "echo open; cat"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"open\n"
        kill(*gateway.server.role_pids("dstackweb.manage\0gateway"))
        assert client.wait(30) == 255
    again = eventually(lambda: entered(gateway, key, name), deadline=60)
    assert again == b"again\n"
    assert gateway.server.run(name)["status"] == "running"
    assert gateway.server.run(name)["jobs"][0]["attempt"] == run["jobs"][0]["attempt"] == 1
    gateway.server.api("POST", f"runs/{name}/stop")
    assert gateway.server.wait(name)["status"] == "terminated"
    ended = gateway.ssh(key, name, "id")
    assert b"is terminated" in ended.stderr


def entered(gateway: Gateway, key: Path, name: str) -> bytes:
    return gateway.ssh(key, name, "echo again").stdout


def test_files_are_copied(gateway: Gateway, key: Path, tmp_path: Path) -> None:
    name = gateway.submit(init=["echo data > file"])
    gateway.ready(name)
    command = gateway.ssh_command(key, name)
    copy = ["scp", *command[1:5], "-P", str(gateway.ssh_port), *command[7:-1]]
    done = subprocess.run([*copy, f"{command[-1]}:file", str(tmp_path)], capture_output=True, timeout=60, check=False)
    assert (tmp_path / "file").read_text() == "data\n", done
    gateway.server.api("POST", f"runs/{name}/stop")
    gateway.server.wait(name)


def test_a_hold_is_entered_too(gateway: Gateway, key: Path) -> None:
    hold = gateway.server.api("POST", "holds", json={"for": "1h", "cpu": "1"}).json()
    gateway.ready(hold["name"])
    assert gateway.ssh(key, hold["name"], "echo $DSTACK_RUN_NAME").stdout == f"{hold['name']}\n".encode()
    gateway.server.api("POST", f"runs/{hold['name']}/stop")
    assert gateway.server.wait(hold["name"])["status"] == "done"
