"""HTTP clients of jobs, whose connections lead through the tunnels of their runners."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import BaseConnector, ClientSession, ClientTimeout, DummyCookieJar
from aiohttp.client_proto import ResponseHandler

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
OpenStream = Callable[[], Awaitable[Stream]]


class NotConnected(aiohttp.ClientConnectionError):
    """There was no connection for a request, so nothing of it was sent. `refused` says why."""

    def __init__(self, refused: StreamRefused) -> None:
        super().__init__(str(refused))
        self.refused = refused


class TunnelConnector(BaseConnector):
    """Connects by streams. As those of aiohttp, it differs from others in how one connection is made."""

    def __init__(self, open_stream: OpenStream, **more: Any) -> None:
        super().__init__(limit=CONNECTIONS_OF_SESSION, **more)
        self._open_stream = open_stream
        self._places = asyncio.Semaphore(CONNECTIONS_OF_SESSION)
        """Streams that may be open: one ends a moment after its connection, which no longer counts for aiohttp."""
        self._pumps: set[asyncio.Task[None]] = set()

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> ResponseHandler:
        await self._places.acquire()
        try:
            stream = await self._open_stream()
        except BaseException as error:
            self._places.release()
            if isinstance(error, StreamRefused):
                raise NotConnected(error) from None
            raise
        mine, its = socket.socketpair()
        carrying = asyncio.ensure_future(self._carry(stream, its))
        self._pumps.add(carrying)  # the loop itself keeps no task
        carrying.add_done_callback(self._pumps.discard)
        try:
            _transport, protocol = await self._loop.create_connection(self._factory, sock=mine)
        except BaseException:
            mine.close()
            raise
        return protocol

    async def _carry(self, stream: Stream, its: socket.socket) -> None:
        try:
            await pump(stream, *await asyncio.open_connection(sock=its), half_closes=False)
        finally:
            self._places.release()
            await stream.close()


class JobClient:
    def __init__(self, open_stream: OpenStream) -> None:
        self._kept, self._fresh = _session(open_stream, keeps=True), _session(open_stream, keeps=False)

    def session(self, method: str) -> ClientSession:
        """Whose connections carry such a request.

        Servers close connections that are unused, also at the moment at which the next request is sent. One that must
        not be sent twice gets a connection of its own, so that it never fails for that.
        """
        return self._kept if method in SAFE else self._fresh

    async def close(self) -> None:
        await self._kept.close()
        await self._fresh.close()


class JobClients:
    def __init__(self, tunnels: Tunnels) -> None:
        self._tunnels = tunnels
        self._clients: dict[int, JobClient] = {}

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def of(self, admission: Admission) -> JobClient:
        if admission.run_id not in self._clients:
            over = [one for one in self._clients if self._tunnels.of_run(one) is None]
            closing = [self._clients.pop(one) for one in over]
            self._clients[admission.run_id] = JobClient(lambda: self._open(admission))
            for client in closing:
                await client.close()
        return self._clients[admission.run_id]

    async def _open(self, admission: Admission) -> Stream:
        """A stream to the job. Raises StreamRefused.

        Tried twice where its runner could not connect for no known reason: nothing of a request was sent yet.
        """
        what = {"kind": "ide"} if admission.port is None else {"kind": "service", "port": admission.port}
        try:
            return await self._tunnels.open(admission.run_id, **what)
        except StreamRefused as refused:
            if refused.code:
                raise
            log.warning("run %d: a connection was not made, trying again: %s", admission.run_id, refused)
        return await self._tunnels.open(admission.run_id, **what)


def _session(open_stream: OpenStream, *, keeps: bool) -> ClientSession:
    return ClientSession(
        connector=TunnelConnector(open_stream, force_close=not keeps),
        timeout=ClientTimeout(total=None, connect=CONNECT_S), auto_decompress=False, cookie_jar=DummyCookieJar(),
    )  # fmt: skip
