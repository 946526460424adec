"""Projects' users can't connect to the server's database and Redis: real connections through real rules."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from dstackweb.backends.models import Ports
from dstackweb.runner.isolation import PROJECT_UIDS
from dstackweb.scheduler.processes.firewall import close_ports

FIRST = int(PROJECT_UIDS.partition("-")[0])
SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may change the firewall")


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


@as_root
def test_users_of_projects_cannot_connect_to_the_database_and_redis(ports: tuple[int, int]) -> None:
    database, redis = ports
    with socket.create_server(("", 0)) as listening:
        api = listening.getsockname()[1]
        for _again in range(2):
            made = close_ports(PROJECT_UIDS, postgres("localhost", database), f"redis://:secret@127.0.0.1:{redis}/0")
            assert made == Ports.CLOSED
        for port in (database, redis):
            assert not connects(FIRST, "127.0.0.1", port)
            assert not connects(FIRST + 999_999, "127.0.0.2", port)
            assert connects(0, "127.0.0.1", port)
            assert connects(65534, "127.0.0.1", port)
        assert connects(FIRST, "127.0.0.1", api)


def test_without_ports_there_is_nothing_to_close() -> None:
    assert close_ports(PROJECT_UIDS, SQLITE, "") == Ports.NONE
    assert close_ports(PROJECT_UIDS, postgres("/run/postgresql", 5432), "unix:///run/redis.sock") == Ports.NONE


def test_they_count_as_open_where_they_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    database = postgres("127.0.0.1", 5432)
    assert close_ports("nobody", database, "") == Ports.OPEN
    monkeypatch.setenv("PATH", "/nonexistent")
    assert close_ports(PROJECT_UIDS, database, "") == Ports.OPEN
    assert close_ports(PROJECT_UIDS, SQLITE, "redis://localhost:6379/0") == Ports.OPEN


@as_root
def test_rules_that_the_kernel_refuses_leave_the_ports_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstackweb.scheduler.processes.firewall._rules", lambda *_: ["no such rule"])
    assert close_ports(PROJECT_UIDS, postgres("127.0.0.1", 5432), "") == Ports.OPEN
