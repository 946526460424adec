"""The API as one job's runner sees it: says yes to everything and remembers what it got."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4


class JobApi:
    """Serves one job with these commands. `stop` is the answer to heartbeats once the job is to stop."""

    def __init__(self, *commands: str, **spec: Any) -> None:
        self.job, self.run = uuid4(), uuid4()
        self.spec = {
            "job": str(self.job), "run": "test", "run_uid": str(self.run), "attempt": 1, "node": 0,
            "commands": commands, "shell": "/bin/sh", "working_dir": None, "env": {}, "redact": [], "setup": "",
            "gpus": [], "nodes": 1, "master_ip": "127.0.0.1", "gpus_per_node": 0, "gpus_total": 0, "archive": None,
            "max_duration_s": None, "stop_duration_s": 1, "lost_after_s": None, "log_limit": 1 << 20,
            "image": None,
        } | spec  # fmt: skip
        self.stop: dict[str, Any] = {}
        self.log = bytearray()
        self.claims: list[str] = []
        self.heartbeats = 0
        self.exit: dict[str, Any] | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, what: str, body: bytes) -> dict[str, Any]:
        """What the API says to one call."""
        match what:
            case "claim":
                self.claims.append(json.loads(body)["nonce"])
                return {"heartbeat_s": 60}
            case "spec":
                return self.spec
            case "heartbeat":
                self.heartbeats += 1
                return {"action": "go", "heartbeat_s": 60} | self.stop
            case "logs":
                self.log += body
                return {"next": len(self.log)}
            case "exit":
                self.exit = json.loads(body)
        return {}


def _handler(api: JobApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = json.dumps(api.answer(urlsplit(self.path).path.rsplit("/", 1)[1], body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler
