"""Which of the waiting requests gets the next free thread: clients take turns, however many requests each one has sent.

One after the other, a thousand requests of one person would keep all others waiting for as long as these take together.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from dstackweb import settings
from dstackweb.lib import proxies
from dstackweb.lib.network import network_of

TOGETHER = 2
"""How many short requests run at once."""
SHORT_S = 0.02
"""A request that takes longer waits for something else than the interpreter."""
_SESSION = re.compile(rf"(?:^|;)\s*{re.escape(settings.SESSION_COOKIE_NAME)}=([^;]*)")

Client = tuple[str, str]
"""An address, or a network (`network_of`), and the token or session that it sends."""


class FairQueue:
    """In place of the deque of waitress's dispatcher, which holds its lock for each call.

    Addresses take turns, and in the turn of an address its tokens and sessions, each with its oldest request.
    """

    def __init__(self, client_of: Callable[[Any], Client]) -> None:
        self._client_of, self._size = client_of, 0
        self._waiting: dict[str, dict[str, deque[Any]]] = {}

    def __len__(self) -> int:
        return self._size

    def append(self, task: Any) -> None:
        address, credential = self._client_of(task)
        self._waiting.setdefault(address, {}).setdefault(credential, deque()).append(task)
        self._size += 1

    def popleft(self) -> Any:
        address, of_address = _first(self._waiting)
        credential, tasks = _first(of_address)
        task = tasks.popleft()
        if tasks:
            of_address[credential] = tasks  # behind the others now
        if of_address:
            self._waiting[address] = of_address
        self._size -= 1
        return task


class Turns(FairQueue):
    """A `FairQueue` that is empty for waitress's threads while `TOGETHER` requests have run for less than `SHORT_S`.

    Threads of one process compute in turn: more of them would do the same, and spend time on changing over.
    """

    def __init__(self, client_of: Callable[[Any], Client], now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(client_of)
        self._now = now
        self._began: dict[Any, float] = {}

    def __bool__(self) -> bool:
        """Whether a request may begin now."""
        return bool(self._size) and self._short() < TOGETHER

    def _short(self) -> int:
        since = self._now() - SHORT_S
        return sum(began > since for began in list(self._began.values()))

    def popleft(self) -> Any:
        task = super().popleft()
        self._began[task] = self._now()
        return task

    def end(self, task: Any) -> None:
        """The request of this connection has been answered."""
        self._began.pop(task, None)


def _first(there: dict[str, Any]) -> tuple[str, Any]:
    name = next(iter(there))
    return name, there.pop(name)


def client_of(channel: Any) -> Client:
    """Whose the next request of a connection is."""
    request = channel.requests[0]
    headers, path = request.headers, getattr(request, "path", "")
    if path.startswith(settings.PROGRAM_PATHS):
        credential = (headers.get("AUTHORIZATION", "").split() or [""])[-1]
    else:
        credential = (_SESSION.findall(headers.get("COOKIE", "")) or [""])[-1]  # as Django, the last of several
    return _address(channel, headers.get("X_FORWARDED_FOR", "")), credential


def _address(channel: Any, claimed: str) -> str:
    environ = {"REMOTE_ADDR": str(channel.addr[0]), "HTTP_X_FORWARDED_FOR": claimed, proxies.CONNECTION: channel.socket}
    if claimed and settings.DSTACKWEB_TRUSTED_PROXIES:
        proxies.see_through(environ, settings.DSTACKWEB_TRUSTED_PROXIES)
    return network_of(str(environ["REMOTE_ADDR"]))
