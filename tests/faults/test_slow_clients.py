"""Clients that withhold the rest of a request keep a connection, no thread, and only for a while."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import pytest

from dstackweb import web_worker
from dstackweb.web_worker import Channel, Parser, maintain
from tests.server import TOKEN, Server

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


@pytest.mark.slow
def test_others_are_served_while_clients_withhold_their_requests(server: Server, clients: list[socket.socket]) -> None:
    for _ in range(20):
        assert server.http.get("/hosts").status_code == 200
    name = server.submit("echo hello")
    assert server.wait(name, deadline=60)["status"] == "done"
    clients[0].sendall(b"\r\n")
    assert clients[0].recv(100).startswith(b"HTTP/1.1 200")
    clients[1].sendall(b"x" * (1000 - len(b"username=")))
    assert clients[1].recv(100).startswith(b"HTTP/1.1 403")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/login/", "/api/v1/nowhere", "/api/v1/projects/main/archives/null%2Cnull"])
def test_a_head_request_is_answered_with_the_header_alone(server: Server, path: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        head = f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n"
        client.sendall(f"{head}\r\n{head}Connection: close\r\n\r\n".encode())
        answer = b""
        while part := client.recv(65536):
            answer += part
    first, second, rest = answer.split(b"\r\n\r\n")
    assert first.partition(b" ")[0] == second.partition(b" ")[0] == b"HTTP/1.1"
    assert rest == b""


@pytest.mark.slow
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
        request=None, requests=[], total_outbufs_len=0, last_activity=1000.0, will_close=False, lingers_since=None
    )
    found.__dict__.update(values)
    found.must_end = lambda now: Channel.must_end(found, now)
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
    ],
)
def test_an_idle_connection_is_closed(values: dict[str, Any], ends_after: float | None) -> None:
    one: Any = channel(**values)
    maintain({3: one}, 1000 + (ends_after or 1e6) - 1)
    assert not one.will_close
    if ends_after is not None:
        maintain({3: one}, 1000 + ends_after + 2)
        assert one.will_close
