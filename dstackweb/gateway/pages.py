"""What runs serve by HTTP: an authenticated proxy to services and dev environments, each under a host name of its own.

What a run serves is its owner's code. So it shares no origin with the dashboard or another run, gets no cookie and no
token of ours, and requests that pages of elsewhere make in a visitor's name are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import aiohttp
from aiohttp import StreamReader, WSMsgType, web
from django.conf import settings
from multidict import CIMultiDict
from yarl import URL

from dstackweb.gateway import access
from dstackweb.gateway.access import RECHECK_S, Admission
from dstackweb.gateway.answers import Denied, answer
from dstackweb.gateway.clients import JobClient, JobClients, NotConnected
from dstackweb.gateway.headers import is_own, request_headers, response_headers, token_of
from dstackweb.gateway.places import Places
from dstackweb.gateway.tunnels import NO_TUNNEL, Tunnels, in_database
from dstackweb.lib import proxies
from dstackweb.lib.secrets import digest
from dstackweb.runner import dial
from dstackweb.runner.streams import BUSY, StreamRefused
from dstackweb.runner.tunnel import JOBS
from dstackweb.runs import connections
from dstackweb.runs.connections import COOKIE_S, ENTER, Tickets, Visit
from dstackweb.runs.launch import ide_token
from dstackweb.runs.service_codes import GatewayProblem
from dstackweb.runs.states import ENDED, RunStatus

WEBSOCKET = "sec-websocket-"
MESSAGE_MOST = 64 << 20
CHUNK = 64 * 1024
STILL_S = 300.0
"""A caller that takes nothing of an answer for so long, or sends nothing more of a body, is gone."""
NO_CODES = (None, 1005, 1006, 1015)
"""Codes that say that a WebSocket was closed without one: they can't be sent."""
Proof = Visit | str
"""Who asks: a visit, or an API token."""
_OF_REFUSALS = {
    BUSY: GatewayProblem.BUSY,
    dial.REFUSED: GatewayProblem.NOT_LISTENING,
    dial.FOREIGN: GatewayProblem.OTHER_USERS_PORT,
}


class Pages:
    """All that runs serve, below one domain."""

    def __init__(self, tunnels: Tunnels, places: Places) -> None:
        self._tunnels, self._places = tunnels, places
        self._tickets, self._clients = Tickets(), JobClients(tunnels)
        self._admitted: dict[tuple[Visit | str, str], tuple[float, Admission]] = {}
        """Who was let in to which runs (by the digest of their token, if they have one), and when."""
        parts = urlsplit(settings.DSTACKWEB_GATEWAY_URL or "http://localhost")
        self._domain, self._scheme = parts.hostname or "", parts.scheme

    def application(self) -> web.Application:
        found = web.Application()
        found.router.add_get(JOBS + "{job}", self._tunnels.take)
        found.router.add_route("*", "/{path:.*}", self.handle)
        return found

    async def close(self) -> None:
        await self._clients.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        try:
            uid = self._run_of(request.host)
            if uid is None:
                raise Denied(GatewayProblem.NO_RUN)
            if request.path == ENTER:
                return await self._enter(request, uid)
            return await self._pass_on(request, uid)
        except Denied as denied:
            return answer(denied, request.headers, repeats=request.method == "GET")

    async def _pass_on(self, request: web.Request, uid: str) -> web.StreamResponse:
        """To the job, for those who may. Raises Denied."""
        address, token = _address(request), token_of(request.headers)
        proof: Proof | None = token or connections.read_cookie(request.cookies.get(connections.cookie_name(), ""))
        if proof is None:
            raise Denied(GatewayProblem.SIGN_IN)
        admission = await self._admit(proof, uid, address)
        if token is None and not is_own(request.headers, request.method, f"{self._scheme}://{request.host}"):
            raise Denied(GatewayProblem.OTHER_ORIGIN)
        if not self._places.know(request.transport, admission.user):
            raise Denied(GatewayProblem.BUSY, name=admission.run)
        client = await self._clients.of(admission)
        headers = request_headers(request.headers, address, request.host, self._scheme, admission.user)
        if admission.port is None:
            headers["Authorization"] = f"token {ide_token(UUID(uid))}"

        def use() -> None:
            if (tunnel := self._tunnels.of_run(admission.run_id)) is not None:
                tunnel.use()

        async def until() -> None:
            while True:
                await asyncio.sleep(RECHECK_S)
                await self._admit(proof, uid, address)

        # Open pages of a dev environment poll with GET, which says nothing; each request to a service is use.
        is_service = admission.port is not None
        if is_service or request.method not in ("GET", "HEAD") or request.headers.get("Sec-Fetch-Mode") == "navigate":
            use()
        try:
            if request.headers.get("Upgrade", "").lower() == "websocket":
                return await carry_messages(request, client, headers, use, until)
            return await carry(request, client, headers, use if is_service else lambda: None)
        except aiohttp.WSServerHandshakeError as error:
            return web.Response(status=error.status, text=f"{error.message}\n")
        except aiohttp.ServerTimeoutError:
            raise Denied(GatewayProblem.BUSY, name=admission.run) from None
        except TimeoutError:  # of the body
            return web.Response(status=408, headers={"Connection": "close"})
        except NotConnected as error:
            raise _not_connected(error.refused, admission) from None
        except aiohttp.ClientError:
            raise Denied(GatewayProblem.NO_ANSWER, name=admission.run) from None

    def _run_of(self, host: str) -> str | None:
        """The id of the run that a host name belongs to."""
        name, _, domain = host.partition(":")[0].lower().partition(".")
        try:
            return str(UUID(name)) if domain == self._domain and len(name) == len(str(UUID(int=0))) else None
        except ValueError:
            return None

    async def _enter(self, request: web.Request, uid: str) -> web.StreamResponse:
        """A ticket becomes a cookie of this host name alone. Raises Denied."""
        visit = self._tickets.take(request.query.get("ticket", ""))
        if visit is None:
            raise Denied(GatewayProblem.SIGN_IN)
        await in_database(access.by_visit, visit, uid)
        headers = {"Location": "/", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
        response = web.Response(status=303, headers=headers)
        response.set_cookie(
            connections.cookie_name(), connections.cookie(visit), max_age=COOKIE_S, httponly=True, samesite="Lax",
            path="/", secure=connections.is_secure(),
        )  # fmt: skip
        return response

    async def _admit(self, proof: Proof, uid: str, address: str) -> Admission:
        """Raises Denied."""
        now, key = time.monotonic(), (digest(proof) if isinstance(proof, str) else proof, uid)
        at, found = self._admitted.get(key, (0.0, None))
        if found is not None and now - at < RECHECK_S:
            return found
        self._admitted = {one: seen for one, seen in self._admitted.items() if now - seen[0] < RECHECK_S}
        if isinstance(proof, str):
            found = await in_database(access.by_token, proof, uid, address)
        else:
            found = await in_database(access.by_visit, proof, uid)
        self._admitted[key] = now, found
        return found


def _not_connected(refused: StreamRefused, admission: Admission) -> Denied:
    values = {"name": admission.run, "port": admission.port or "", "status": str(refused)}
    if refused.code != NO_TUNNEL:
        return Denied(_OF_REFUSALS.get(refused.code, GatewayProblem.UNREACHABLE), **values)
    match str(refused):
        case RunStatus.RUNNING:
            return Denied(GatewayProblem.DISCONNECTED, **values)
        case RunStatus.TERMINATING:
            return Denied(GatewayProblem.ENDING, **values)
        case status if status in ENDED or status == access.GONE:
            return Denied(GatewayProblem.ENDED, **values)
    return Denied(GatewayProblem.NOT_STARTED, **values)


def _address(request: web.Request) -> str:
    """The caller's, where trusted proxies are in between."""
    peer, trusted = request.remote or "", settings.DSTACKWEB_TRUSTED_PROXIES
    claimed = ", ".join(request.headers.getall("X-Forwarded-For", []))
    return proxies.client(peer, claimed, trusted) if trusted and proxies.is_in(peer, trusted) else peer


async def carry(
    request: web.Request, client: JobClient, headers: CIMultiDict[str], on_data: Callable[[], None]
) -> web.StreamResponse:
    """A request and its answer, neither held in memory as a whole; `on_data` is called for each part of the answer.

    Raises aiohttp.ClientError before it begins.

    An answer that breaks off breaks off for the caller too, who would else take it for whole.
    """
    body = arriving(request.content) if request.can_read_body else None
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
                    await asyncio.wait_for(response.write(data), STILL_S)
            await response.write_eof()
        except (aiohttp.ClientError, OSError):
            if request.transport is not None:
                request.transport.abort()
        return response


async def arriving(body: StreamReader) -> AsyncIterator[bytes]:
    """The parts of a body. Raises TimeoutError."""
    while data := await asyncio.wait_for(body.readany(), STILL_S):
        yield data


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

        async def pass_on(source: Any, sink: Any, seen: Callable[[], None]) -> None:
            async for message in source:
                seen()
                if message.type is WSMsgType.TEXT:
                    await asyncio.wait_for(sink.send_str(message.data), STILL_S)
                elif message.type is WSMsgType.BINARY:
                    await asyncio.wait_for(sink.send_bytes(message.data), STILL_S)

        works = pass_on(caller, job, on_data), pass_on(job, caller, lambda: None), until()
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(OSError, ValueError):
                await caller.close(code=1000 if job.close_code in NO_CODES else int(job.close_code or 1000))
        return caller
