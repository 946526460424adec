"""Who may keep a connection to the gateway: strangers, who have shown nothing yet, take no place of people it knows."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter
from typing import Any, Protocol

from dstackweb.lib.logs import Seldom
from dstackweb.lib.network import network_of

log = logging.getLogger(__name__)

FILES = 10_000
"""Open files that all places need, with those of runners: a request that is passed on has three."""
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connection(Protocol):
    def abort(self) -> None: ...


class Places:
    """The connections of one front, `strangers` and `known`, of which one user has a quarter at most.

    A stranger always gets a place: beyond the limit the oldest one of the network that has the most loses its own.
    """

    def __init__(self, strangers: int, known: int) -> None:
        self._most_strangers, self._most_known = strangers, known
        self._strangers: dict[Connection, str] = {}
        """Their networks, the oldest connection first."""
        self._known: dict[Connection, str] = {}
        """Their users' names."""
        self._closed = Seldom(log, "connections of strangers were closed to make room, the last one from %s")

    def enter(self, connection: Connection, address: str) -> None:
        """A stranger has connected."""
        self._strangers[connection] = network_of(address)
        if len(self._strangers) > self._most_strangers:
            [(greediest, _count)] = Counter(self._strangers.values()).most_common(1)
            oldest = next(one for one, network in self._strangers.items() if network == greediest)
            del self._strangers[oldest]
            oldest.abort()
            self._closed.note(greediest)

    def know(self, connection: Connection | None, user: str) -> bool:
        """The connection is this user's from now on; False if there are too many, or it was closed."""
        if connection in self._known:
            return True
        of_user = sum(name == user for name in self._known.values())
        if len(self._known) >= self._most_known or of_user >= self._most_known // 4:
            return False
        if connection is None or self._strangers.pop(connection, None) is None:
            return False
        self._known[connection] = user
        return True

    def trust(self, connection: Connection | None) -> None:
        """The connection is a runner's, of which there are as many as jobs."""
        if connection is not None:
            self._strangers.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)


def places(strangers: int, known: int, files: int) -> Places:
    """Places of a front, fewer where this process may open fewer `files` than it needs."""
    share = min(1.0, files / FILES)
    return Places(int(strangers * share), int(known * share))


def report_refused_connections(loop: asyncio.AbstractEventLoop) -> None:
    """Connections that can't be taken, since too many files are open, cost a line a minute. asyncio tries again by
    itself, after a second."""
    refused = Seldom(log, "connections could not be taken: %s")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in OUT_OF_FILES and "socket" in context:
            refused.note(error.strerror)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
