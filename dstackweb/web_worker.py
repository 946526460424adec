"""A gunicorn worker in which waitress serves: a request gets a thread once it has arrived as a whole.

So clients that are slow, that withhold the rest of a request or don't take its answer, hold a connection and no thread.
gunicorn keeps the processes; waitress reads and writes the connections of each in one loop, and drops those that stand
still. A body is stored only as far as its address allows (`web_limits`), and clients that send more can read why not.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import lru_cache
from typing import Any

from gunicorn.workers.base import Worker
from waitress import wasyncore
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser, ParsingError
from waitress.server import TcpWSGIServer, create_server
from waitress.task import ErrorTask, ThreadedTaskDispatcher, WSGITask
from waitress.utilities import BadRequest, RequestEntityTooLarge

from dstackweb.lib.network import network_of
from dstackweb.lib.process import raise_file_limit
from dstackweb.lib.proxies import CONNECTION
from dstackweb.web_limits import AT_ONCE, SMALL, BodyTooLarge, TooMuchAtOnce, limit_of
from dstackweb.web_turns import SHORT_S, Turns, client_of, is_vital

REQUEST_S = 30.0
"""A request that is smaller than `RATE` times this must be there by then."""
RATE = 16 * 1024
"""Bytes per second that a larger one must have on average."""
STILL_S = 30.0
"""A connection that waits for its client for longer is closed: for the next request, or to take the answer."""
TAKE_RATE = 4 * 1024
"""Bytes per second of an answer that a client must take on average, after `STILL_S`."""
UNSENT = 512 << 20
"""Bytes of answers that a process keeps, most of them in files, for clients that take them slowly."""
LARGE = 256 * 1024
"""An answer of which so much is unsent may cost another one its connection."""
FRAME = 8 * 1024
"""The longest size or trailer of a chunk, and what all of them may have beside a `FRAME_SHARE` of the body."""
FRAME_SHARE = 64
CONNECTIONS, SPARE = 1000, 100
"""Beyond the first number each new connection costs an idle one; beyond both no more are taken."""
STEP_S = 0.25
LINGER_S = 5.0
"""How long what a client sends after its request was refused is thrown away, so that it reads the answer."""
LATE_S = 0.5
"""A connection this young may have a request on its way, also while the process stops."""


@lru_cache(maxsize=16)
def _with_limit(adj: Any, limit: int) -> Any:
    """waitress's settings for bodies of `limit` bytes; waitress refuses those that reach its number."""
    own = copy(adj)
    own.max_request_body_size = limit + 1
    return own


class Parser(HTTPRequestParser):
    """A request that arrives. It knows since when, and the limit of its address.

    `held` is how many bytes of all requests the process holds.
    """

    adj: Any
    error: Any
    completed: bool
    has_more = False

    def __init__(self, adj: Any, held: Callable[[], int] = int) -> None:
        super().__init__(adj)
        self.began = time.time()
        self._held = held

    def parse_header(self, header_plus: bytes) -> None:
        try:
            super().parse_header(header_plus)
        except ValueError:  # a number with thousands of digits
            raise ParsingError("Content-Length is invalid") from None
        if self.chunked and "CONTENT_LENGTH" in self.headers:
            raise ParsingError("Content-Length and Transfer-Encoding")
        self.adj = _with_limit(self.adj, limit_of(self.path))

    def received(self, data: bytes) -> int:
        """How many bytes it took. What comes after a request that is refused belongs to it.

        So does a request before the answer to this one, and the connection ends with that answer: one packet of
        requests would otherwise get any amount of answers.
        """
        taken = super().received(data)
        if self.chunked and not self.error and self._is_mostly_frames():
            self.error = BadRequest("The chunks are too small")
        if isinstance(self.error, RequestEntityTooLarge):
            self.error = BodyTooLarge(self.path, self.headers.get("ACCEPT_LANGUAGE", ""))
        elif self.body_bytes_received > SMALL and not self.error and self._held() > AT_ONCE:
            self.error = TooMuchAtOnce(self.path, self.headers.get("ACCEPT_LANGUAGE", ""))
        if self.error is None:
            self.has_more = bool(self.completed and not self.empty and data[taken:].strip())
            return len(data) if self.has_more else int(taken)
        self.completed, self.expect_continue = True, False
        return len(data)

    def _is_mostly_frames(self) -> bool:
        """Whether its chunks have too much beside what they are for: waitress reads that over and over."""
        received: Any = self.body_rcv
        frames = self.body_bytes_received - len(received)
        unread = len(received.control_line) + len(received.trailer)
        return bool(unread > FRAME or frames > FRAME + len(received) // FRAME_SHARE)

    def is_late(self, now: float) -> bool:
        """Whether the rest of it is not waited for any longer."""
        received = self.header_bytes_received + self.body_bytes_received
        return bool(now - self.began > REQUEST_S + received / RATE)


class Task(WSGITask):
    """An answer; while the process stops, or before a request that came too early, the last one of its connection."""

    def __init__(self, channel: Channel, request: Parser) -> None:
        if not channel.server.accepting or request.has_more:
            request.headers["CONNECTION"] = "close"
        channel.has_refused = channel.has_refused or request.has_more
        super().__init__(channel, request)

    def get_environment(self) -> dict[str, Any]:
        """As waitress makes it, with the connection, for `lib.proxies`."""
        environ: dict[str, Any] = super().get_environment()
        return environ | {CONNECTION: self.channel.socket}

    def write(self, data: bytes) -> None:
        """Of the answer to HEAD only the header is sent: Django leaves that to the server."""
        super().write(b"" if self.request.command == "HEAD" else data)

    def finish(self) -> None:
        if self.request.command == "HEAD":
            self.write(b"")
            self.chunked_response = False
        super().finish()

    def set_close_on_finish(self) -> None:
        """Not for answers to polls that have no body, and so no length: their connection goes on."""
        if self.has_body or self.version != "1.1" or self.request.headers.get("CONNECTION", "").lower() == "close":
            super().set_close_on_finish()


class RefusingTask(ErrorTask):
    """The answer to a request that was not taken, or not in full."""

    def execute(self) -> None:
        self.channel.has_refused = True
        super().execute()


class Channel(HTTPChannel):
    task_class = Task
    error_task_class = RefusingTask
    close_when_flushed: bool
    has_refused = False
    lingers_since: float | None = None
    unsent_since: float | None = None
    """Since when there was always something left to send; `taken` bytes were sent since then."""
    taken = 0
    is_sending = False
    """Whether a thread sends what it has just written."""

    def parser_class(self, adj: Any) -> Parser:
        return Parser(adj, self._held)

    def _held(self) -> int:
        """Bytes of bodies in this process."""
        return sum(channel.holds() for channel in list(self.server.active_channels.values()))

    def holds(self) -> int:
        """Bytes of bodies that arrive here or are being answered."""
        return sum(one.body_bytes_received for one in (self.request, *self.requests) if one is not None)

    def received(self, data: bytes) -> bool:
        return True if self.lingers_since is not None else bool(super().received(data))

    def handle_write(self) -> None:
        """Send what there is. After a refusal only this side is closed at first.

        If both were, the system would throw the answer away with what the client still sends.
        """
        if self.has_refused and self.close_when_flushed and not self.will_close:
            self._flush_exception(self._flush_some)
            if not self.total_outbufs_len and not self.will_close:
                self.close_when_flushed, self.lingers_since = False, time.time()
                with suppress(OSError):
                    self.socket.shutdown(socket.SHUT_WR)
            if not self.will_close:
                return
        super().handle_write()

    def service(self) -> None:
        try:
            super().service()
        finally:
            self.server.task_dispatcher.queue.end(self)

    def write_soon(self, data: Any) -> int:
        """Take a part of an answer, and never wait for the client. Raises ClientDisconnected."""
        if not self.total_outbufs_len:
            self.unsent_since, self.taken = time.time(), 0
        elif self.total_outbufs_len > LARGE:
            make_room(self.server.active_channels, UNSENT)
        self.is_sending = True
        try:
            return int(super().write_soon(data))
        finally:
            self.is_sending = False
            if self.total_outbufs_len:
                self.server.pull_trigger()  # the loop sends the rest

    def writable(self) -> bool:
        """Not while a thread sends: the loop, which finds that it can't, would look again and again, and that thread
        wait for its turn at the interpreter meanwhile."""
        return not self.is_sending and bool(super().writable())

    def send(self, data: bytes, do_close: bool = True) -> int:
        sent = int(super().send(data, do_close=do_close))
        self.taken += sent
        return sent

    def is_slow(self, now: float) -> bool:
        """Whether the client takes its answer at less than the least rate."""
        if not self.total_outbufs_len or self.unsent_since is None:
            return False
        return now - self.unsent_since > STILL_S + self.taken / TAKE_RATE

    def must_end(self, now: float) -> bool:
        """Whether the client has stood still, or has sent what no one reads, for too long."""
        if self.lingers_since is not None:
            return now - self.lingers_since > LINGER_S
        if self.is_slow(now) or (self.request is not None and self.request.is_late(now)):
            return True
        waits = not self.requests or self.total_outbufs_len
        return bool(waits and now - self.last_activity > STILL_S)

    def is_busy(self, now: float) -> bool:
        """Whether it has, or may have, a request to answer."""
        return bool(self.requests or self.request or self.total_outbufs_len or now - self.last_activity < LATE_S)


class Dispatcher(ThreadedTaskDispatcher):
    """waitress's threads, which requests get as `Turns` has it."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.queue = Turns(client_of, is_vital, threads)
        self.set_thread_count(threads)

    def add_task(self, task: Any) -> None:
        with self.lock:
            self.queue.append(task)
        self.wake()

    def wake(self) -> None:
        """A thread for the next request, if it may begin; those that have ended one take the next by themselves."""
        with self.lock:
            if self.queue:
                self.queue_cv.notify()


def maintain(channels: dict[int, Channel], now: float) -> None:
    """Close the connections of clients that stand still."""
    for channel in list(channels.values()):
        if channel.must_end(now):
            channel.will_close = True


def make_room(channels: dict[int, Channel], limit: int) -> None:
    """Close the connections that have kept answers the longest, while all together keep more than `limit` bytes."""
    keeping = [channel for channel in list(channels.values()) if channel.total_outbufs_len and not channel.will_close]
    excess = sum(channel.total_outbufs_len for channel in keeping) - limit
    for channel in sorted(keeping, key=lambda channel: channel.unsent_since or 0.0) if excess > 0 else ():
        if excess <= 0:
            return
        excess -= channel.total_outbufs_len
        channel.will_close = True


def admit(server: Any, client: socket.socket, address: Any, adj: Any, map: Any) -> Channel:
    """Take a connection. If there are too many, close one that has no request: of the client that has the most."""
    if len(server.active_channels) >= CONNECTIONS:
        idle = [one for one in list(server.active_channels.values()) if not one.requests and not one.total_outbufs_len]
        if idle:
            [(most, _count)] = Counter(network_of(one.addr[0]) for one in idle).most_common(1)
            oldest = min((one for one in idle if network_of(one.addr[0]) == most), key=lambda one: one.creation_time)
            oldest.will_close = True
    return Channel(server, client, address, adj, map=map)


def _is_any_busy(server: TcpWSGIServer) -> bool:
    now = time.time()
    return any(channel.is_busy(now) for channel in list(server.active_channels.values()))


class WaitressWorker(Worker):
    def run(self) -> None:
        """Serve until gunicorn says stop, then answer what has come so far, for `graceful_timeout` at most."""
        server = self._server()
        while self.alive and self.ppid == os.getppid():
            self._step(server)
        server.accepting = False
        ends = time.monotonic() + self.cfg.graceful_timeout
        while time.monotonic() < ends and _is_any_busy(server):
            self._step(server)
        server.task_dispatcher.shutdown(timeout=1)

    def _server(self) -> TcpWSGIServer:
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # more requests than threads are no news
        most = raise_file_limit(4 * CONNECTIONS)
        server = create_server(
            self.wsgi,
            sockets=[listener.sock for listener in self.sockets],
            _dispatcher=Dispatcher(self.cfg.threads),
            ident=None,
            asyncore_use_poll=True,  # select() knows 1024 files
            connection_limit=min(CONNECTIONS + SPARE, most // 2),
            outbuf_high_watermark=sys.maxsize,  # no thread waits until a client has taken an answer
            cleanup_interval=5,
            max_request_header_size=64 * 1024,
            clear_untrusted_proxy_headers=False,  # Django's settings say which are believed
        )
        server.channel_class = admit
        server.maintenance = lambda now: maintain(server.active_channels, now)
        return server

    def _step(self, server: TcpWSGIServer) -> None:
        self.notify()
        alive, ends = self.alive, time.monotonic() + STEP_S
        while (left := ends - time.monotonic()) > 0 and alive == self.alive:
            waiting = len(server.task_dispatcher.queue)
            wasyncore.loop(timeout=min(left, SHORT_S) if waiting else left, use_poll=True, map=server._map, count=1)
            if waiting:
                server.task_dispatcher.wake()
