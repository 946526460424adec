"""The REST API over HTTP: retries, errors that say what to do, and a notice where the server is newer."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

import dstackweb
from dstackweb.cli import config
from dstackweb.cli.config import Settings, tokens_page
from dstackweb.cli.language import ENGLISH, _, tag
from dstackweb.cli.output import (
    FOR_PROGRAMS,
    GIVEN,
    OUTAGE,
    ApiError,
    ChangeInterrupted,
    CliError,
    TryLater,
    Unreachable,
    UsageError,
    clean,
    note,
)
from dstackweb.lib.network import full_jitter

T = TypeVar("T")

BASE = "/api/v1"
TIMEOUT = httpx.Timeout(30, connect=5)
PAGE = 500
"""The most that one request lists."""
TRIES = 4
"""How often a request that is safe to repeat is sent when the connection drops or the server answers 502 to 504."""
NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.UnsupportedProtocol)
PATIENCE_S = 60
"""How long a request waits in all while the server answers 429."""


class Api:
    """One server, as one user. Every method raises CliError for errors of the server and of the connection.

    `sleep` is how all commands that use this client wait; tests replace it. With `patience_s` each request is tried
    once and waits no longer than that, and nothing is printed.
    """

    def __init__(
        self,
        settings: Settings,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        patience_s: float | None = None,
    ) -> None:
        self.settings = settings
        self.sleep = sleep
        self._is_patient = patience_s is None
        try:
            self._http = httpx.Client(
                base_url=settings.url,
                headers={
                    "Authorization": f"Bearer {settings.token}",
                    "Accept": "application/json",
                    "Accept-Language": ENGLISH if GIVEN.get("form") in FOR_PROGRAMS else tag(),
                },
                timeout=TIMEOUT if patience_s is None else patience_s,
                transport=transport,
            )
        except httpx.InvalidURL as error:
            raise UsageError(_("invalid server URL {url}: {reason}.", url=settings.url, reason=error)) from None

    def path(self, *parts: str) -> str:
        """A path of the API, its parts quoted. Raises UsageError for a part that can't be a name."""
        for part in parts:
            if part in ("", ".", "..") or "/" in part:
                raise UsageError(_("invalid name {name!r}.", name=part))
        return "/".join((BASE, *(quote(part, safe="") for part in parts)))

    def in_project(self, *parts: str) -> str:
        """A path below the project. Raises UsageError for a part that can't be a name."""
        return self.path("projects", self.settings.project, *parts)

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """The JSON at `path`; query values that are None are left out."""
        given = {key: value for key, value in query.items() if value is not None}
        return self.json(self.send("GET", path, params=given))

    def pages(self, path: str, key: str = "items", most: float = math.inf, **query: Any) -> dict[str, Any]:
        """The JSON at `path` with what its further pages list under `key`, `most` in all."""
        found = self.get(path, limit=min(PAGE, most), **query)
        while found["next"] and len(found[key]) < most:
            more = self.get(path, limit=min(PAGE, most - len(found[key])), cursor=found["next"], **query)
            found[key] += more[key]
            found["next"] = more["next"]
        return found

    def post(self, path: str, body: dict[str, Any] | None = None, **request: Any) -> dict[str, Any]:
        return self.json(self.send("POST", path, json=body, **request))

    def patch(self, path: str, body: dict[str, Any], **request: Any) -> dict[str, Any]:
        return self.json(self.send("PATCH", path, json=body, **request))

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
        """One request; reads, uploads and `repeatable` ones are sent again after a dropped connection or a 502–504.

        `body` makes the raw content for each try. Error statuses in `accept` are returned, others raise.
        """
        may_repeat = self._is_patient and (repeatable or method in ("GET", "HEAD", "PUT"))
        tries, waited = TRIES if may_repeat else 1, 0.0
        for attempt in itertools.count(1):
            try:
                response = self._http.request(method, path, content=body() if body else None, **request)
            except KeyboardInterrupt:
                if method in ("GET", "HEAD"):
                    raise
                raise ChangeInterrupted from None
            except httpx.TransportError as error:
                if attempt >= tries or not isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
                    raise self._unreachable(error, changes=method not in ("GET", "HEAD")) from None
                if isinstance(error, httpx.ConnectError):
                    raise self._unreachable(error, changes=False) from None
                pause = full_jitter(attempt, 0.3, 5.0)
            else:
                if self._is_patient:
                    notice(self.settings.url, response.headers.get(VERSION_HEADER, ""))
                if response.is_success or response.status_code in accept:
                    return response
                if wait := self._pause(response, waited):
                    # The server did nothing yet, so any method may be sent again.
                    pause, waited, tries = wait, waited + wait, tries + 1
                elif attempt < tries and response.status_code in (502, 503, 504):
                    pause = full_jitter(attempt, 0.3, 5.0)
                else:
                    raise self._refused(response)
            self.sleep(pause)
        raise AssertionError("the loop returns or raises")

    @contextmanager
    def stream(self, path: str, query: dict[str, Any]) -> Iterator[httpx.Response]:
        """The body at `path` as it arrives. Tried once: only the caller knows how far it got."""
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
            self.sleep(pause)
            waited += pause

    def _pause(self, response: httpx.Response, waited: float) -> float | None:
        """Seconds to wait after a 429; None for other answers, or after PATIENCE_S."""
        pause = retry_after(response)
        if response.status_code != 429 or waited + pause > PATIENCE_S or not self._is_patient:
            return None
        note(_("Too many requests; trying again in {seconds:.0f} s …", seconds=pause))
        return pause

    def until_answered(self, request: Callable[[], T], safe: str, show: Callable[[str], None] = note) -> T:
        """The result of `request`, tried again until the server answers; `safe` is a sentence about the run."""
        for failures in itertools.count():
            try:
                answer = request()
            except OUTAGE as error:
                if not failures:
                    show(_("{message} {safe} Trying again …", message=error.message, safe=safe))
                self.sleep(0.1 + full_jitter(failures, 1.0, 4.5))
            else:
                if failures:
                    show(_("Connected again."))
                return answer
        raise AssertionError("the loop returns")

    def json(self, response: httpx.Response) -> dict[str, Any]:
        """The JSON of an answer, an object. Raises CliError if it is not JSON: the server is not dstackweb."""
        try:
            found: dict[str, Any] = response.json()
            return found
        except ValueError:
            raise self._not_dstackweb() from None

    def _not_dstackweb(self) -> CliError:
        return CliError(
            _("{url} is not a dstackweb server.", url=self.settings.url), _("Check the URL: dstackweb login URL")
        )

    def _unreachable(self, error: httpx.TransportError, changes: bool) -> Unreachable:
        url = self.settings.url
        if isinstance(error, NEVER_SENT):
            why = _("no answer within 5 s") if isinstance(error, httpx.TimeoutException) else reason(error)
            return Unreachable(
                _("can't reach {url}: {why}.", url=url, why=why),
                _("Nothing was changed, and submitted runs continue."),
                _("Check that the server is up and that the URL is right: dstackweb login URL"),
            )
        silent = isinstance(error, httpx.TimeoutException)
        return Unreachable(
            _("{url} gave no answer in 30 s.", url=url) if silent else _("{url} closed the connection.", url=url),
            _("The change may have been made: check with dstackweb ps before you try again.")
            if changes
            else _("Nothing was changed. Try again."),
        )

    def _refused(self, response: httpx.Response) -> CliError:
        status = response.status_code
        try:
            body = response.json()
        except ValueError:
            body = None
        detail = clean(body.get("detail")) if isinstance(body, dict) else ""
        if response.is_redirect:
            place = clean(response.headers.get("location", "")) or _("another URL")
            message = _("{url} redirects to {place}. The token was not sent there.", url=self.settings.url, place=place)
            return CliError(message, _("If that URL is right: dstackweb login URL"))
        if status == 401:
            source = self.settings.token_from
            return ApiError(
                _("the server rejected the token (from {source}).", source=source)
                if source
                else _("the server rejected the token."),
                _("Make a token on {url}", url=tokens_page(self.settings.url)),
                _("Then run: dstackweb login {url}", url=self.settings.url),
                status=status,
            )
        if status == 429:
            again = _("Nothing was changed. Try again in {seconds:.0f} s.", seconds=retry_after(response))
            return TryLater(detail or _("too many requests."), again, status=status)
        if status >= 500:
            return TryLater(
                _("server error (HTTP {status}): {detail}.", status=status, detail=detail.rstrip(".。"))
                if detail
                else _("server error (HTTP {status}).", status=status),
                _("Submitted runs continue. Try again; if the error stays, look in the server's log."),
                status=status,
            )
        if not detail:
            return self._not_dstackweb()
        return ApiError(detail, status=status, body=body)


def retry_after(response: httpx.Response) -> float:
    """Seconds to wait after a 429; 1 where its header has no number."""
    try:
        return max(0.1, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):
        return 1.0


def reason(error: Exception) -> str:
    """The system's text for a failed connection, without what the libraries add."""
    cause: BaseException = error
    while cause.__cause__ or cause.__context__:
        cause = cause.__cause__ or cause.__context__ or cause
    text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error)
    return text[:1].lower() + text[1:] if text else _("no connection")


VERSION_HEADER = "X-Dstackweb-Version"
"""What the server sends to signed-in clients."""


def notice(url: str, version: str) -> None:
    """Say on stderr that the server has a newer version: once a day and server, and only to people at a terminal."""
    if not is_newer(version, dstackweb.__version__) or not sys.stderr.isatty() or GIVEN.get("form") == "--json":
        return
    path, today = config.config_path().with_name("notices.json"), f"{datetime.now(UTC):%Y-%m-%d}"
    try:
        noted: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        noted = {}
    if noted.get(url) == today:
        return
    try:
        config.write_private(path, [json.dumps({**noted, url: today})])
    except CliError:
        return  # without a note of the day it would be said each time
    values = {"url": url, "version": version, "mine": dstackweb.__version__}
    note(_("{url} has the newer version {version}; this command is {mine}. Update it to use what is new.", **values))


def is_newer(one: str, other: str) -> bool:
    """Compare two versions by their numbers; 1.0rc2 comes before 1.0. False for text that is no version."""
    order = []
    for text in (one, other):
        version = _VERSION.match(text)
        if version is None:
            return False
        numbers, stage, candidate = version.groups()
        order.append((tuple(map(int, numbers.split("."))), stage or "release", int(candidate or 0)))
    return order[0] > order[1]


_VERSION = re.compile(r"(\d{1,9}(?:\.\d{1,9}){0,3})(?:(a|b|rc)(\d{1,9}))?")
"""The stages compare as texts: "a" < "b" < "rc" < "release"."""
