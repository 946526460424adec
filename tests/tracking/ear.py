"""A server that only listens: what reporters posted, and what it comes to by the rules of the real one."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from tests.support import eventually

Reply = tuple[int, dict[str, str], bytes]
OK: Reply = (200, {}, b'{"applied": 1, "outdated": 0, "refused": []}')


class Ear:
    """`with Ear() as ear:` listens on `ear.url`. `answers` are given first, each once; then `then`, to all."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.answers: list[Reply] = []
        self.then = OK
        self.hold = threading.Event()  # no answer until it is set
        self.hold.set()
        self.requests = 0
        ear = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                ear.requests += 1
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                ear.hold.wait()
                status, headers, body = ear.answers.pop(0) if ear.answers else ear.then
                if status == 200:
                    ear.tokens.add(self.headers["Authorization"])
                    ear.bodies.append(json.loads(raw))
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):  # nobody waited for it
                    self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/tasks"
        self.env = {"DSTACKWEB_TASKS_URL": self.url, "DSTACKWEB_TASKS_TOKEN": "secret"}

    def __enter__(self) -> Ear:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def reporters(self) -> set[str]:
        return {body["reporter"] for body in list(self.bodies)}

    @property
    def ended(self) -> set[str]:
        return {body["reporter"] for body in list(self.bodies) if body.get("ended")}

    def events(self) -> dict[str, dict[str, Any]]:
        """The event that counts, of each key."""
        newest: dict[str, tuple[int, str, dict[str, Any]]] = {}
        for body in list(self.bodies):
            for event in body.get("events", []):
                candidate = (event["seq"], body["reporter"], event)
                if event["key"] not in newest or candidate[:2] > newest[event["key"]][:2]:
                    newest[event["key"]] = candidate
        return {key: event for key, (_seq, _reporter, event) in newest.items()}

    def states(self) -> dict[str, str]:
        """The state of each task."""
        return {key: event["state"] for key, event in self.events().items()}

    def counts(self, prefix: str) -> dict[str, int]:
        """How many tasks of a prefix are in each state by what all reporters counted, where not 0."""
        newest: dict[tuple[str, str], tuple[int, dict[str, int]]] = {}
        for body in list(self.bodies):
            for count in body.get("counts", []):
                place = (body["reporter"], count["group"])
                if count["prefix"] == prefix and (place not in newest or count["seq"] > newest[place][0]):
                    newest[place] = (count["seq"], count["states"])
        total: Counter[str] = Counter()
        for _seq, states in newest.values():
            total.update(states)
        return {state: count for state, count in total.items() if count}

    def heard(self, bodies: int = 1) -> None:
        """Wait until so many requests were taken."""
        eventually(lambda: len(self.bodies) >= bodies)
