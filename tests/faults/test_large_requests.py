"""A body that is larger than its address allows is refused before it is stored, and its sender can read why."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.server import Server

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("faults")]
MIB = 1 << 20


def held_by(server: Server) -> int:
    """Bytes of the temporary files that the web processes have open."""
    total = 0
    for pid in server.role_pids("gunicorn"):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                total += file.stat().st_size if "(deleted)" in str(file.readlink()) else 0
    return total


def send(server: Server, head: str, body: Iterator[bytes] | list[bytes]) -> bytes:
    """The answer, read once all of the body is sent, as clients do that look at nothing before."""
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=60)) as client:
        client.sendall(head.replace("\n", "\r\n").encode() + b"\r\n")
        for piece in body:
            client.sendall(piece)
        answer = b""
        while part := client.recv(65536):
            answer += part
        return answer


@pytest.mark.parametrize(
    ("path", "kind", "says"),
    [
        ("/login/", b"text/html", b"Nothing was changed"),
        ("/p/main/queues/default/change/", b"text/html", b"Nothing was changed"),
        ("/api/v1/projects/main/runs", b"application/json", b"at most 4 MiB"),
        ("/api/v1/nothing", b"application/json", b"at most 4 MiB"),
    ],
)
def test_ninety_megabytes_are_refused_and_not_stored(server: Server, path: str, kind: bytes, says: bytes) -> None:
    before, most = held_by(server), 0

    def body() -> Iterator[bytes]:
        nonlocal most
        for _ in range(90):
            yield b"x" * MIB
            most = max(most, held_by(server) - before)

    answer = send(server, f"POST {path} HTTP/1.1\nHost: localhost\nContent-Length: {90 * MIB}\n", body())
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nContent-Type: " + kind in answer
    assert b"\r\nConnection: close" in answer
    assert says in answer
    assert most < MIB


def test_chunks_end_at_the_limit(server: Server) -> None:
    chunk = b"100000\r\n" + b"x" * MIB + b"\r\n"
    head = "POST /login/ HTTP/1.1\nHost: localhost\nTransfer-Encoding: chunked\n"
    answer = send(server, head, [chunk] * 40)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_client_that_asks_first_is_refused_at_once(server: Server) -> None:
    head = "PUT /api/v1/projects/main/archives/{} HTTP/1.1\nHost: localhost\nContent-Length: {}\nExpect: 100-continue\n"
    assert send(server, head.format("0" * 64, 100 * MIB), []).startswith(b"HTTP/1.1 413 ")
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=60)) as client:
        client.sendall(head.format("0" * 64, MIB).replace("\n", "\r\n").encode() + b"\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 100 Continue")


def test_others_go_on_after_a_refusal(server: Server) -> None:
    head = f"POST /login/ HTTP/1.1\nHost: localhost\nContent-Length: {90 * MIB}\n"
    refused = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(20)]
    for client in refused:
        client.sendall(head.replace("\n", "\r\n").encode() + b"\r\n" + b"x" * 1000)
    for client in refused:
        assert client.recv(20).startswith(b"HTTP/1.1 413")
    for _ in range(20):
        assert server.http.get("/hosts").status_code == 200
    for client in refused:
        client.close()
