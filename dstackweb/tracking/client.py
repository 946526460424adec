"""Requests: entries as JSON, one batch posted, its response classified. Network errors are results, not exceptions."""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 10.0
LONGEST_WAIT_S = 60.0
"""Longest `Retry-After` that is honoured."""

PACE_MAX_S = 4.0

KEY_MAX, NAME_MAX, MESSAGE_MAX = 300, 200, 2000
"""Characters of a key, of a prefix or group name, and of a message that the server accepts."""

Entry = tuple[str, Any, tuple[Any, ...]]
"""The list of the request's body it belongs to, its key, and its values."""

# Imported now: a connection would import it in the sender's thread, and a fork during that import would deadlock.
"".encode("idna")


class Outcome(Enum):
    ACCEPTED = "accepted"
    RETRY = "retry"  # no response, a response that is not from the API, or 429: send the same batch again
    SPLIT = "split"  # too large: send smaller batches
    REJECTED = "rejected"  # the API will never accept it
    WAIT = "wait"  # the run waits to start, or for its next attempt: send the same batch again later
    ENDED = "ended"  # the attempt or the run has ended: the API accepts nothing more


@dataclass(frozen=True)
class SendResult:
    """`wait_s`: seconds the server asks to wait, None for the sender's own back-off. `rejected`: number of entries.

    `attempt`: of the run, which counts the entries; None if unknown.
    """

    outcome: Outcome
    wait_s: float | None = None
    detail: str = ""
    rejected: int = 0
    attempt: int | None = None


class TasksClient:
    """Posts JSON to one URL over one kept connection. Redirects are not followed: the token is for this URL only.

    Raises ValueError when `url` is not an http or https URL.
    """

    def __init__(self, url: str, token: str) -> None:
        self._parts = urlsplit(url)
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        self._target = (self._parts.path or "/") + (f"?{self._parts.query}" if self._parts.query else "")
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._connection: http.client.HTTPConnection | None = None

    def __call__(self, body: bytes, timeout_s: float = TIMEOUT_S) -> SendResult:
        """Post `body`; without a response within `timeout_s` the result is RETRY."""
        try:
            response, raw = self._send(body, timeout_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            return SendResult(Outcome.RETRY, detail=f"{type(error).__name__}: {error}")
        return classify(response.status, response.reason, response.getheader("Retry-After"), raw)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(self, body: bytes, timeout_s: float) -> tuple[http.client.HTTPResponse, bytes]:
        kept = self._connection is not None
        try:
            return self._request(body, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            # The server may have closed the kept connection. Sending a batch twice is safe.
            self.close()
            if not kept or isinstance(error, TimeoutError):
                raise
            return self._request(body, timeout_s)

    def _request(self, body: bytes, timeout_s: float) -> tuple[http.client.HTTPResponse, bytes]:
        if self._connection is None:
            https = self._parts.scheme == "https"
            maker = http.client.HTTPSConnection if https else http.client.HTTPConnection
            self._connection = maker(self._parts.hostname or "", self._parts.port, timeout=timeout_s)
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        self._connection.timeout = timeout_s
        self._connection.request("POST", self._target, body, self._headers)
        response = self._connection.getresponse()
        return response, response.read()


def classify(status: int, reason: str, retry_after: str | None, raw: bytes) -> SendResult:
    """Classify a response. An error without the API's JSON comes from a proxy in front of it: RETRY."""
    body = _json(raw)
    detail = f"{status} {str(body['detail'])[:300] if body and 'detail' in body else reason}"
    if status == 413:
        return SendResult(Outcome.SPLIT, detail=detail)
    if status in (408, 425, 429) or status >= 500 or body is None:
        return SendResult(Outcome.RETRY, _seconds(retry_after), detail)
    if status < 300:
        refused, attempt = body.get("refused"), body.get("attempt")
        rejected = len(refused) if isinstance(refused, list) else 0
        number = attempt if isinstance(attempt, int) else None
        return SendResult(Outcome.ACCEPTED, detail=_first(refused), rejected=rejected, attempt=number)
    if status == 409:
        return SendResult(Outcome.WAIT if body.get("reason") == "not_yet" else Outcome.ENDED, detail=detail)
    if status in (400, 422):
        return SendResult(Outcome.REJECTED, detail=detail)
    return SendResult(Outcome.RETRY, LONGEST_WAIT_S, detail)  # 401, 403, 404: an admin may fix it


def _json(raw: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(raw)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a `Retry-After`. None without one, and for a date: the clocks may differ."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return min(max(seconds, 0.0), LONGEST_WAIT_S) if math.isfinite(seconds) else None


def _first(refused: object) -> str:
    """The first refused entry with its reason."""
    if not isinstance(refused, list) or not refused or not isinstance(refused[0], dict):
        return ""
    one = refused[0]
    return f"{one.get('key', '')}: {one.get('detail') or one.get('reason', '')}"[:300]


class Pace:
    """Seconds between two requests, `s`: longer after each 429, so that many reporters share a server, then shorter."""

    def __init__(self, least_s: float) -> None:
        self.s = self.least_s = least_s

    def slow_down(self) -> None:
        self.s = min(2 * self.s, max(self.least_s, PACE_MAX_S))

    def speed_up(self) -> None:
        self.s = max(0.8 * self.s, self.least_s)


def reporter_name() -> str:
    """A unique name: host, process id and a random part, since process ids are reused."""
    return f"{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(4)}"


def to_body(entries: Iterable[Entry], **more: Any) -> bytes:
    body: dict[str, Any] = more
    for kind, key, values in entries:
        body.setdefault(kind, []).append(to_json(kind, key, values))
    return json.dumps(body, separators=(",", ":")).encode()


def to_json(kind: str, key: Any, values: tuple[Any, ...]) -> dict[str, Any]:
    return _WRITERS[kind](key, *values)


def plain_text(name: object) -> str:
    """A name as a plain `str`: programs pass enum members, NumPy strings and numbers."""
    if type(name) is str:
        return name
    return str.__str__(name) if isinstance(name, str) else str(name)


def shorten_name(name: object, longest: int = NAME_MAX) -> str:
    """A name that the server accepts: not empty, at most `longest` characters, different for different names."""
    clean = _text(plain_text(name)) or "?"
    if len(clean) <= longest:
        return clean
    return f"{clean[: longest - 13]}…{hashlib.sha256(clean.encode()).hexdigest()[:12]}"


def _text(text: str) -> str:
    """Text that JSON and every database can store: no lone surrogates (as in odd file names), no NUL."""
    return text.encode(errors="replace").decode().replace("\0", "?")


def _event(
    key: str, seq: int, state: str, prefix: str | None, group: str | None, duration_s: float | None, message: str
) -> dict[str, Any]:
    entry: dict[str, Any] = {"key": shorten_name(key, KEY_MAX), "state": state, "seq": seq}
    if prefix:
        entry["prefix"] = shorten_name(prefix)
    if group:
        entry["group"] = shorten_name(group)
    if duration_s is not None:
        entry["duration_s"] = round(duration_s, 6)
    if message:
        entry["message"] = _text(message[:MESSAGE_MAX])
    return entry


def _count(
    place: tuple[str, str], seq: int, states: Mapping[str, int], duration_n: int, duration_s: float
) -> dict[str, Any]:
    names = {"prefix": shorten_name(place[0]), "group": shorten_name(place[1])}
    entry: dict[str, Any] = {**names, "seq": seq, "states": states}
    if duration_n:
        entry["duration_n"], entry["duration_s"] = duration_n, round(duration_s, 6)
    return entry


def _failure(key: str, seq: int, prefix: str, group: str, message: str) -> dict[str, Any]:
    names = {"key": shorten_name(key, KEY_MAX), "prefix": shorten_name(prefix), "group": shorten_name(group)}
    return {**names, "seq": seq, "message": _text(message[:MESSAGE_MAX])}


_WRITERS: dict[str, Callable[..., dict[str, Any]]] = {"events": _event, "counts": _count, "failures": _failure}
