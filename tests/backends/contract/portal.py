"""The customer portal of a company that rents machines: a small HTTP server whose machines are processes here."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import subprocess
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY = "hush-hush"


class Portal:
    """`url` is its address. `trouble` is a status for all answers; without `answers` it closes connections instead."""

    def __init__(self) -> None:
        self.stock = {"berlin": 3, "oslo": 0}
        self.machines: dict[str, dict[str, Any]] = {}
        self.trouble, self.answers = 0, True
        self._lock = threading.Lock()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for id in self._processes:
            self.cancel(id)

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            for id, process in self._processes.items():
                if process.poll() is not None:
                    self.machines[id]["state"] = "ended"
            match method, path.strip("/").split("/"):
                case "GET", ["sites"]:
                    return 200, self.stock
                case "GET", ["machines"]:
                    return 200, [one for one in self.machines.values() if one["owner"] in query["owner"]]
                case "PUT", ["machines", name]:
                    return self._rent(name, **body)
                case "DELETE", ["machines", id]:
                    return (200, self.cancel(id)) if id in self.machines else (404, "no such machine")
        return 400, "what?"

    def cancel(self, id: str) -> None:
        """End a machine, as its customer may on the portal's pages too."""
        process = self._processes[id]
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)

    def _rent(self, name: str, owner: str, site: str, script: str) -> tuple[int, Any]:
        id = f"{owner[:4]}-{name}"
        if id not in self.machines:
            if not self.stock[site]:
                return 409, f"Sold out in {site}."
            self.stock[site] -= 1
            with tempfile.NamedTemporaryFile("w", dir=os.environ["DSTACKWEB_TEST_HOME"], delete=False) as file:
                file.write(script)
            at = dt.datetime.now(dt.UTC).isoformat()
            self._processes[id] = subprocess.Popen(["/bin/sh", file.name], start_new_session=True, cwd=Path("/"))
            shown = {"id": id, "name": name, "owner": owner, "site": site, "since": at, "state": "running"}
            self.machines[id] = shown
        return 200, self.machines[id]


def _handler(portal: Portal) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            if portal.trouble:
                status, answer = portal.trouble, {"later": "please"}
            elif self.headers["Authorization"] != f"Bearer {KEY}":
                status, answer = 401, {"no": "entry"}
            else:
                status, answer = portal.answer(self.command, asked.path, parse_qs(asked.query), body)
            if not portal.answers:
                return
            self.send_response(status)
            self.send_header("Retry-After", "20")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_PUT = do_DELETE = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler
