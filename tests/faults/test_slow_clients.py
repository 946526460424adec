"""Clients that withhold the rest of a request keep a connection, no thread, and only for a while."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from dstackweb import web_worker
from dstackweb.web_worker import Channel, Parser, maintain
from tests.forms import body_of
from tests.server import PASSWORD, TOKEN, Server

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("faults")]

CLIENTS = 40
HEADERS = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
BODY = b"POST /login/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nusername="


@pytest.fixture
def clients(server: Server) -> Iterator[list[socket.socket]]:
    """Far more connections than the server has threads, each with half a request."""
    with ExitStack() as stack:
        opened = []
        for number in range(CLIENTS):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            client.sendall(BODY if number % 2 else HEADERS)
            opened.append(client)
        yield opened


def test_others_are_served_while_clients_withhold_their_requests(server: Server, clients: list[socket.socket]) -> None:
    for _ in range(20):
        assert server.http.get("/hosts").status_code == 200
    name = server.submit("echo hello")
    assert server.wait(name, deadline=60)["status"] == "done"
    clients[0].sendall(b"\r\n")
    assert clients[0].recv(100).startswith(b"HTTP/1.1 200")
    clients[1].sendall(b"x" * (1000 - len(b"username=")))
    assert clients[1].recv(100).startswith(b"HTTP/1.1 403")


@pytest.mark.parametrize("path", ["/login/", "/api/v1/nowhere", "/api/v1/projects/main/archives/null%2Cnull"])
def test_a_head_request_is_answered_with_the_header_alone(server: Server, path: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        head = f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n"
        answer = b""
        client.sendall(f"{head}\r\n".encode())
        while b"\r\n\r\n" not in answer:
            answer += client.recv(65536)
        client.sendall(f"{head}Connection: close\r\n\r\n".encode())
        while part := client.recv(65536):
            answer += part
    first, second, rest = answer.split(b"\r\n\r\n")
    assert first.partition(b" ")[0] == second.partition(b" ")[0] == b"HTTP/1.1"
    assert rest == b""


def slow_reader(server: Server, request: str) -> socket.socket:
    """A connection that sends this and takes next to nothing of the answer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(60)
    client.connect(("127.0.0.1", server.port))
    client.sendall(request.encode())
    head = client.recv(2000)
    assert head.startswith(b"HTTP/1.1 200"), head
    return client


def test_others_are_served_while_clients_do_not_take_long_logs(server: Server) -> None:
    name = server.submit("echo hello")
    server.wait(name)
    logs = [path for path in (server.home / "joblogs").rglob("*") if path.is_file()]
    log = max(logs, key=lambda path: path.stat().st_mtime)
    log.write_bytes(b"a" * 30_000_000)  # more than this server's limit
    with ExitStack() as stack:
        browser = stack.enter_context(httpx.Client(base_url=server.url, follow_redirects=True, timeout=30))
        body = body_of(browser.get("/login/").text, {"username": "admin", "password": PASSWORD})
        browser.post("/login/", data=body)
        cookies = "; ".join(f"{cookie}={value}" for cookie, value in browser.cookies.items())
        get = f"GET /p/main/runs/{name}/log/?download=1 HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {cookies}\r\n\r\n"
        size = int(browser.head(f"/p/main/runs/{name}/log/?download=1").headers["Content-Length"])
        assert size == 30_000_000
        readers = [stack.enter_context(slow_reader(server, get)) for _ in range(12)]  # the server has eight threads
        for _ in range(20):
            assert server.http.get("/hosts").status_code == 200
            assert all(reader.recv(100) for reader in readers)


def test_others_are_served_while_clients_ask_for_many_files_at_once(server: Server) -> None:
    page = server.http.get(f"{server.url}/login/").text
    path = re.findall(r"/static/site\.[\w.]*css", page)[0]
    get = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with ExitStack() as stack:
        readers = [stack.enter_context(slow_reader(server, get * 90)) for _ in range(CLIENTS)]
        for _ in range(20):
            assert server.http.get("/hosts").status_code == 200
            assert all(reader.recv(100) for reader in readers)


def test_an_answer_without_a_body_leaves_the_connection_open(server: Server) -> None:
    invite = server.http.post("/hosts/invites").json()["id"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    with closing(connection):
        connection.request("DELETE", f"/api/v1/hosts/invites/{invite}", headers={"Authorization": f"Bearer {TOKEN}"})
        opened = connection.sock
        answer = connection.getresponse()
        answer.read()
        assert (answer.status, answer.will_close) == (204, False)
        connection.request("GET", "/healthz")
        assert connection.sock is opened
        assert connection.getresponse().status == 200


def channel(**values: Any) -> SimpleNamespace:
    """What `Channel.must_end` looks at: nothing is received, running or to be sent."""
    found = SimpleNamespace(
        request=None, requests=[], total_outbufs_len=0, last_activity=1000.0, will_close=False, lingers_since=None,
        unsent_since=None, taken=0, creation_time=1000.0, addr=("10.0.0.1", 1),
    )  # fmt: skip
    found.__dict__.update(values)
    found.must_end = lambda now: Channel.must_end(found, now)
    found.is_slow = lambda now: Channel.is_slow(found, now)
    return found


def half(received: int) -> Parser:
    request = Parser(None)
    request.began, request.body_bytes_received = 1000.0, received
    return request


@pytest.mark.parametrize(
    ("values", "ends_after"),
    [
        ({}, web_worker.STILL_S),
        ({"request": half(10), "last_activity": 9e9}, web_worker.REQUEST_S),
        ({"request": half(100 * web_worker.RATE), "last_activity": 9e9}, web_worker.REQUEST_S + 100),
        ({"requests": ["running"]}, None),
        ({"requests": ["running"], "total_outbufs_len": 5}, web_worker.STILL_S),
        (
            {"total_outbufs_len": 5, "unsent_since": 1000.0, "taken": 100 * web_worker.TAKE_RATE, "last_activity": 9e9},
            web_worker.STILL_S + 100,
        ),
    ],
)
def test_an_idle_connection_is_closed(values: dict[str, Any], ends_after: float | None) -> None:
    one: Any = channel(**values)
    maintain({3: one}, 1000 + (ends_after or 1e6) - 1)
    assert not one.will_close
    if ends_after is not None:
        maintain({3: one}, 1000 + ends_after + 2)
        assert one.will_close


def closed(channels: dict[int, Any]) -> list[int]:
    return [number for number, channel in channels.items() if channel.will_close]


def test_of_too_many_unsent_answers_those_that_have_waited_longest_are_given_up() -> None:
    channels: dict[int, Any] = {
        number: channel(total_outbufs_len=size, unsent_since=since)
        for number, (size, since) in enumerate([(40, 3.0), (40, 1.0), (0, None), (30, 2.0), (10, 4.0)])
    }
    web_worker.make_room(channels, 120)
    assert closed(channels) == []
    web_worker.make_room(channels, 100)
    assert closed(channels) == [1]
    web_worker.make_room(channels, 30)
    assert closed(channels) == [0, 1, 3]


def test_a_full_server_closes_the_oldest_idle_connection_of_whoever_has_the_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channels: dict[int, Any] = {
        1: channel(addr=("10.0.0.1", 1), creation_time=1.0),
        2: channel(addr=("10.0.0.2", 2), creation_time=3.0),
        3: channel(addr=("10.0.0.2", 3), creation_time=2.0),
        4: channel(addr=("10.0.0.3", 4), creation_time=0.0, requests=["running"]),
        5: channel(addr=("10.0.0.3", 5), creation_time=0.0, total_outbufs_len=1),
        6: channel(addr=("10.0.0.3", 6), creation_time=0.0, requests=["running"]),
    }
    server = SimpleNamespace(active_channels=channels)
    monkeypatch.setattr(web_worker, "Channel", lambda *_, **__: "new")
    monkeypatch.setattr(web_worker, "CONNECTIONS", 7)
    assert web_worker.admit(server, None, None, None, None) == "new"  # type: ignore[arg-type]
    assert closed(channels) == []
    monkeypatch.setattr(web_worker, "CONNECTIONS", 6)
    web_worker.admit(server, None, None, None, None)  # type: ignore[arg-type]
    assert closed(channels) == [3]


def test_the_addresses_of_one_network_of_ipv6_count_as_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    channels: dict[int, Any] = {
        1: channel(addr=("10.0.0.1", 1), creation_time=0.0),
        2: channel(addr=("10.0.0.1", 2), creation_time=1.0),
        **{last: channel(addr=(f"2001:db8::{last}", 1), creation_time=float(last)) for last in range(3, 6)},
    }
    monkeypatch.setattr(web_worker, "Channel", lambda *_, **__: "new")
    monkeypatch.setattr(web_worker, "CONNECTIONS", 5)
    web_worker.admit(SimpleNamespace(active_channels=channels), None, None, None, None)  # type: ignore[arg-type]
    assert closed(channels) == [3]


def test_one_address_with_all_connections_does_not_keep_others_out(server: Server) -> None:
    with ExitStack() as stack:
        for _number in range(web_worker.CONNECTIONS + web_worker.SPARE + 20):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            client.sendall(HEADERS)
        with socket.socket() as other:
            other.bind(("127.0.0.2", 0))
            other.settimeout(web_worker.REQUEST_S - 5)
            other.connect(("127.0.0.1", server.port))
            other.sendall(HEADERS + b"\r\n")
            assert other.recv(12) == b"HTTP/1.1 200"
