"""The API as runners see it, over real HTTP, to be stopped, broken and held up by tests."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support import eventually

Answer = tuple[int, Any]


class Api:
    """One job's API. `answers[what]` is asked first for what to say to a call; None from it means the usual."""

    def __init__(self, *commands: str, **spec: Any) -> None:
        self.job, self.run = str(uuid.uuid4()), str(uuid.uuid4())
        self.spec: dict[str, Any] = {
            "job": self.job, "run": "test", "run_uid": self.run, "attempt": 1, "node": 0, "commands": list(commands),
            "shell": "/bin/sh", "working_dir": None, "env": {}, "redact": [], "setup": "", "gpus": [], "nodes": 1,
            "master_ip": "127.0.0.1", "gpus_per_node": 0, "gpus_total": 0, "archive": None, "max_duration_s": None,
            "stop_duration_s": 1, "lost_after_s": None, "log_limit": 1 << 20, "tasks_url": "http://tasks",
            "tasks_token": "tasks-only", "image": None,
        } | spec  # fmt: skip
        self.archive = b""
        self.token = "job-token-" + uuid.uuid4().hex
        self.nonce: str | None = None
        self.wanted = True
        self.action: dict[str, Any] = {"action": "go"}
        self.heartbeat_s = 60.0
        self.calls: list[str] = []
        self.phases: list[str] = []
        self.log = bytearray()
        self.exit: dict[str, Any] | None = None
        self.answers: dict[str, Callable[[], Answer | None]] = {}
        self.held: dict[str, threading.Event] = {}
        self.drops: dict[str, int] = {}
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._port = 0
        self.up()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def up(self) -> None:
        """Listen, on the same port each time."""
        # Another process may have the port for a moment, as the near end of a connection of its own.
        self._server = eventually(lambda: ThreadingHTTPServer(("127.0.0.1", self._port), _handler(self)))
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def down(self) -> None:
        """Refuse connections and break the ones there are."""
        self._server.shutdown()
        self._server.server_close()
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def hold(self, what: str) -> None:
        """Leave such calls without an answer until `release`."""
        self.held[what] = threading.Event()

    def release(self, what: str) -> None:
        self.held.pop(what).set()

    def count(self, what: str) -> int:
        return self.calls.count(what)

    def answer(self, what: str, query: dict[str, list[str]], headers: Any, body: bytes) -> Answer:
        """Status, and JSON or bytes. A held call is counted when it comes and takes effect when it is released."""
        with self._lock:
            self.calls.append(what)
        if what in self.held:
            self.held[what].wait(10)
        if what in self.answers and (said := self.answers[what]()) is not None:
            return said
        if headers["Authorization"] != f"Bearer {self.token}":
            return 401, {"detail": "Unauthorized"}
        with self._lock:
            return self._usual(what, query, headers["X-Nonce"], body)

    def _usual(self, what: str, query: dict[str, list[str]], nonce: str, body: bytes) -> Answer:
        if what == "claim" and self.nonce is None:
            self.nonce = json.loads(body)["nonce"]
        if nonce != self.nonce or not self.wanted:
            return 409, {"detail": "this job is not yours"}
        if what == "claim":
            return 200, {"heartbeat_s": self.heartbeat_s}
        if what == "spec":
            return 200, self.spec
        if what == "archive":
            return 200, self.archive
        if what == "heartbeat":
            self.phases.append(json.loads(body)["phase"])
            return 200, {"heartbeat_s": self.heartbeat_s} | self.action
        if what == "logs":
            return self._append(int(query["offset"][0]), body)
        if what == "exit":
            self.exit = json.loads(body)
        return 200, {}

    def _append(self, offset: int, body: bytes) -> Answer:
        if offset > len(self.log):
            return 409, {"detail": "a gap", "expected": len(self.log)}
        self.log += body[len(self.log) - offset :]
        return 200, {"next": len(self.log)}


def _handler(api: Api) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            api._sockets.add(self.request)

        def finish(self) -> None:
            api._sockets.discard(self.request)
            super().finish()

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            what = parts.path.rsplit("/", 1)[1]
            assert parts.path == f"/api/v1/runner/jobs/{api.job}/{what}"
            status, said = api.answer(what, parse_qs(parts.query), self.headers, body)
            if api.drops.get(what, 0) > 0:
                api.drops[what] -= 1
                self.close_connection = True
                return
            data = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def handle(self) -> None:
            # A connection that the test or the runner's death broke is nothing to report.
            try:
                super().handle()
            except (OSError, ValueError):
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler
