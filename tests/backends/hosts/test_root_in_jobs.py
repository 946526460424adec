"""Real jobs try to have root execute what they put in its way, when people enter them or connect to their ports."""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from dstackweb.backends.hosts import local
from dstackweb.runner import jobs, sandbox
from dstackweb.runner.exec_target import IDE_SOCKET
from dstackweb.runner.pyz import build_pyz
from dstackweb.runner.streams import StreamRefused
from tests import containers
from tests.backends.hosts.gateway_stand_in import GatewayStandIn
from tests.backends.hosts.test_job_isolation import FIRST, NO_SANDBOX, SANDBOX, WITH_HOME, Launch, launch, output, tried
from tests.servers import free_port
from tests.support import eventually

__all__ = ["launch"]
pytestmark = [pytest.mark.slow, pytest.mark.needs("root")]

SERVES = """\
import socketserver, sys
class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(b"served " + self.request.recv(9))
socketserver.TCPServer.allow_reuse_address = True
server = socketserver.ThreadingTCPServer(("127.0.0.1", int(sys.argv[1])), Handler)
import threading
threading.Thread(target=server.serve_forever).start()
socketserver.ThreadingUnixStreamServer(sys.argv[2], Handler).serve_forever()
"""
SCRIPT = "#!/bin/sh\necho $(id -u) $0 >> FOLDER/executed; exit 9\n"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in /tmp that has the environment and the program of the runners that are started from now on."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="program-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        build_pyz(folder / "runner.pyz")
        monkeypatch.setattr(sys, "executable", str(folder / "venv/bin/python"))
        monkeypatch.setattr(jobs, "PROGRAM", str(folder / "runner.pyz"))
        launcher = jobs.Launcher()
        monkeypatch.setattr(jobs, "_launcher", launcher)
        yield folder
        if launcher._process is not None:
            launcher._end(launcher._process)


@pytest.fixture
def gateway() -> Iterator[GatewayStandIn]:
    gateway = GatewayStandIn()
    yield gateway
    gateway.close()


def takes_the_place(program: Path) -> list[str]:
    """Commands that put a script in the place of the runner's interpreter and program; they say which of them work."""
    script = f"echo {shlex.quote(SCRIPT)} | sed s,FOLDER,$DSTACK_RUN_DIR,"
    return [
        tried(f"mv {program} {program}.moved"),
        tried(f"mv {program}/venv {program}/moved"),
        f"mkdir -p {program}/venv/bin 2>/dev/null || true",
        *(tried(f"{script} > {program}/{name}") for name in ("venv/bin/python", "runner.pyz")),
        f"chmod -R a+rwx {program} 2>/dev/null || true",
    ]


def enter_by_all_ways(gateway: GatewayStandIn, port: int) -> None:
    """As people with ssh, a service's callers and its health check, and the pages of a dev environment do."""
    assert gateway.run("id -u; id -G; grep CapEff /proc/self/status") == (
        0,
        f"{FIRST + 7}\n{FIRST + 7}\nCapEff:\t0000000000000000\n",
    )
    terminal = {"term": "xterm", "rows": 24, "columns": 80}
    assert gateway.run("test -t 0 && id -u", tty=terminal) == (0, f"{FIRST + 7}\r\n")
    for what in ({"kind": "service", "port": port}, {"kind": "tcp", "port": port}, {"kind": "ide"}):
        assert gateway.ask(b"this", **what) == b"served this"


@pytest.mark.parametrize(
    "writable",
    [
        pytest.param(NO_SANDBOX, id="users"),
        pytest.param(SANDBOX, id="sandbox"),
        pytest.param(WITH_HOME, id="shared-tmp", marks=pytest.mark.nightly),
    ],
)
def test_root_executes_nothing_that_a_job_puts_in_the_place_of_its_program(
    launch: Launch, program: Path, gateway: GatewayStandIn, writable: list[str] | None
) -> None:
    port = free_port()
    serve = f"printf '%s' \"$SERVES\" | python3 - {port} {IDE_SOCKET} & echo ready; wait"
    api, folder = launch(
        7, *takes_the_place(program), serve, writable=writable, gateway={"port": gateway.port}, env={"SERVES": SERVES}
    )
    eventually(lambda: (folder / IDE_SOCKET).exists())
    enter_by_all_ways(gateway, port)
    assert not (folder / "executed").exists()
    assert api.log == b"ready\n", "the job did what it may not"


def test_what_the_set_up_snippet_leaves_is_not_executed_as_root_either(launch: Launch, program: Path) -> None:
    """It may source files of the run's author. The sandbox of the commands begins with the same /tmp."""
    setup = "\n".join([*takes_the_place(program), "ln -s /etc /tmp/etc"])
    api, folder = launch(7, "id -u; ls -d /tmp/etc", setup=f"exec 2>&1; ({setup}) >> said", writable=SANDBOX)
    assert output(api) == f"{FIRST + 7}\n/tmp/etc\n"
    assert (folder / "said").read_text() == ""
    assert not (folder / "executed").exists()


def test_root_executes_nothing_in_a_sandbox_whatever_is_there(
    launch: Launch, program: Path, gateway: GatewayStandIn
) -> None:
    port = free_port()
    serve = f"printf '%s' \"$SERVES\" | python3 - {port} {IDE_SOCKET} & echo ready; wait"
    api, folder = launch(7, serve, writable=SANDBOX, gateway={"port": gateway.port}, env={"SERVES": SERVES})
    eventually(lambda: (folder / IDE_SOCKET).exists())
    tmp = Path(sandbox.tmp_of(str(folder)), "tmp")
    (tmp / program.name).rename(tmp / "moved")
    (tmp / program.name / "venv/bin").mkdir(parents=True)
    for name in ("venv/bin/python", "runner.pyz"):
        script = tmp / program.name / name
        script.write_text(SCRIPT.replace("FOLDER", str(folder)))
        script.chmod(0o755)
    enter_by_all_ways(gateway, port)
    assert gateway.run(f"{program}/venv/bin/python") == (9, ""), "it is there"
    assert (folder / "executed").read_text() == f"{FIRST + 7} {program}/venv/bin/python\n", "by this command alone"
    assert api.log == b"ready\n"


def test_a_link_to_the_socket_of_another_run_leads_nowhere_in_a_sandbox(
    launch: Launch, gateway: GatewayStandIn
) -> None:
    serve = f"printf '%s' \"$SERVES\" | exec python3 - {free_port()} {IDE_SOCKET}"
    _other, others = launch(7, serve, writable=WITH_HOME, env={"SERVES": SERVES})
    eventually(lambda: (others / IDE_SOCKET).exists())
    link = f"ln -s {others}/{IDE_SOCKET} {IDE_SOCKET}; exec sleep 300"
    _api, folder = launch(7, link, writable=WITH_HOME, gateway={"port": gateway.port})
    eventually(lambda: (folder / IDE_SOCKET).is_symlink())
    with pytest.raises(StreamRefused, match="No such file"):
        gateway.ask(b"hello", kind="ide")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["docker", "podman"])
def test_what_connects_to_a_job_in_a_container_sees_its_files_alone(
    launch: Launch, gateway: GatewayStandIn, open_home: Path, name: str
) -> None:
    """A link leads nowhere on the host, whose sockets it could reach as the project's user."""
    with contextlib.ExitStack() as stack:
        if name == "podman":
            engine, image = stack.enter_context(containers.podman()), f"localhost/{containers.IMAGE}"
        else:
            engine, image = stack.enter_context(containers.docker()).engine, containers.IMAGE
        outside = stack.enter_context(socket.socket(socket.AF_UNIX))
        outside.bind(str(open_home / "socket"))
        (open_home / "socket").chmod(0o777)
        outside.listen()
        others = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        api, folder = launch(
            7, f"ln -s {open_home}/socket {IDE_SOCKET}; exec sleep 300", writable=SANDBOX, engine=engine,
            gateway={"port": gateway.port}, image=image, pull_policy="never", registry_auth=None,
            entrypoint=None, memory_max_mib=64, cpu_max=1,
        )  # fmt: skip
        eventually(lambda: (folder / IDE_SOCKET).is_symlink())
        assert gateway.run("id -u") == (0, f"{FIRST + 7}\n")
        with pytest.raises(StreamRefused, match="No such file"):
            gateway.ask(b"hello", kind="ide")
        with pytest.raises(StreamRefused, match="another user"):
            gateway.ask(b"hello", kind="service", port=others.getsockname()[1])
        eventually(partial(local.kill_job, api.job))
