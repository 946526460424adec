"""One request for the heartbeats of all runners on a machine: a thread beside them collects and sends them.

A runner asks it over a local socket. Whatever goes wrong there, the runner sends its heartbeat itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from typing import Any

from dstackweb.runner.client import Client, Refused, Unreachable

MOST = 500
"""Heartbeats in one request."""
PAUSE_S, WINDOW_S = 0.03, 0.3
"""A request is sent once no runner has come for the first, or after the second. Runners come at the same moment."""
ASK_S = 3.0
"""How long a runner waits for the relay."""
LIMIT = 1 << 16


class Relay:
    """Listens at `path`, in a folder that only this user can open; `start` returns at once.

    Raises ValueError as `Client` does, OSError if it can't listen.
    """

    def __init__(self, api: str, path: str, *, insecure: bool = False) -> None:
        self.client = Client(api, "jobs", "", "", insecure=insecure)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(path)
        self.listener.listen(MOST)

    def start(self) -> None:
        """Serve in a thread, until the process ends."""
        threading.Thread(target=self._serve, name="heartbeats", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.listener.settimeout(None)
            first, _ = self.listener.accept()
            with contextlib.ExitStack() as stack:
                asked: dict[str, tuple[socket.socket, dict[str, Any]]] = {}
                for runner in [first, *self._others()]:
                    stack.enter_context(runner)
                    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                        runner.settimeout(PAUSE_S)
                        request = json.loads(runner.recv(LIMIT))
                        asked[str(request["job"])] = runner, {name: str(request[name]) for name in ("token", "nonce")}
                if asked:
                    self._send(asked)

    def _others(self) -> list[socket.socket]:
        """Runners that come soon after the first."""
        others: list[socket.socket] = []
        ends = time.monotonic() + WINDOW_S
        with contextlib.suppress(TimeoutError):
            while len(others) < MOST - 1 and (left := ends - time.monotonic()) > 0:
                self.listener.settimeout(min(PAUSE_S, left))
                others.append(self.listener.accept()[0])
        return others

    def _send(self, asked: dict[str, tuple[socket.socket, dict[str, Any]]]) -> None:
        """Send one request, and each runner its answer. The others find their connection closed."""
        entries = [entry for _, entry in asked.values()]
        # Waiting requests take turns by their token: without any, hosts behind one address would share a turn.
        sign = entries[0]["token"]
        self.client.use_token(sign if sign.isascii() and sign.isprintable() else "")
        try:
            answers = self.client.post("heartbeats", {"jobs": entries})["jobs"]
        except (Unreachable, Refused, KeyError):
            return
        for job, (runner, _) in asked.items():
            if job in answers:
                with contextlib.suppress(OSError):
                    runner.send(json.dumps(answers[job]).encode())


def start_relay(api: str, path: str, *, insecure: bool) -> bool:
    """Start a relay; False where there can be none. Runners then do without."""
    try:
        Relay(api, path, insecure=insecure).start()
    except (OSError, ValueError):
        return False
    return True


def ask(path: str, job: str, token: str, nonce: str) -> dict[str, Any] | None:
    """The answer to a heartbeat by way of the relay at `path`; None if it has none."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as there:
        there.settimeout(ASK_S)
        there.connect(path)
        there.send(json.dumps({"job": job, "token": token, "nonce": nonce}).encode())
        answer = json.loads(there.recv(LIMIT))
        return answer if isinstance(answer, dict) and "action" in answer else None
    return None
