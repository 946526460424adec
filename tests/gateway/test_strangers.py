"""What strangers do to the gateway's ports, by real connections: half requests, no logins, too many."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import asyncssh
import pytest
from aiohttp import web

from dstackweb.gateway import access
from dstackweb.gateway.access import Visitor
from dstackweb.gateway.http import HttpFront
from dstackweb.gateway.places import Places, report_refused_connections
from dstackweb.gateway.ssh import SshServer
from dstackweb.gateway.tunnels import Tunnels
from dstackweb.lib import logs
from tests.support import run_async

HALF = b"GET / HTTP/1.1\r\nHost: half"
WHOLE = b"GET / HTTP/1.1\r\nHost: whole\r\nConnection: close\r\n\r\n"
STRANGERS = [f"127.0.0.{number}" for number in range(2, 12)]


class Other:
    """The other end of a connection to the gateway."""

    def __init__(self) -> None:
        self.closed = 0

    def abort(self) -> None:
        self.closed += 1


def test_a_stranger_beyond_the_limit_costs_the_network_that_has_the_most_its_oldest_connection() -> None:
    places = Places(strangers=4, known=4)
    greedy, member, last = [Other() for _ in range(3)], Other(), Other()
    places.enter(member, "192.0.2.1")
    for number, other in enumerate(greedy):
        places.enter(other, f"2001:db8::{number}")
    places.enter(last, "192.0.2.2")
    assert [other.closed for other in (*greedy, member, last)] == [1, 0, 0, 0, 0]


def test_strangers_take_no_place_of_who_is_known_and_no_user_takes_all() -> None:
    places = Places(strangers=2, known=8)
    of_ann, of_bob = [Other() for _ in range(3)], Other()
    for other in of_ann[:2]:
        places.enter(other, "192.0.2.1")
        assert places.know(other, "ann")
        assert places.know(other, "ann")
    places.enter(of_ann[2], "192.0.2.1")
    assert not places.know(of_ann[2], "ann")
    places.enter(of_bob, "192.0.2.1")
    assert places.know(of_bob, "bob")
    for _ in range(10):
        places.enter(Other(), "192.0.2.1")
    assert not any(other.closed for other in (*of_ann[:2], of_bob))
    assert not places.know(of_ann[2], "bob"), "it was closed"
    places.leave(of_ann[0])
    places.enter(again := Other(), "192.0.2.1")
    assert places.know(again, "ann")


async def connected(port: int, address: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


async def all_closed(connections: Sequence[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    """Wait until the gateway has closed them."""
    await asyncio.gather(*(reader.read() for reader, _ in connections), return_exceptions=True)


@contextlib.asynccontextmanager
async def http_front(places: Places, *, idle_s: float = 60.0) -> AsyncIterator[int]:
    """A front that answers each request with `hello`, whose callers are known at /known; its port."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/known":
            places.know(request.transport, "ann")
        return web.Response(text="hello")

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    front = HttpFront(application, places, idle_s=idle_s)
    listener = await front.listen("127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        await front.close()


def test_half_requests_keep_no_one_out() -> None:
    async def work() -> None:
        async with http_front(Places(strangers=50, known=8)) as port:
            known, at_known = await connected(port)
            at_known.write(b"GET /known HTTP/1.1\r\nHost: known\r\n\r\n")
            assert b"200 OK" in await known.readuntil(b"hello")
            halves = [await connected(port, STRANGERS[number % 10]) for number in range(150)]
            for _, writer in halves:
                writer.write(HALF)
            reader, writer = await connected(port)
            writer.write(WHOLE)
            assert (await reader.read()).endswith(b"hello")
            await all_closed(halves[:100])
            at_known.write(WHOLE)
            assert (await known.read()).endswith(b"hello"), "who is known stays connected"

    run_async(work())


def test_a_request_must_be_there_in_time() -> None:
    async def answers(port: int, begun: bytes) -> int:
        reader, writer = await connected(port)
        writer.write(begun)
        return (await reader.read()).count(b"hello")

    async def work() -> None:
        async with http_front(Places(strangers=4, known=4), idle_s=0.5) as port:
            begun = (b"", HALF, WHOLE.replace(b"close", b"keep-alive") + HALF)
            assert await asyncio.gather(*(answers(port, sent) for sent in begun)) == [0, 0, 1]

    run_async(work())


def test_what_is_no_request_costs_no_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with http_front(Places(strangers=4, known=4)) as port:
            for odd in (b"GET / HTTP/1.1\r\nno header\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET /\0 x\r\n\r\n"):
                reader, writer = await connected(port)
                writer.write(odd)
                assert b" 400 " in await reader.read()

    run_async(work())
    assert caplog.records == []


def test_connections_that_can_not_be_taken_cost_one_line_a_minute_and_those_that_wait_are_taken_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = iter(range(500))
    plain = socket.socket.accept
    now = [0.0]

    def accept(listener: socket.socket) -> Any:
        if next(refusals, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return plain(listener)

    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.0)

    async def work() -> None:
        report_refused_connections(asyncio.get_running_loop())
        async with http_front(Places(strangers=4, known=4)) as port:
            monkeypatch.setattr(socket.socket, "accept", accept)
            reader, writer = await connected(port)
            writer.write(WHOLE)
            assert (await reader.read()).endswith(b"hello")

    run_async(work())
    assert [record.getMessage() for record in caplog.records] == [
        "1 connections could not be taken: Too many open files"
    ]


@pytest.fixture
def member_key(monkeypatch: pytest.MonkeyPatch) -> asyncssh.SSHKey:
    """A key that opens a run."""
    key = asyncssh.generate_private_key("ssh-ed25519")

    def by_key(_name: str, fingerprint: str) -> Visitor | None:
        return Visitor(1, "ann", 1, "dev") if fingerprint == key.get_fingerprint() else None

    monkeypatch.setattr(access, "by_key", by_key)
    return key


@contextlib.asynccontextmanager
async def ssh_front(home: Path, places: Places, **limits: float) -> AsyncIterator[int]:
    (home / "host_key").write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key())
    acceptor = await SshServer(Tunnels(places), places, **limits).listen("127.0.0.1", 0, str(home / "host_key"))
    async with acceptor:
        yield acceptor.get_port()


async def login(port: int, key: asyncssh.SSHKey) -> asyncssh.SSHClientConnection:
    return await asyncssh.connect(
        "127.0.0.1", port, username="dev", client_keys=[key], known_hosts=None, config=None, agent_path=None
    )


def test_who_does_not_log_in_keeps_no_one_with_a_key_out(tmp_path: Path, member_key: asyncssh.SSHKey) -> None:
    async def work() -> None:
        async with ssh_front(tmp_path, Places(strangers=20, known=8)) as port:
            before = await login(port, member_key)
            idle = [await connected(port, STRANGERS[number % 10]) for number in range(60)]
            after = await login(port, member_key)
            for connection in (before, after):
                assert not connection.is_closed()
            third = await login(port, member_key)  # of a user that has a quarter of the places already
            await third.wait_closed()
            await all_closed(idle[:40])
            before.abort()
            after.abort()

    run_async(work())


def test_a_login_must_be_over_in_time(tmp_path: Path) -> None:
    async def work() -> None:
        async with ssh_front(tmp_path, Places(strangers=4, known=4), login_s=0.05) as port:
            reader, _writer = await connected(port)
            assert (await reader.read()).startswith(b"SSH-2.0-dstackweb")

    run_async(work())


def test_what_is_no_login_costs_no_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "asyncssh")

    async def work() -> None:
        async with ssh_front(tmp_path, Places(strangers=4, known=4), login_s=0.3) as port:
            for odd in (b"GET / HTTP/1.1\r\n\r\n", b"SSH-1.0-x\r\n", b"SSH-2.0-x\r\n" + bytes(5000), b"\xff" * 5000):
                reader, writer = await connected(port)
                writer.write(odd)
                await all_closed([(reader, writer)])

    run_async(work())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
