"""Projects' users can't connect to the server's database and Redis: real connections through real rules."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from dstackweb.backends.models import Ports
from dstackweb.runner.isolation import PROJECT_UIDS
from dstackweb.scheduler.management.commands.up import open_port
from dstackweb.scheduler.processes import protection
from dstackweb.scheduler.processes.protection import close_ports, reopen_ports
from tests.server import Server
from tests.support import eventually

FIRST = int(PROJECT_UIDS.partition("-")[0])
SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}
as_root = pytest.mark.needs("root", "nftables", "iproute2")


def postgres(host: str, port: int) -> dict[str, Any]:
    return {"ENGINE": "django.db.backends.postgresql", "NAME": "d", "HOST": host, "PORT": port}


def has_rules(home: Path) -> bool:
    listed = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
    return protection.table_of(home) in listed.split()


@pytest.fixture
def ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Two ports that something listens on, on all addresses; rules of `tmp_path` as a home are removed."""
    monkeypatch.setattr(protection, "TABLES", tmp_path / "tables")
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as other:
        yield one.getsockname()[1], other.getsockname()[1]
    reopen_ports(tmp_path)


def connects(uid: int, host: str, port: int) -> bool:
    """Whether a process of this user gets a connection, and isn't refused one."""
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, errno.ECONNREFUSED)
        return code == 0
    try:
        os.setuid(uid)
        with socket.socket() as client:
            client.settimeout(10)
            os._exit(client.connect_ex((host, port)))
    finally:
        os._exit(255)


@pytest.mark.slow
@as_root
def test_users_of_projects_cannot_connect_to_the_database_and_redis(ports: tuple[int, int], tmp_path: Path) -> None:
    database, redis = ports
    own = 8000
    with socket.create_server(("", 0)) as listening:
        api = listening.getsockname()[1]
        for _again in range(2):
            made = close_ports(
                tmp_path, PROJECT_UIDS, postgres("localhost", database), f"redis://:secret@127.0.0.1:{redis}/0", own
            )
            assert made == Ports.CLOSED
        for port in (database, redis):
            assert not connects(FIRST, "127.0.0.1", port)
            assert not connects(FIRST + 999_999, "127.0.0.2", port)
            assert connects(0, "127.0.0.1", port)
            assert connects(65534, "127.0.0.1", port)
        assert connects(FIRST, "127.0.0.1", api)


@pytest.mark.slow
@as_root
def test_users_of_projects_cannot_connect_to_a_database_in_a_container_by_its_own_address(
    ports: tuple[int, int], tmp_path: Path
) -> None:
    """Nobody answers there: whoever may try waits."""
    bridge, run = f"br-{os.getpid() % 10**6}", partial(subprocess.run, check=True)
    run(["ip", "link", "add", bridge, "type", "veth", "peer", "name", f"x{bridge}"])
    try:
        run(["ip", "addr", "add", "198.18.7.1/30", "dev", bridge])
        for link in (bridge, f"x{bridge}"):
            run(["ip", "link", "set", link, "up"])
        close_ports(tmp_path, PROJECT_UIDS, postgres("127.0.0.1", 5433), "", 8000)
        for port in (5432, 5433, 6379):
            assert is_refused(FIRST, "198.18.7.2", port)
        assert not is_refused(FIRST, "198.18.7.2", 80)
        assert not is_refused(0, "198.18.7.2", 5432)
    finally:
        run(["ip", "link", "del", bridge])


def is_refused(uid: int, host: str, port: int) -> bool:
    """Whether a process of this user gets no connection at once."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == errno.ECONNREFUSED
    try:
        os.setuid(uid)
        with socket.socket() as client:
            client.settimeout(0.3)
            os._exit(client.connect_ex((host, port)))
    finally:
        os._exit(255)


@as_root
def test_users_of_projects_cannot_answer_in_place_of_a_server_that_is_not_running(
    ports: tuple[int, int], tmp_path: Path
) -> None:
    """Runners would send the tokens of all jobs there, proxies the sessions of all people."""
    with listening_as(FIRST) as own, listening_as(FIRST) as other:
        assert answers(own)
        close_ports(tmp_path, PROJECT_UIDS, SQLITE, "", own)
        assert not answers(own)
        assert answers(other)
    with listening_as(0, own):
        assert answers(own)


@contextlib.contextmanager
def listening_as(uid: int, port: int = 0) -> Iterator[int]:
    """A free port that a process of this user listens on, by what the kernel keeps of it."""
    os.seteuid(uid)
    try:
        listening = socket.create_server(("", port))
    finally:
        os.seteuid(0)
    with listening:
        yield listening.getsockname()[1]


@as_root
def test_a_job_that_has_taken_the_servers_port_is_ended_when_the_server_starts(settings: Any) -> None:
    settings.DSTACKWEB_JOB_USER = PROJECT_UIDS
    with listening_process(0) as own, listening_process(65534) as other, listening_process(FIRST) as job:
        for _pid, taken in (own, other):
            with pytest.raises(SystemExit, match="is in use"):
                open_port("127.0.0.1", taken)
        with open_port("127.0.0.1", job[1]) as listener:
            assert listener.getsockname()[1] == job[1]
        assert not psutil.pid_exists(job[0])


@contextlib.contextmanager
def listening_process(uid: int) -> Iterator[tuple[int, int]]:
    """A process of this user that listens, and its port."""
    ready, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(uid)
            with socket.create_server(("", 0)) as listener:
                os.write(write_end, str(listener.getsockname()[1]).encode())
                signal.pause()
        finally:
            os._exit(1)
    os.close(write_end)
    try:
        yield pid, int(os.read(ready, 10))
    finally:
        os.close(ready)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5):
            return True
    except TimeoutError:
        return False


def test_without_ports_there_is_nothing_to_close(tmp_path: Path) -> None:
    assert close_ports(tmp_path, "nobody", SQLITE, "", 8000) == Ports.NONE
    sockets = postgres("/run/postgresql", 5432), "unix:///run/redis.sock"
    assert close_ports(tmp_path, "nobody", *sockets, 8000) == Ports.NONE


@as_root
def test_the_rules_of_a_home_are_those_of_its_last_start_until_they_are_removed(
    ports: tuple[int, int], tmp_path: Path
) -> None:
    with listening_as(FIRST) as before, listening_as(FIRST) as own:
        close_ports(tmp_path, PROJECT_UIDS, SQLITE, "", before)
        close_ports(tmp_path, PROJECT_UIDS, SQLITE, "", own)
        assert (answers(before), answers(own)) == (True, False)
        reopen_ports(tmp_path)
        assert answers(own)
    assert not has_rules(tmp_path)
    reopen_ports(tmp_path)


@as_root
def test_a_start_removes_the_rules_of_homes_that_are_gone(ports: tuple[int, int], tmp_path: Path) -> None:
    gone, stopped = tmp_path / "gone", tmp_path / "stopped"
    for home in (gone, stopped):
        home.mkdir()
        close_ports(home, PROJECT_UIDS, SQLITE, "", ports[0])
    gone.rmdir()
    close_ports(tmp_path, PROJECT_UIDS, SQLITE, "", ports[1])
    assert (has_rules(gone), has_rules(stopped), has_rules(tmp_path)) == (False, True, True)
    reopen_ports(stopped)


@pytest.mark.nightly
@as_root
def test_a_server_that_stops_keeps_its_rules_only_while_jobs_run(open_home: Path) -> None:
    server = Server(open_home).start()
    name = server.submit("while [ ! -e end ]; do sleep 0.1; done", resources={"cpu": 1})
    folder = open_home / "runs" / server.wait(name, "running")["id"] / "node-0"
    server.stop()
    assert has_rules(open_home)
    server.start()
    (folder / "end").touch()
    server.wait(name)
    eventually(lambda: not any(folder.parent.glob("*.tmp")))
    server.stop()
    assert not has_rules(open_home)
