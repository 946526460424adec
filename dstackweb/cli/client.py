"""The REST API over HTTP, with its faults put into words a person can act on."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx

from dstackweb.cli.config import Settings, tokens_page
from dstackweb.cli.errors import CliError, Interrupted, Refused, TryLater, Unreachable, UsageError
from dstackweb.cli.output import clean, note

BASE = "/api/v1"
TIMEOUT = httpx.Timeout(30, connect=5)
TRIES = 4
"""How often a request is sent that is safe to repeat, when the server is not well or the connection drops."""
NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.UnsupportedProtocol)
PATIENCE_S = 60
"""How long, in all, a request waits where the server says 429."""


class Api:
    """One server, as one person. Every method raises CliError for what the server, or the way to it, refuses."""

    def __init__(
        self,
        settings: Settings,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.settings = settings
        self._sleep = sleep
        try:
            self._http = httpx.Client(
                base_url=settings.url,
                headers={"Authorization": f"Bearer {settings.token}", "Accept": "application/json"},
                timeout=TIMEOUT,
                transport=transport,
            )
        except httpx.InvalidURL as error:
            raise UsageError(f"{settings.url} is no address of a server: {error}.") from None

    def in_project(self, *parts: str) -> str:
        """A path below the project, its parts quoted. Raises UsageError for a part that is no name of anything."""
        return "/".join((f"{BASE}/projects", *quoted(self.settings.project, *parts)))

    def get(self, path: str, **query: Any) -> Any:
        """The JSON at `path`; query values that are None are left out."""
        given = {key: value for key, value in query.items() if value is not None}
        return self.json(self.send("GET", path, params=given))

    def send(
        self,
        method: str,
        path: str,
        *,
        body: Callable[[], Iterable[bytes]] | None = None,
        accept: tuple[int, ...] = (),
        repeatable: bool = False,
        **request: Any,
    ) -> httpx.Response:
        """One request; reads, uploads and what is `repeatable` are sent again after a dropped connection or a 502–504.

        `body` makes the raw content anew for each try. Error statuses in `accept` are returned, others raise.
        """
        tries, waited = TRIES if repeatable or method in ("GET", "HEAD", "PUT") else 1, 0.0
        for attempt in itertools.count(1):
            try:
                response = self._http.request(method, path, content=body() if body else None, **request)
            except KeyboardInterrupt:
                if method in ("GET", "HEAD"):
                    raise
                raise Interrupted from None
            except httpx.TransportError as error:
                if attempt >= tries or not isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
                    raise self._unreachable(error, changes=method not in ("GET", "HEAD")) from None
                if isinstance(error, httpx.ConnectError):
                    raise self._unreachable(error, changes=False) from None
                pause = random.uniform(0, 0.3 * 2**attempt)
            else:
                if response.is_success or response.status_code in accept:
                    return response
                if asked := self._pause(response, waited):
                    # It was not looked at, so asking again is safe for any method.
                    pause, waited, tries = asked, waited + asked, tries + 1
                elif attempt < tries and response.status_code in (502, 503, 504):
                    pause = random.uniform(0, 0.3 * 2**attempt)
                else:
                    raise self._refused(response)
            self._sleep(pause)
        raise AssertionError("the loop returns or raises")

    @contextmanager
    def stream(self, path: str, query: dict[str, Any]) -> Iterator[httpx.Response]:
        """The body at `path` as it arrives; tried once, as the caller knows how far it got."""
        waited = 0.0
        while True:
            try:
                # Compressed bytes could not be counted as offsets.
                with self._http.stream("GET", path, params=query, headers={"Accept-Encoding": "identity"}) as response:
                    pause = self._pause(response, waited)
                    if pause is None:
                        if not response.is_success:
                            response.read()
                            raise self._refused(response)
                        yield response
                        return
            except httpx.TransportError as error:
                raise self._unreachable(error, changes=False) from None
            self._sleep(pause)
            waited += pause

    def _pause(self, response: httpx.Response, waited: float) -> float | None:
        """Seconds to wait where the server says 429; None when it doesn't, or patience has run out."""
        pause = retry_after(response)
        if response.status_code != 429 or waited + pause > PATIENCE_S:
            return None
        note(f"the server asks to wait {pause:.0f} s …")
        return pause

    def json(self, response: httpx.Response) -> Any:
        """The JSON of an answer; CliError when it holds none, and so is no answer of dstackweb."""
        try:
            return response.json()
        except ValueError:
            raise self._no_dstackweb() from None

    def _no_dstackweb(self) -> CliError:
        told = f"{self.settings.url} doesn't answer as dstackweb does."
        return CliError(told, "Is the address right? Another one: dstackweb login URL")

    def _unreachable(self, error: httpx.TransportError, changes: bool) -> Unreachable:
        url = self.settings.url
        if isinstance(error, NEVER_SENT):
            why = "no answer within 5 s" if isinstance(error, httpx.TimeoutException) else reason(error)
            return Unreachable(
                f"can't reach {url}: {why}.",
                "Nothing was changed; runs that are submitted go on.",
                "Is the server up? Is the address right? Another one: dstackweb login URL",
            )
        what = "gave no answer in 30 s" if isinstance(error, httpx.TimeoutException) else "closed the connection"
        return Unreachable(
            f"{url} {what}.",
            "It isn't known whether the change was made: look with dstackweb ps, then try again."
            if changes
            else "Nothing was changed. Try again.",
        )

    def _refused(self, response: httpx.Response) -> CliError:
        status = response.status_code
        try:
            body = response.json()
        except ValueError:
            body = None
        detail = clean(body.get("detail")) if isinstance(body, dict) else ""
        if response.is_redirect:
            place = clean(response.headers.get("location", "another address"))
            told = f"{self.settings.url} sends on to {place}; the token was not sent there."
            return CliError(told, "If that is the right address: dstackweb login URL")
        if status == 401:
            given = f" (from {self.settings.token_from})" if self.settings.token_from else ""
            return Refused(
                f"the server doesn't accept the token{given}.",
                f"Make one: {tokens_page(self.settings.url)}",
                f"Then: dstackweb login {self.settings.url}",
                status=status,
            )
        if status == 429:
            again = f"Try again in {retry_after(response):.0f} s."
            return TryLater(detail or "too many requests.", "Nothing was changed.", again, status=status)
        if status >= 500:
            return TryLater(
                f"the server had an error (HTTP {status}){': ' + detail if detail else ''}.",
                "Runs that are submitted go on. Try again; if it stays, the server's log tells more.",
                status=status,
            )
        if not detail:
            return self._no_dstackweb()
        return Refused(detail, status=status, body=body)


def quoted(*parts: str) -> list[str]:
    """Names as parts of a path. Raises UsageError for a part that is no name of anything."""
    for part in parts:
        if part in ("", ".", "..") or "/" in part:
            raise UsageError(f"{part!r} is no name.")
    return [quote(part, safe="") for part in parts]


def retry_after(response: httpx.Response) -> float:
    """Seconds that a 429 asks to wait; 1 where it doesn't say."""
    try:
        return max(0.1, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):
        return 1.0


def reason(error: Exception) -> str:
    """The system's own words for a failed connection, without what the libraries put around them."""
    cause: BaseException = error
    while cause.__cause__ or cause.__context__:
        cause = cause.__cause__ or cause.__context__ or cause
    text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error)
    return text[:1].lower() + text[1:] if text else "no connection"
