"""Carries requests and WebSockets between a caller and a job; nothing of them is held in memory as a whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import WSMsgType, web
from multidict import CIMultiDict
from yarl import URL

from dstackweb.gateway.clients import JobClient
from dstackweb.gateway.headers import response_headers

WEBSOCKET = "sec-websocket-"
MESSAGE_MOST = 64 << 20
CHUNK = 64 * 1024
NO_CODES = (None, 1005, 1006, 1015)
"""Codes that say that a WebSocket was closed without one: they can't be sent."""


async def carry(
    request: web.Request, client: JobClient, headers: CIMultiDict[str], on_data: Callable[[], None]
) -> web.StreamResponse:
    """A request and its answer; `on_data` is called for each part of that. Raises aiohttp.ClientError before it begins.

    An answer that breaks off breaks off for the caller too, who would else take it for whole.
    """
    body = request.content if request.can_read_body else None
    address = URL(f"http://run{request.raw_path}", encoded=True)
    async with client.session(request.method).request(
        request.method, address, headers=headers, data=body, allow_redirects=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    ) as answer:  # fmt: skip
        response = web.StreamResponse(status=answer.status, reason=answer.reason)
        for name, value in response_headers(answer.headers):
            response.headers.add(name, value)
        await response.prepare(request)
        try:
            if request.method != "HEAD":
                async for data in answer.content.iter_chunked(CHUNK):
                    on_data()
                    await response.write(data)
            await response.write_eof()
        except (aiohttp.ClientError, OSError):
            if request.transport is not None:
                request.transport.abort()
        return response


async def carry_messages(
    request: web.Request,
    client: JobClient,
    headers: CIMultiDict[str],
    on_data: Callable[[], None],
    until: Callable[[], Awaitable[None]],
) -> web.StreamResponse:
    """A WebSocket, both ways, at most until `until` returns; `on_data` is called for each message of the caller.

    Raises aiohttp.ClientError if the job does not take it.
    """
    asked = request.headers.get("Sec-WebSocket-Protocol", "")
    protocols = [word.strip() for word in asked.split(",") if word.strip()]
    own = CIMultiDict((name, value) for name, value in headers.items() if not name.lower().startswith(WEBSOCKET))
    address = URL(f"http://run{request.raw_path}", encoded=True)
    async with client.session("WEBSOCKET").ws_connect(
        address, headers=own, protocols=protocols, max_msg_size=MESSAGE_MOST, autoping=True
    ) as job:
        chosen = [job.protocol] if job.protocol else []
        caller = web.WebSocketResponse(protocols=chosen, max_msg_size=MESSAGE_MOST, heartbeat=30)
        await caller.prepare(request)

        async def send() -> None:
            async for message in caller:
                on_data()
                if message.type is WSMsgType.TEXT:
                    await job.send_str(message.data)
                elif message.type is WSMsgType.BINARY:
                    await job.send_bytes(message.data)

        async def receive() -> None:
            async for message in job:
                if message.type is WSMsgType.TEXT:
                    await caller.send_str(message.data)
                elif message.type is WSMsgType.BINARY:
                    await caller.send_bytes(message.data)

        tasks = [asyncio.ensure_future(work()) for work in (send, receive, until)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(OSError, ValueError):
                await caller.close(code=1000 if job.close_code in NO_CODES else int(job.close_code or 1000))
        return caller
