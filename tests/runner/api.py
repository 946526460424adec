"""The API as one job's runner meets it, over real HTTP, with the troubles that a network and a server may have."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

TOKEN = "the-token-of-this-job"


@dataclass(frozen=True)
class Call:
    """One request, as far as it was answered."""

    what: str
    body: bytes
    nonce: str

    @property
    def said(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.body)
        return answer


class Api:
    """Plays docs/runner.md for one job, and keeps all calls.

    `trouble`, asked with each call's name, may answer in the API's place: an HTTP status, or bytes, which are sent as
    they are before the connection is dropped. `action` is added to the answers to heartbeats. A log
    is cut at `keeps` bytes.
    """

    def __init__(self, *commands: str, **spec: Any) -> None:
        self.job = str(uuid4())
        self.spec: dict[str, Any] = {
            "job": self.job, "run": "night", "run_uid": str(uuid4()), "attempt": 1, "node": 0,
            "commands": list(commands), "shell": "/bin/sh", "working_dir": None, "env": {}, "redact": [], "setup": "",
            "gpus": [], "nodes": 1, "master_ip": "127.0.0.1", "gpus_per_node": 0, "gpus_total": 0, "archive": None,
            "max_duration_s": None, "stop_duration_s": 1, "lost_after_s": None, "log_limit": 1 << 20, "image": None,
        } | spec  # fmt: skip
        self.archive = b""
        self.calls: list[Call] = []
        self.action: dict[str, Any] = {"action": "go"}
        self.heartbeat_s = 0.1
        self.claimed_by = ""
        self.log = bytearray()
        self.marks = bytearray()
        self.keeps: int | None = None
        self.exits: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.files: dict[str, bytearray] = {}
        """The artifacts that have arrived, whole or not."""
        self.refused: dict[str, str] = {}
        """Artifacts that are not kept, and why."""
        self.trouble: Callable[[str], int | bytes | None] = lambda what: None
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._server = self._serve(0)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def _serve(self, port: int) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def go_down(self) -> None:
        """Refuse connections, and drop the present ones. No harm when it is down."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def come_back(self) -> None:
        self._server = self._serve(self.port)

    def count(self, what: str) -> int:
        """How many calls of this name there were."""
        return sum(call.what == what for call in list(self.calls))

    @property
    def exit(self) -> dict[str, Any] | None:
        """The first end that was reported."""
        return self.exits[0] if self.exits else None

    def ship(self, archive: bytes) -> None:
        """Have the job come with this code."""
        self.archive = archive
        self.spec["archive"] = {"sha256": hashlib.sha256(archive).hexdigest(), "size": len(archive)}

    def answer(self, call: Call, query: dict[str, list[str]]) -> tuple[int, dict[str, Any] | bytes]:
        """Status and body, by the protocol."""
        with self._lock:
            self.calls.append(call)
            if call.what == "claim":
                if self.claimed_by not in ("", call.said["nonce"]):
                    return 409, {"detail": "this job is not yours to run"}
                self.claimed_by = call.said["nonce"]
                return 200, {"heartbeat_s": self.heartbeat_s}
            if call.nonce != self.claimed_by:
                return 409, {"detail": "another runner has this job"}
            if call.what == "logs":
                size, start = (int(query.get(name, ["0"])[0]) for name in ("marks_size", "marks"))
                if size and start <= len(self.marks):
                    self.marks[start:] = call.body[:size]
                status, answer = self._append(int(query["offset"][0]), call.body[size:])
                return status, answer | ({"marks": len(self.marks)} if size else {})
            if call.what == "artifacts":
                return self._add_artifact({name: values[0] for name, values in query.items()}, call.body)
            return 200, self._answer(call)

    def _append(self, offset: int, data: bytes) -> tuple[int, dict[str, Any]]:
        if self.keeps is not None and offset + len(data) > self.keeps:
            self.log += data[len(self.log) - offset : self.keeps - offset]
            return 200, {"next": offset + len(data), "cut": "project_quota"}
        if offset > len(self.log):
            return 409, {"detail": "a gap", "expected": len(self.log)}
        self.log += data[len(self.log) - offset :]
        return 200, {"next": len(self.log)}

    def _add_artifact(self, about: dict[str, str], data: bytes) -> tuple[int, dict[str, Any]]:
        path, offset, size = about["path"], int(about["offset"]), int(about["size"])
        if path in self.refused:
            return 200, {"next": 0, "done": False, "refused": self.refused[path]}
        kept = self.files.setdefault(path, bytearray())
        if offset > len(kept):
            return 409, {"detail": "a gap", "expected": len(kept)}
        kept += data[len(kept) - offset :]
        if len(kept) < size:
            return 200, {"next": len(kept), "done": False}
        if hashlib.sha256(kept).hexdigest() != about["sha256"]:
            return 200, {"next": 0, "done": False, "refused": "changed"}
        return 200, {"next": size, "done": True}

    def _answer(self, call: Call) -> dict[str, Any] | bytes:
        match call.what:
            case "spec":
                return self.spec
            case "archive":
                return self.archive
            case "heartbeat":
                return {"heartbeat_s": self.heartbeat_s, **self.action}
            case "samples":
                self.samples += call.said["samples"]
            case "tasks":
                self.events += call.said.get("events", ())
            case "exit":
                self.exits.append(call.said)
        return {}


def _handler(api: Api) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            api._connections.add(self.connection)

        def finish(self) -> None:
            api._connections.discard(self.connection)
            try:
                super().finish()
            except OSError:
                self.close_connection = True

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            what = url.path.rpartition("/")[2]
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            match api.trouble(what):
                case bytes(raw):
                    self.wfile.write(raw)
                    self.close_connection = True
                case int(status):
                    self._send(status, {"detail": "trouble"})
                case _ if self.headers["Authorization"] != f"Bearer {TOKEN}" or api.job not in url.path:
                    self._send(401, {"detail": "Unauthorized"})
                case _:
                    self._send(*api.answer(Call(what, body, self.headers["X-Nonce"]), parse_qs(url.query)))

        do_POST = do_GET

        def _send(self, status: int, said: dict[str, Any] | bytes) -> None:
            body = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler
