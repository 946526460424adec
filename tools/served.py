"""Shared by the demos: a server of their own, its output, and calls of its API."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any


def relay(server: subprocess.Popen[str], url: str, token: str, set_up: Callable[[str, str], None]) -> None:
    """Pass on what the server says; once it is ready, among that what `set_up(url, token)` adds to it."""
    for line in server.stdout or ():
        if line.startswith("Logs:"):
            set_up(url, token)
        print(line, end="", flush=True)


def ask(url: str, token: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """What the server's API answers. Raises OSError."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read())


def told(error: OSError) -> str:
    """Why a call failed, in the API's own words where it has said any."""
    return error.read().decode() if isinstance(error, urllib.error.HTTPError) else str(error)
