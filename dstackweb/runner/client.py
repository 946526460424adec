"""Speaking HTTP to the API: one kept connection, and two kinds of trouble that callers tell apart."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
from collections.abc import Iterator
from typing import Any, BinaryIO
from urllib.parse import urlsplit

TIMEOUT_S = 10.0
BACKOFF_BASE_S, BACKOFF_CAP_S = 0.2, 5.0
ANSWER_LIMIT = 64 << 20

NOT_OURS = (401, 403, 404, 409, 410)
"""Answers that say for good that this job is not, or no longer, this runner's."""


class Unreachable(Exception):
    """No answer, or none from the API itself, or one that says to try again."""


class Refused(Exception):
    """The API said no, for good. `body` is its JSON."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status}: {body.get('detail', '')}")
        self.status, self.body = status, body


class Client:
    """Calls about one job. Each is safe to repeat, and is repeated once when a kept connection turns out closed."""

    def __init__(self, api: str, job: str, token: str, nonce: str, timeout_s: float = TIMEOUT_S) -> None:
        check_address(api)
        self._parts = urlsplit(api)
        self._base = f"{self._parts.path.rstrip('/')}/api/v1/runner/jobs/{job}"
        self._headers = {"Authorization": f"Bearer {token}", "X-Nonce": nonce}
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def get(self, path: str) -> dict[str, Any]:
        """Get JSON."""
        return self._call("GET", path, None, "")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send JSON, get JSON."""
        return self._call("POST", path, json.dumps(body).encode(), "application/json")

    def log(self, offset: int, data: bytes) -> int:
        """Send bytes of the stream from `offset`; returns the offset from which the API wants it next."""
        try:
            answer = self._call("POST", f"logs?offset={offset}", data, "application/octet-stream")
            return int(answer["next"])
        except Refused as refused:
            if refused.status == 409 and "expected" in refused.body:
                return int(refused.body["expected"])
            raise
        except KeyError as error:
            raise Unreachable("an answer without `next`") from error

    def download(self, path: str, target: BinaryIO) -> None:
        """Write the answer's bytes to a file from its beginning, piece by piece."""
        target.seek(0)
        target.truncate()
        with self._unreachable():
            response = self._send("GET", path, None, "")
            if response.status != 200:
                self._read(response)
        while True:
            with self._unreachable():
                piece = response.read(1 << 16)
            if not piece:
                break
            target.write(piece)
        target.flush()
        if response.length:
            self.close()
            raise Unreachable(f"the answer broke off {response.length} bytes before its end")

    def close(self) -> None:
        """Drop the connection; the next call makes a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _call(self, method: str, path: str, body: bytes | None, kind: str) -> dict[str, Any]:
        with self._unreachable():
            return self._read(self._send(method, path, body, kind))

    @contextlib.contextmanager
    def _unreachable(self) -> Iterator[None]:
        """Trouble on the way becomes Unreachable, and the connection is not used again."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unreachable(f"{type(error).__name__}: {error}") from error

    def _send(self, method: str, path: str, body: bytes | None, kind: str) -> http.client.HTTPResponse:
        fresh = self._connection is None
        try:
            return self._ask(method, path, body, kind)
        except (ConnectionError, http.client.HTTPException):
            self.close()
            if fresh:
                raise
            return self._ask(method, path, body, kind)

    def _ask(self, method: str, path: str, body: bytes | None, kind: str) -> http.client.HTTPResponse:
        if self._connection is None:
            maker = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
            self._connection = maker(self._parts.hostname or "", self._parts.port, timeout=self._timeout_s)
        headers = {**self._headers, "Content-Type": kind} if kind else self._headers
        self._connection.request(method, f"{self._base}/{path}", body, headers)
        return self._connection.getresponse()

    def _read(self, response: http.client.HTTPResponse) -> dict[str, Any]:
        """The JSON object of an answer. A no counts only with the API's own JSON: a proxy's page is no answer."""
        raw = response.read(ANSWER_LIMIT)
        if not response.isclosed():
            self.close()
        try:
            body = json.loads(raw or b"{}")
        except ValueError:
            body = None
        if 200 <= response.status < 300 and isinstance(body, dict):
            return body
        if response.status in NOT_OURS and isinstance(body, dict) and "detail" in body:
            raise Refused(response.status, body)
        raise Unreachable(f"{response.status} {response.reason} {raw[:200]!r}")


class Backoff:
    """How long to wait before the next try: full jitter below a ceiling that doubles (seconds)."""

    def __init__(self, uniform: Any = random.uniform) -> None:
        self.failures = 0
        self._uniform = uniform

    def failed(self) -> float:
        """Another try was in vain; returns the wait."""
        self.failures += 1
        ceiling = min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2 ** min(self.failures, 10))
        return float(self._uniform(BACKOFF_BASE_S, ceiling))

    def worked(self) -> None:
        """Begin with short waits again."""
        self.failures = 0


def check_address(api: str) -> None:
    """Raises ValueError for plain HTTP to another machine, since the token would cross the network, and for no URL."""
    parts = urlsplit(api)
    if not parts.hostname or parts.scheme not in ("http", "https"):
        raise ValueError(f"{api!r} is no http:// or https:// address")
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise ValueError(f"{api}: plain HTTP is for this machine only; set DSTACKWEB_PUBLIC_URL to an https:// URL")


def _is_loopback(host: str) -> bool:
    if host in ("localhost", "::1"):
        return True
    try:
        return socket.inet_pton(socket.AF_INET, host)[0] == 127
    except OSError:
        return False
