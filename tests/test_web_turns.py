"""Requests that wait for a thread: no client is kept waiting by another one's thousand."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from django.conf import settings as django_settings

from dstackweb.web_turns import SHORT_S, SPARE, TOGETHER, FairQueue, Turns, client_of, is_vital
from dstackweb.web_worker import Channel, WaitressWorker
from tests.support import eventually
from tests.test_web_limits import parse


def test_who_has_sent_a_thousand_requests_gets_one_turn_among_others() -> None:
    queue = FairQueue(lambda task: task[:2])
    for number in range(1000):
        queue.append(("10.0.0.1", "ada", number))
    for client in [("10.0.0.1", "bob"), ("10.0.0.2", "eve"), ("10.0.0.3", "dan")]:
        queue.append((*client, 0))
    served = [queue.popleft()[1] for _ in range(6)]
    assert served == ["ada", "eve", "dan", "bob", "ada", "ada"]
    rest = [queue.popleft() for _ in range(len(queue))]
    assert [task[2] for task in rest] == list(range(3, 1000)), "its own requests stay in order"
    assert not queue


def channel(path: str, *lines: str, address: str = "10.0.0.1") -> Any:
    head = "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()
    return SimpleNamespace(requests=[parse(head)], addr=(address, 4711), socket=None)


def test_a_client_is_its_address_and_what_lets_it_in() -> None:
    """And nothing that it may vary at will."""
    name = django_settings.SESSION_COOKIE_NAME
    assert client_of(channel("/api/v1/user", "Authorization: Bearer a", "Cookie: x=1")) == ("10.0.0.1", "a")
    assert client_of(channel("/api/v1/user", "Authorization: BEARER  a")) == ("10.0.0.1", "a")
    page = ("/p/main/", f"Cookie: x=1; {name}=s1; y=2", "Authorization: Bearer b")
    assert client_of(channel(*page)) == ("10.0.0.1", "s1")
    assert client_of(channel("/login/")) == ("10.0.0.1", "")
    assert client_of(channel("/login/", "X-Forwarded-For: 203.0.113.9")) == ("10.0.0.1", "")


def test_the_addresses_of_one_network_of_ipv6_take_one_turn() -> None:
    """Whoever has one of them has 2^64."""
    one, other = (client_of(channel("/login/", address=f"2001:db8::{last}")) for last in ("1", "ffff:2"))
    assert one == other == ("2001:db8::/64", "")
    assert client_of(channel("/login/", address="2001:db8:0:1::1")) != one
    assert client_of(channel("/login/", address="::ffff:10.0.0.1")) == ("10.0.0.1", "")


def test_behind_a_trusted_proxy_each_person_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    from ipaddress import ip_network

    from dstackweb import settings

    monkeypatch.setattr(settings, "DSTACKWEB_TRUSTED_PROXIES", [ip_network("10.0.0.1")])
    assert client_of(channel("/", "X-Forwarded-For: 198.51.100.7"))[0] == "198.51.100.7"
    assert client_of(channel("/", "X-Forwarded-For: 198.51.100.7", address="10.0.0.2"))[0] == "10.0.0.2"


def test_a_request_that_cannot_be_read_has_a_turn_too() -> None:
    broken = SimpleNamespace(requests=[parse(b"nonsense\r\n\r\n")], addr=("10.0.0.1", 4711), socket=None)
    assert client_of(broken) == ("10.0.0.1", "")


def test_few_short_requests_run_at_once_and_others_beside_those_that_take_long() -> None:
    now = 100.0
    queue = Turns(lambda task: ("10.0.0.1", task), lambda task: False, 8, lambda: now)
    for task in "abcde":
        queue.append(task)
    assert [queue.popleft() for _ in range(TOGETHER)] == ["a", "b"]
    assert not queue
    assert len(queue) == 3
    queue.end("a")
    assert queue
    assert queue.popleft() == "c"
    assert not queue
    now += SHORT_S
    assert queue, "b and c wait for something, perhaps for long"
    assert [queue.popleft() for _ in range(TOGETHER)] == ["d", "e"]
    assert not queue, "there is none"


def test_vital_requests_alternate_with_others_and_have_threads_that_writers_do_not_get() -> None:
    now = 100.0
    queue = Turns(lambda task: ("10.0.0.1", task), lambda task: task.startswith("v"), 4, lambda: now)
    for task in ("w1", "w2", "w3", "v1", "w4", "v2"):
        queue.append(task)
    begun = []
    while queue:
        begun.append(queue.popleft())
        now += SHORT_S
    assert begun == ["v1", "w1", "v2", "w2"], "two of four threads are for vital requests alone"
    assert len(queue) == 2
    queue.append("v3")
    assert queue
    assert queue.popleft() == "v3"
    now += SHORT_S
    assert not queue
    queue.end("w1")
    assert queue.popleft() == "w3"


def test_heartbeats_are_not_last_in_line_while_the_runs_of_sixty_hosts_start_behind_one_address() -> None:
    """Each run calls with a token of its own, each host polls and sends the heartbeats of its runs together."""
    now = 100.0
    queue = Turns(lambda task: ("10.0.0.1", task), lambda task: task[0] in "ph", 8, lambda: now)
    for run in range(600):
        queue.append(f"run {run}")
    for host in range(60):
        queue.append(f"poll {host}")
        queue.append(f"heartbeat {host}")
    served: list[str] = []
    while any(f"heartbeat {host}" not in served for host in range(60)):
        task = queue.popleft()
        served.append(task)
        queue.end(task)
        now += SHORT_S
    assert len(served) <= 2 * 120


@pytest.mark.parametrize(
    ("path", "vital"),
    [
        ("/healthz", True), ("/readyz", True), ("/api/v1/runner/heartbeats", True),
        ("/api/v1/runner/hosts/a/poll", True), ("/api/v1/runner/jobs/1/heartbeat", True),
        ("/api/v1/runner/instances/1/next", True),
        ("/api/v1/runner/jobs/1/exit", False), ("/api/v1/runs", False), ("/p/poll/", False), ("/readyz/x", False),
    ],
)  # fmt: skip
def test_health_heartbeats_and_polls_are_vital(path: str, vital: bool) -> None:
    assert is_vital(channel(path)) is vital


@contextlib.contextmanager
def serving(app: Any, threads: int) -> Iterator[Any]:
    """A server of a web worker with its loop, as gunicorn would start it. Its address is `server.address`."""
    worker: Any = object.__new__(WaitressWorker)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker.wsgi, worker.sockets, worker.alive = app, [SimpleNamespace(sock=listener)], True
        worker.cfg, worker.notify = SimpleNamespace(threads=threads), lambda: None
        server = worker._server()
        server.address = listener.getsockname()

        def serve() -> None:
            while worker.alive:
                worker._step(server)

        loop = threading.Thread(target=serve, daemon=True)
        loop.start()
        try:
            yield server
        finally:
            worker.alive = False
            loop.join()
            server.task_dispatcher.shutdown()
            server.close()


def ask(stack: contextlib.ExitStack, server: Any, who: str) -> socket.socket:
    client = stack.enter_context(socket.create_connection(server.address))
    head = f"GET /api/v1/user HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {who}\r\n\r\n"
    client.sendall(head.encode())
    return client


def waiting(arrived: list[str], go: threading.Event) -> Any:
    """An application whose requests wait for `go`; `arrived` has whose they are."""

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        arrived.append(environ["HTTP_AUTHORIZATION"][-1])
        go.wait(10)
        start_response("200 OK", [("Content-Length", "0")])
        return []

    return app


def test_the_server_gives_its_thread_to_the_clients_in_turn() -> None:
    served, go = list[str](), threading.Event()
    with serving(waiting(served, go), threads=1) as server, contextlib.ExitStack() as stack:

        def has_taken(requests: int) -> bool:
            return len(served) + len(server.task_dispatcher.queue) == requests

        for number, who in enumerate("aaaab", start=1):
            ask(stack, server, who)
            eventually(partial(has_taken, number))
        go.set()
        eventually(lambda: len(served) == 5)
    assert served == ["a", "a", "b", "a", "a"]


def test_requests_that_wait_for_something_keep_no_other_waiting() -> None:
    arrived, go = list[str](), threading.Event()
    with serving(waiting(arrived, go), threads=TOGETHER + 2 + SPARE) as server, contextlib.ExitStack() as stack:
        for who in "abcd"[: TOGETHER + 2]:
            ask(stack, server, who)
        eventually(lambda: len(arrived) == TOGETHER + 2)
        go.set()


def test_the_loop_leaves_a_connection_to_the_thread_that_sends_and_then_sends_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would run in circles otherwise: the socket takes more, and the buffer is in the thread's hands."""
    body = b"x" * 4_000_000
    sends, go = threading.Event(), threading.Event()
    send = Channel.send

    def slow(channel: Any, data: bytes, do_close: bool = True) -> int:
        sends.set()
        go.wait(10)
        return send(channel, data, do_close)

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    monkeypatch.setattr(Channel, "send", slow)
    with serving(app, threads=1) as server, contextlib.ExitStack() as stack:
        client = ask(stack, server, "a")
        assert sends.wait(10)
        [channel] = server.active_channels.values()
        assert channel.total_outbufs_len
        assert not channel.writable()
        go.set()
        answer = client.makefile("rb")
        while answer.readline().strip():
            pass
        assert answer.read(len(body)) == body
