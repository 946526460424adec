"""The way of HTTP requests to jobs: for each run a socket, whose connections lead through its runner's tunnel."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, UnixConnector

from dstackweb.gateway.access import Admission
from dstackweb.gateway.tunnels import Tunnels
from dstackweb.runner.streams import STREAMS_MAX, Stream, StreamRefused
from dstackweb.runner.tunnel import pump

log = logging.getLogger(__name__)

CONNECTIONS_OF_SESSION = 50
"""Beside shells and checks, of STREAMS_MAX; further requests wait for one."""
assert 2 * CONNECTIONS_OF_SESSION < STREAMS_MAX
CONNECT_S = 30.0
"""How long a request waits for a connection."""
SAFE = ("GET", "HEAD", "OPTIONS")
"""Requests that may be sent again where a connection that was kept turns out to be closed."""


@dataclass
class Bridge:
    """The way to one run. `trouble` is why the last connection could not be made; None if it could."""

    kept: ClientSession
    fresh: ClientSession
    server: asyncio.AbstractServer
    trouble: StreamRefused | None = None

    def session(self, method: str) -> ClientSession:
        """Whose connections carry such a request.

        Servers close connections that are unused, also at the moment at which the next request is sent. One that must
        not be sent twice gets a connection of its own, so that it never fails for that.
        """
        return self.kept if method in SAFE else self.fresh

    async def close(self) -> None:
        self.server.close()
        await self.kept.close()
        await self.fresh.close()


class Bridges:
    """Those of all runs."""

    def __init__(self, tunnels: Tunnels) -> None:
        self._tunnels = tunnels
        self._bridges: dict[int, Bridge] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="dstackweb-gateway-")

    async def close(self) -> None:
        for bridge in self._bridges.values():
            await bridge.close()
        self._folder.cleanup()

    async def to(self, admission: Admission) -> Bridge:
        """The bridge to a run."""
        found = self._bridges.get(admission.run_id)
        if found is None:
            for over in [one for one in self._bridges if self._tunnels.of_run(one) is None]:
                await self._bridges.pop(over).close()
                self._path(over).unlink(missing_ok=True)
            found = self._bridges[admission.run_id] = await self._built(admission)
        return found

    async def _built(self, admission: Admission) -> Bridge:
        path, run_id = str(self._path(admission.run_id)), admission.run_id
        what: dict[str, Any] = {"kind": "ide"}
        if admission.port is not None:
            what = {"kind": "service", "port": admission.port}

        async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                stream = await self._opened(run_id, what)
            except StreamRefused as refused:
                bridge.trouble = refused
                writer.close()
                return
            bridge.trouble = None
            await pump(stream, reader, writer)

        server = await asyncio.start_unix_server(lead, path)
        bridge = Bridge(_session(path, keeps=True), _session(path, keeps=False), server)
        return bridge

    async def _opened(self, run_id: int, what: dict[str, Any]) -> Stream:
        """A stream to the job. Raises StreamRefused.

        Tried twice where its runner could not connect for no known reason: nothing of a request was sent yet.
        """
        try:
            return await self._tunnels.open(run_id, **what)
        except StreamRefused as refused:
            if refused.code:
                raise
            log.warning("run %d: a connection was not made, trying again: %s", run_id, refused)
        return await self._tunnels.open(run_id, **what)

    def _path(self, run_id: int) -> Path:
        return Path(self._folder.name) / str(run_id)


def _session(path: str, *, keeps: bool) -> ClientSession:
    return ClientSession(
        connector=UnixConnector(path, limit=CONNECTIONS_OF_SESSION, force_close=not keeps),
        timeout=ClientTimeout(total=None, connect=CONNECT_S), auto_decompress=False, cookie_jar=DummyCookieJar(),
    )  # fmt: skip
