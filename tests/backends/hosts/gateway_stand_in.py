"""A gateway that lets everyone in, to which the runner of one job connects."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

from aiohttp import WSMsgType, web

from dstackweb.runner.streams import MESSAGE_MAX, MessageKind, Mux
from dstackweb.runner.tunnel import JOBS


class GatewayStandIn:
    """Listens on `port`. Its methods wait for the runner, and open one stream each."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port: int = self._in_loop(self._listen())

    def run(self, command: str, **what: Any) -> tuple[int | None, str]:
        """The status and the output, errors too, of a command in the job's place; None for one that did not end."""
        end, data = self._in_loop(self._talk(b"", kind="exec", command=command, **what))
        return end.get("status"), data.decode()

    def ask(self, data: bytes, **what: Any) -> bytes:
        """What answers `data` where a connection leads. Raises StreamRefused."""
        answer: bytes = self._in_loop(self._talk(data, **what))[1]
        return answer

    def close(self) -> None:
        self._in_loop(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _in_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _listen(self) -> int:
        self._mux: asyncio.Future[Mux] = self._loop.create_future()
        application = web.Application()
        application.router.add_get(JOBS + "{job}", self._take)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        address: tuple[str, int] = self._runner.addresses[0]
        return address[1]

    async def _take(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(max_msg_size=MESSAGE_MAX)
        await socket.prepare(request)
        mux = Mux(socket.send_bytes)
        if not self._mux.done():
            self._mux.set_result(mux)
        with contextlib.suppress(ConnectionError):
            async for message in socket:
                if message.type is WSMsgType.BINARY:
                    mux.receive(message.data)
        return socket

    async def _talk(self, data: bytes, **what: Any) -> tuple[dict[str, Any], bytes]:
        stream = await (await self._mux).open(**what)
        if data:
            await stream.write(data)
        await stream.finish()
        got = b""
        while (message := await stream.read()) is not None:
            if message[0] == MessageKind.EOF:
                break
            got += message[1]
        while stream.end is None and await stream.read() is not None:
            continue
        await stream.close()
        return stream.end or {}, got
