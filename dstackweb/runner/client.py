"""HTTP calls to the API over one persistent connection, with two kinds of errors, and the back-off between attempts."""

from __future__ import annotations

import http.client
import ipaddress
import json
import random
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 10.0
BACKOFF_BASE_S, BACKOFF_CAP_S = 0.2, 5.0


def backoff(failures: int) -> float:
    """Seconds until the next attempt: full jitter between the base and a doubling ceiling."""
    ceiling = min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2 ** min(failures, 10))
    return random.uniform(BACKOFF_BASE_S, ceiling)


class Unreachable(Exception):
    """No answer from the API, or one that says to try again (5xx, 429), possibly after `retry_after_s`."""

    def __init__(self, why: str, retry_after_s: float | None = None) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class Refused(Exception):
    """The API refused for good. `body` is its JSON, which a proxy before an unreachable API would not send."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status}: {body.get('detail', '')}")
        self.status, self.body = status, body


class Client:
    """Calls below `/api/v1/runner/` for `jobs/ID` or `instances/ID`.

    Raises ValueError for plain HTTP to another machine, which would send the token in the clear, unless `insecure`
    allows it.
    """

    def __init__(
        self, api: str, resource: str, token: str, nonce: str, *, insecure: bool = False, timeout_s: float = TIMEOUT_S
    ) -> None:
        parts = urlsplit(api)
        if parts.scheme != "https" and not insecure and not is_this_machine(parts.hostname or ""):
            raise ValueError(f"{api}: plain HTTP is for this machine only; set DSTACKWEB_PUBLIC_URL to an https:// URL")
        self._parts, self._timeout_s = parts, timeout_s
        self._base = f"{parts.path.rstrip('/')}/api/v1/runner/{resource}"
        self._headers = {"Authorization": f"Bearer {token}", "X-Nonce": nonce, "Connection": "keep-alive"}
        self._connection: http.client.HTTPConnection | None = None

    def use_token(self, token: str) -> None:
        """Send another token from now on."""
        self._headers["Authorization"] = f"Bearer {token}"

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._json("POST", path, json.dumps(body).encode(), "application/json")

    def post_bytes(self, path: str, data: bytes) -> dict[str, Any]:
        return self._json("POST", path, data, "application/octet-stream")

    def get(self, path: str) -> dict[str, Any]:
        return self._json("GET", path, None, "")

    def download(self, path: str, target: str) -> None:
        """Stream the answer to a file. Raises OSError where the file can't be written."""
        try:
            with open(target, "wb") as file:
                file.writelines(self._pieces(path))
        except OSError:
            self.close()  # the rest of the answer is still to come
            raise

    def _pieces(self, path: str) -> Iterator[bytes]:
        try:
            response = self._send("GET", path, None, "")
            if response.status != 200:
                self._json_of(response)
            while chunk := response.read(1 << 16):
                yield chunk
            if response.length:  # a connection that ends early looks like the end of the answer
                raise http.client.IncompleteRead(b"", response.length)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unreachable(str(error)) from error

    def close(self) -> None:
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
            # The server may have closed an idle connection; every call is safe to repeat.
            self.close()
            if fresh or isinstance(error, TimeoutError):
                raise
            return self._ask(method, path, body, kind)

    def _ask(self, method: str, path: str, body: bytes | None, kind: str) -> http.client.HTTPResponse:
        if self._connection is None:
            https = self._parts.scheme == "https"
            maker = http.client.HTTPSConnection if https else http.client.HTTPConnection
            self._connection = maker(self._parts.hostname or "", self._parts.port, timeout=self._timeout_s)
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


def is_this_machine(host: str) -> bool:
    """Whether a host is this machine: loopback, or one of its own addresses."""
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
            probe.connect((host, 9))  # sends nothing; only for the machine itself are both addresses equal
            return ipaddress.ip_address(probe.getsockname()[0]) == address
    except OSError:
        return False
