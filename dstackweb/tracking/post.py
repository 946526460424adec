"""One request with a batch, and what its answer means for the sender. Nothing here raises because of the network."""

from __future__ import annotations

import http.client
import json
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 10.0
LONGEST_WAIT_S = 60.0
"""What a server may ask for at most before the next try."""

# A connection would import this in the sender's thread, and a child that is forked amid it find that locked for ever.
"".encode("idna")


class Verdict(Enum):
    """What to do with a batch after its request."""

    TAKEN = "taken"
    LATER = "later"  # no answer, or one that is not the API's own, or 429: the same batch again
    SPLIT = "split"  # too large: the same in smaller batches
    LOST = "lost"  # the API will never take it
    OVER = "over"  # the attempt is over: nothing more is taken from anybody


@dataclass(frozen=True)
class Answer:
    """`wait_s`: what the server asks for; None leaves it to the sender. `refused`: entries that were not taken."""

    verdict: Verdict
    wait_s: float | None = None
    detail: str = ""
    refused: int = 0


class Post:
    """Posts JSON to one URL over one kept connection. Redirects are not followed: the token is for this URL alone.

    Raises ValueError when `url` is none of http or https.
    """

    def __init__(self, url: str, token: str) -> None:
        self._parts = urlsplit(url)
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// URL")
        self._target = (self._parts.path or "/") + (f"?{self._parts.query}" if self._parts.query else "")
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._connection: http.client.HTTPConnection | None = None

    def __call__(self, body: bytes, timeout_s: float = TIMEOUT_S) -> Answer:
        """Post `body`; no answer within `timeout_s` means later."""
        try:
            response, raw = self._send(body, timeout_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            return Answer(Verdict.LATER, detail=f"{type(error).__name__}: {error}")
        return meaning(response.status, response.reason, response.getheader("Retry-After"), raw)

    def close(self) -> None:
        """Drop the connection; the next request makes a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(self, body: bytes, timeout_s: float) -> tuple[http.client.HTTPResponse, bytes]:
        kept = self._connection is not None
        try:
            return self._ask(body, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            # A kept connection may have been closed meanwhile; a batch may be told twice.
            self.close()
            if not kept or isinstance(error, TimeoutError):
                raise
            return self._ask(body, timeout_s)

    def _ask(self, body: bytes, timeout_s: float) -> tuple[http.client.HTTPResponse, bytes]:
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


def meaning(status: int, reason: str, retry_after: str | None, raw: bytes) -> Answer:
    """What an answer means. An error without the API's own JSON comes from a proxy in front of it, and means later."""
    body = _json(raw)
    detail = f"{status} {str(body['detail'])[:300] if body and 'detail' in body else reason}"
    if status == 413:
        return Answer(Verdict.SPLIT, detail=detail)
    if status in (408, 425, 429) or status >= 500 or body is None:
        return Answer(Verdict.LATER, _seconds(retry_after), detail)
    if status < 300:
        refused = body.get("refused")
        return Answer(Verdict.TAKEN, detail=_first(refused), refused=len(refused) if isinstance(refused, list) else 0)
    if status == 409:
        return Answer(Verdict.OVER, detail=detail)
    if status in (400, 422):
        return Answer(Verdict.LOST, detail=detail)
    return Answer(Verdict.LATER, LONGEST_WAIT_S, detail)  # 401, 403, 404: until somebody mends it


def _json(raw: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(raw)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a `Retry-After`; None for none, and for a date, which no clock here need agree with."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return min(max(seconds, 0.0), LONGEST_WAIT_S) if math.isfinite(seconds) else None


def _first(refused: object) -> str:
    """The first refusal, in words."""
    if not isinstance(refused, list) or not refused or not isinstance(refused[0], dict):
        return ""
    one = refused[0]
    return f"{one.get('key', '')}: {one.get('detail') or one.get('reason', '')}"[:300]
