"""Strangers hold what connections a gateway has, while a member comes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dstackweb.lib.process import raise_file_limit
from tests.gateway.conftest import Gateway

pytestmark = pytest.mark.nightly
ADDRESSES = [f"127.0.0.{number}" for number in range(2, 12)]


def held(port: int, number: int, sent: bytes) -> Iterator[socket.socket]:
    """So many connections from ten addresses that send this and no more."""
    for index in range(number):
        connection = socket.create_connection(("127.0.0.1", port), 5, source_address=(ADDRESSES[index % 10], 0))
        connection.sendall(sent)
        yield connection


def test_a_member_enters_and_opens_pages_beside_half_requests_and_connections_without_a_login(
    gateway: Gateway, key: Path
) -> None:
    raise_file_limit(4096)  # of this process, which has all these connections
    log = gateway.server.home / "logs" / "gateway.log"
    before = log.stat().st_size
    name = gateway.submit()
    gateway.ready(name)
    strangers = [*held(gateway.http_port, 1500, b"GET / HTTP/1.1\r\nHost: half"), *held(gateway.ssh_port, 600, b"")]
    try:
        assert httpx.get(f"http://127.0.0.1:{gateway.http_port}/", timeout=20).status_code == 404
        assert gateway.ssh(key, name, "echo entered").stdout == b"entered\n"
    finally:
        for connection in strangers:
            connection.close()
    assert log.read_bytes()[before:].count(b"\n") < 20
    gateway.server.api("POST", f"runs/{name}/stop")
    gateway.server.wait(name)
