"""Speaking HTTP to the API: one kept connection, and two kinds of trouble that callers tell apart."""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 10.0


class Unreachable(Exception):
    """No answer of the API's own, or one that says to try again: 5xx, 429; perhaps not before `retry_after_s`."""

    def __init__(self, why: str, retry_after_s: float | None = None) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class Refused(Exception):
    """The API said no, for good. `body` is its JSON: a proxy before an API that is away speaks otherwise."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status}: {body.get('detail', '')}")
        self.status, self.body = status, body


class Client:
    """Calls about one thing below `/api/v1/runner/`: `jobs/ID` or `instances/ID`.

    Raises ValueError for plain HTTP to another machine, where the token would cross the network in the open, unless
    that is `insecure` by decision.
    """

    def __init__(self, api: str, what: str, token: str, nonce: str, *, insecure: bool = False) -> None:
        parts = urlsplit(api)
        if parts.scheme != "https" and not insecure and not _is_this_machine(parts.hostname or ""):
            raise ValueError(f"{api}: plain HTTP is for this machine only; set DSTACKWEB_PUBLIC_URL to an https:// URL")
        self._parts = parts
        self._base = f"{parts.path.rstrip('/')}/api/v1/runner/{what}"
        self._headers = {"Authorization": f"Bearer {token}", "X-Nonce": nonce, "Connection": "keep-alive"}
        self._connection: http.client.HTTPConnection | None = None

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send JSON, get JSON."""
        return self._json("POST", path, json.dumps(body).encode(), "application/json")

    def post_bytes(self, path: str, data: bytes) -> dict[str, Any]:
        """Send bytes, get JSON."""
        return self._json("POST", path, data, "application/octet-stream")

    def get(self, path: str) -> dict[str, Any]:
        """Get JSON."""
        return self._json("GET", path, None, "")

    def download(self, path: str, target: str) -> None:
        """Write the answer's bytes to a file, piece by piece."""
        try:
            response = self._send("GET", path, None, "")
            if response.status != 200:
                self._json_of(response)
            with open(target, "wb") as file:
                while chunk := response.read(1 << 16):
                    file.write(chunk)
            if response.length:  # a connection that ends early looks like the end of the answer
                raise http.client.IncompleteRead(b"", response.length)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unreachable(str(error)) from error

    def close(self) -> None:
        """Drop the connection; the next call makes a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _json(self, method: str, path: str, body: bytes | None, kind: str) -> dict[str, Any]:
        try:
            return self._json_of(self._send(method, path, body, kind))
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unreachable(f"{type(error).__name__}: {error}") from error

    def _send(self, method: str, path: str, body: bytes | None, kind: str) -> http.client.HTTPResponse:
        fresh = self._connection is None
        try:
            return self._ask(method, path, body, kind)
        except (OSError, http.client.HTTPException) as error:
            # A kept connection may have been closed meanwhile; every call is safe to repeat.
            self.close()
            if fresh or isinstance(error, TimeoutError):
                raise
            return self._ask(method, path, body, kind)

    def _ask(self, method: str, path: str, body: bytes | None, kind: str) -> http.client.HTTPResponse:
        if self._connection is None:
            https = self._parts.scheme == "https"
            maker = http.client.HTTPSConnection if https else http.client.HTTPConnection
            self._connection = maker(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT_S)
        headers = self._headers | ({"Content-Type": kind} if kind else {})
        self._connection.request(method, f"{self._base}/{path}", body, headers)
        return self._connection.getresponse()

    def _json_of(self, response: http.client.HTTPResponse) -> dict[str, Any]:
        raw = response.read()
        if response.status >= 500 or response.status in (408, 425, 429):
            wait = response.headers.get("Retry-After", "")
            raise Unreachable(f"{response.status} {response.reason}", float(wait) if wait.isdecimal() else None)
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if not isinstance(body, dict) or (response.status >= 300 and "detail" not in body):
            raise Unreachable(f"{response.status} {response.reason}, not from the API")
        if response.status >= 300:
            raise Refused(response.status, body)
        return body


def _is_this_machine(host: str) -> bool:
    """Whether what is sent to a host stays on this machine: loopback, or an address that is its own."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if address.is_loopback:
        return True
    try:
        with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing; only to itself does a machine speak from the address it speaks to
            return ipaddress.ip_address(probe.getsockname()[0]) == address
    except OSError:
        return False
