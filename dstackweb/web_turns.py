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
SPARE = 2
"""Threads that only vital requests get: writers that wait for one another may hold all others."""
VITAL = re.compile(r"/(?:healthz|readyz|api/v1/runner/(?:.+/)?(?:heartbeats?|poll|next))/?")
"""Checks of a server's health, and the calls by which runners and agents show that they live."""
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


class Turns:
    """Requests of two `FairQueue`s, vital ones and others, which alternate.

    It is empty for waitress's threads while `TOGETHER` requests have run for less than `SHORT_S`: threads of one
    process compute in turn, and more of them would do the same, and spend time on changing over.
    """

    def __init__(
        self,
        client_of: Callable[[Any], Client],
        is_vital: Callable[[Any], bool],
        threads: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vital, self._others = FairQueue(client_of), FairQueue(client_of)
        self._is_vital, self._now = is_vital, now
        self._most_others = max(1, threads - SPARE)
        self._began: dict[Any, float] = {}
        self._running_others: set[Any] = set()
        self._was_vital = False

    def __len__(self) -> int:
        return len(self._vital) + len(self._others)

    def __bool__(self) -> bool:
        """Whether a request may begin now."""
        return bool(self._next()) and self._short() < TOGETHER

    def _next(self) -> FairQueue:
        """Return the queue whose turn it is, which is empty if none of its requests may begin."""
        if len(self._running_others) >= self._most_others or (self._vital and not self._was_vital):
            return self._vital
        return self._others or self._vital

    def append(self, task: Any) -> None:
        (self._vital if self._is_vital(task) else self._others).append(task)

    def _short(self) -> int:
        since = self._now() - SHORT_S
        return sum(began > since for began in list(self._began.values()))

    def popleft(self) -> Any:
        queue = self._next()
        task = queue.popleft()
        self._began[task] = self._now()
        self._was_vital = queue is self._vital
        if not self._was_vital:
            self._running_others.add(task)
        return task

    def end(self, task: Any) -> None:
        """Note that the request of this connection has been answered."""
        self._began.pop(task, None)
        self._running_others.discard(task)


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


def is_vital(channel: Any) -> bool:
    """Whether the next request of a connection is one that never waits for the others."""
    return VITAL.fullmatch(getattr(channel.requests[0], "path", "")) is not None


def _address(channel: Any, claimed: str) -> str:
    environ = {"REMOTE_ADDR": str(channel.addr[0]), "HTTP_X_FORWARDED_FOR": claimed, proxies.CONNECTION: channel.socket}
    if claimed and settings.DSTACKWEB_TRUSTED_PROXIES:
        proxies.see_through(environ, settings.DSTACKWEB_TRUSTED_PROXIES)
    return network_of(str(environ["REMOTE_ADDR"]))
