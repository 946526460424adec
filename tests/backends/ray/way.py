"""The network between a driver and a Ray cluster, whose faults tests choose."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from dstackweb.backends.ray.dashboard import DEPLOYMENT
from tests.backends.contract.gate import Gate


class Way:
    """`trouble`: `cut`, `lost` (answers to submits), or a status. Answers to submits pass its `gate`."""

    def __init__(self, address: str) -> None:
        self.cluster = httpx.Client(base_url=address, timeout=30)
        self.trouble, self.gate = "", Gate()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.cluster.close()

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs that the cluster knows and a deployment has made."""
        found = self.cluster.get("/api/jobs/").json()
        return [job for job in found if DEPLOYMENT in (job["metadata"] or {})]


def _handler(way: Way) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if way.trouble == "cut":
                return
            if way.trouble.isdigit():
                self.send_response(int(way.trouble))
                self.end_headers()
                return
            answer = way.cluster.request(self.command, self.path, content=body)
            if self.command == "POST":
                way.gate.pass_through()
                if way.trouble == "lost":
                    return
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_POST = do_DELETE = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler
