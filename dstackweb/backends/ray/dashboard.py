"""Calls of Ray's dashboard, which serves the Jobs API and the state of the cluster."""

from __future__ import annotations

import email.utils
import functools
import json
import math
import ssl
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dstackweb.backends.clusters import EngineRefused
from dstackweb.backends.contract import SourceFailed, SourceFailure

if TYPE_CHECKING:
    import httpx

CONNECT_S, READ_S, TOTAL_S = 5.0, 20.0, 40.0
ANSWER_MAX = 64 << 20
"""Bytes: the list of jobs has all that Ray keeps."""
DENIED, THROTTLED, NOT_FOUND, AWAY = (401, 403), 429, 404, (502, 503, 504)


class CallFailed(EngineRefused):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """`value` is the JSON, None for 404; `at` the time by the head's clock, in seconds since 1970."""

    value: Any
    at: float


@dataclass(frozen=True)
class Dashboard:
    """`address` is its URL. Redirects are not followed, and no proxy of the environment is used."""

    address: str
    token: str = field(default="", repr=False)
    ca_file: str = ""

    def call(self, method: str, path: str, body: Any = None) -> Answer:
        """Raises CallFailed, or SourceFailed where nothing was decided."""
        import httpx  # late: it is a tenth of the time in which a process starts

        # Nothing packed: a few KB of it can become gigabytes, more than once.
        headers = {"Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {self.token}"} if self.token else {}
        timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
        verify = _trust(self.ca_file) if self.address.startswith("https:") else False
        try:
            with (
                httpx.Client(verify=verify, timeout=timeout, headers=headers, trust_env=False) as client,
                client.stream(method, f"{self.address}/{path}", json=body) as response,
            ):
                return self._read(response, _content(response))
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise self._unreachable(str(error) or type(error).__name__) from error

    def _read(self, response: httpx.Response, content: bytes) -> Answer:
        status = response.status_code
        said = content[-20_000:].decode(errors="replace").strip().splitlines()
        # A traceback's last line says what is wrong, or is a dot.
        text = next((line.strip() for line in reversed(said) if len(line.strip()) > 1), f"HTTP {status}")[:300]
        if status in DENIED:
            raise SourceFailed(SourceFailure.ACCESS_DENIED, endpoint=self.address, text=text)
        if status == THROTTLED:
            raise SourceFailed(SourceFailure.THROTTLED, api="Ray", endpoint=self.address)
        if status in AWAY:
            raise self._unreachable(text)
        at = _time(response.headers.get("Date", ""))
        if status == NOT_FOUND:
            return Answer(None, at)
        if not response.is_success:
            raise CallFailed(status, text)
        try:
            return Answer(json.loads(content, parse_float=_finite, parse_constant=_finite), at)
        except (ValueError, RecursionError) as error:
            raise SourceFailed(SourceFailure.SERVICE_ERROR, text=f"no JSON: {text}") from error

    def _unreachable(self, text: str) -> SourceFailed:
        return SourceFailed(SourceFailure.UNREACHABLE, endpoint=self.address, text=text[:300])


def _content(response: httpx.Response) -> bytes:
    """The answer, unless it is too long or takes too long."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise SourceFailed(SourceFailure.SERVICE_ERROR, text="a packed answer, which no one asked for")
    until, found = time.monotonic() + TOTAL_S, bytearray()
    for part in response.iter_raw():
        found += part
        if len(found) > ANSWER_MAX:
            raise SourceFailed(SourceFailure.SERVICE_ERROR, text=f"an answer of more than {ANSWER_MAX >> 20} MiB")
        if time.monotonic() > until:
            raise TimeoutError("the answer takes too long")
    return bytes(found)


@functools.lru_cache(8)
def _trust(ca_file: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file or None)


def _finite(text: str) -> float:
    """Python reads `NaN`, `Infinity` and `1e999` too. Raises ValueError."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no number")
    return number


def _time(date: str) -> float:
    """Of the header, or by this machine's clock without one that can be understood."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError, TypeError, IndexError):
        return time.time()
