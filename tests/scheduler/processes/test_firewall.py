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
from typing import Any

import psutil
import pytest

from dstackweb.backends.models import Ports
from dstackweb.runner.isolation import PROJECT_UIDS
from dstackweb.scheduler.management.commands.up import open_port
from dstackweb.scheduler.processes.protection import close_ports

FIRST = int(PROJECT_UIDS.partition("-")[0])
SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}
as_root = pytest.mark.needs("root", "nftables", "iproute2")


def postgres(host: str, port: int) -> dict[str, Any]:
    return {"ENGINE": "django.db.backends.postgresql", "NAME": "d", "HOST": host, "PORT": port}


def tables() -> set[str]:
    listed = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
    return set(listed.split("\n"))


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """Two ports that something listens on, on all addresses; the rules made meanwhile are removed."""
    before = tables()
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as other:
        yield one.getsockname()[1], other.getsockname()[1]
    for table in tables() - before:
        subprocess.run(["nft", "delete", *table.split()], check=True)


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
def test_users_of_projects_cannot_connect_to_the_database_and_redis(ports: tuple[int, int]) -> None:
    database, redis = ports
    own = 8000
    with socket.create_server(("", 0)) as listening:
        api = listening.getsockname()[1]
        for _again in range(2):
            made = close_ports(
                PROJECT_UIDS, postgres("localhost", database), f"redis://:secret@127.0.0.1:{redis}/0", own
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
    ports: tuple[int, int],
) -> None:
    """Nobody answers there: whoever may try waits."""
    bridge, run = f"br-{os.getpid() % 10**6}", partial(subprocess.run, check=True)
    run(["ip", "link", "add", bridge, "type", "veth", "peer", "name", f"x{bridge}"])
    try:
        run(["ip", "addr", "add", "198.18.7.1/30", "dev", bridge])
        for link in (bridge, f"x{bridge}"):
            run(["ip", "link", "set", link, "up"])
        close_ports(PROJECT_UIDS, postgres("127.0.0.1", 5433), "", 8000)
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
def test_users_of_projects_cannot_answer_in_place_of_a_server_that_is_not_running(ports: tuple[int, int]) -> None:
    """Runners would send the tokens of all jobs there, proxies the sessions of all people."""
    with listening_as(FIRST) as own, listening_as(FIRST) as other:
        assert answers(own)
        close_ports(PROJECT_UIDS, SQLITE, "", own)
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


def test_without_ports_there_is_nothing_to_close() -> None:
    assert close_ports("nobody", SQLITE, "", 8000) == Ports.NONE
    assert close_ports("nobody", postgres("/run/postgresql", 5432), "unix:///run/redis.sock", 8000) == Ports.NONE


def test_they_count_as_open_where_they_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    database = postgres("127.0.0.1", 5432)
    assert close_ports("nobody", database, "", 8000) == Ports.OPEN
    monkeypatch.setenv("PATH", "/nonexistent")
    assert close_ports(PROJECT_UIDS, database, "", 8000) == Ports.OPEN
    assert close_ports(PROJECT_UIDS, SQLITE, "redis://localhost:6379/0", 8000) == Ports.OPEN


@as_root
def test_rules_that_the_kernel_refuses_leave_the_ports_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstackweb.scheduler.processes.protection._rules", lambda *_: ["no such rule"])
    assert close_ports(PROJECT_UIDS, postgres("127.0.0.1", 5432), "", 8000) == Ports.OPEN
