"""The HTTP front: one port for runners and for what runs serve."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from dstackweb.gateway.places import Places

HEADERS_MOST = 16 * 1024
IDLE_S = 75.0
"""Longest wait for a connection's next request, and for the whole of its headers; nginx waits for 60 s."""
STOP_S = 3.0

# A request that is none is nobody's error here, and anyone can send any number.
logging.getLogger("aiohttp.server").addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
)


class Handler(web.RequestHandler):
    """aiohttp's protocol of a connection, which tells `places` of its begin and its end."""

    def __init__(self, server: web.Server, places: Places, idle_s: float) -> None:
        super().__init__(
            server, loop=asyncio.get_running_loop(), keepalive_timeout=idle_s, auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]  # its type lacks what its code expects
            max_line_size=HEADERS_MOST, max_field_size=HEADERS_MOST,
        )  # fmt: skip
        self._places = places
        self._kept: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        self._kept = transport
        self._places.enter(transport, str((transport.get_extra_info("peername") or ("",))[0]))

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if self._kept is not None:
            self._places.leave(self._kept)


class HttpFront:
    def __init__(self, application: web.Application, places: Places, *, idle_s: float = IDLE_S) -> None:
        self._places, self._idle_s = places, idle_s
        # A caller that has gone ends what the job does for it.
        self._runner = web.AppRunner(application, shutdown_timeout=STOP_S, handler_cancellation=True)
        self._listener: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Raises OSError."""
        if self._runner.server is None:
            await self._runner.setup()
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: Handler(server, self._places, self._idle_s), host, port)
        return self._listener

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
