"""A gunicorn worker in which waitress serves: a request gets a thread once it has arrived as a whole.

So clients that are slow, or that withhold the rest of a request, hold a connection and no thread. gunicorn keeps the
processes; waitress reads and writes the connections of each in one loop, and drops those that stand still.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from typing import Any

from gunicorn.workers.base import Worker
from waitress import wasyncore
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser
from waitress.server import TcpWSGIServer, create_server
from waitress.task import WSGITask

from dstackweb import settings

REQUEST_S = 30.0
"""A request that is smaller than `RATE` times this must be there by then."""
RATE = 16 * 1024
"""Bytes per second that a larger one must have on average."""
STILL_S = 30.0
"""A connection that waits for its client for longer is closed: for the next request, or to take the answer."""
CONNECTIONS = 1000
STEP_S = 0.25
LATE_S = 0.5
"""A connection this young may have a request on its way, also while the process stops."""


class Parser(HTTPRequestParser):
    """Knows since when its request arrives."""

    def __init__(self, adj: Any) -> None:
        super().__init__(adj)
        self.began = time.time()

    def is_late(self, now: float) -> bool:
        """Whether the rest of it is not waited for any longer."""
        received = self.header_bytes_received + self.body_bytes_received
        return bool(now - self.began > REQUEST_S + received / RATE)


class Task(WSGITask):
    """An answer; while the process stops, the last one of its connection."""

    def __init__(self, channel: Channel, request: Parser) -> None:
        if not channel.server.accepting:
            request.headers["CONNECTION"] = "close"
        super().__init__(channel, request)

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


class Channel(HTTPChannel):
    parser_class = Parser
    task_class = Task

    def must_end(self, now: float) -> bool:
        """Whether the client has stood still for too long."""
        if self.request is not None and self.request.is_late(now):
            return True
        waits = not self.requests or self.total_outbufs_len
        return bool(waits and now - self.last_activity > STILL_S)

    def is_busy(self, now: float) -> bool:
        """Whether it has, or may have, a request to answer."""
        return bool(self.requests or self.request or self.total_outbufs_len or now - self.last_activity < LATE_S)


def maintain(channels: dict[int, Channel], now: float) -> None:
    """Close the connections of clients that stand still."""
    for channel in list(channels.values()):
        if channel.must_end(now):
            channel.will_close = True


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
        most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max(most, min(hard, 4 * CONNECTIONS))
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        server = create_server(
            self.wsgi,
            sockets=[listener.sock for listener in self.sockets],
            threads=self.cfg.threads,
            ident=None,
            asyncore_use_poll=True,  # select() knows 1024 files
            connection_limit=min(CONNECTIONS, most // 2),
            cleanup_interval=5,
            max_request_header_size=64 * 1024,
            max_request_body_size=(settings.DSTACKWEB_ARCHIVE_LIMIT_MB + 1) << 20,
            clear_untrusted_proxy_headers=False,  # Django's settings say which are believed
        )
        server.channel_class = Channel
        server.maintenance = lambda now: maintain(server.active_channels, now)
        return server

    def _step(self, server: TcpWSGIServer) -> None:
        self.notify()
        alive, ends = self.alive, time.monotonic() + STEP_S
        while (left := ends - time.monotonic()) > 0 and alive == self.alive:
            wasyncore.loop(timeout=left, use_poll=True, map=server._map, count=1)
