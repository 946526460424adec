"""The pages of runs: an authenticated proxy to what a job serves, each run under a host name of its own.

Pages of a run are its owner's code. So they share no origin with the dashboard or another run, get no cookie
but their own, and requests that pages of elsewhere make in a visitor's name are refused.
"""

from __future__ import annotations

import asyncio
import html
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

import aiohttp
from aiohttp import ClientSession, ClientTimeout, UnixConnector, WSMsgType, web
from django.conf import settings
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from dstackweb.gateway.access import RECHECK_S
from dstackweb.gateway.tunnels import Tunnels, in_database
from dstackweb.runner.streams import StreamRefused
from dstackweb.runner.tunnel import JOBS, pump
from dstackweb.runs import visits
from dstackweb.runs.visits import COOKIE_S, ENTER, Tickets, Visit

log = logging.getLogger(__name__)

HOP_BY_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
}  # fmt: skip
OWN = {"content-length", "cookie", "host", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "forwarded"}
WEBSOCKET = "sec-websocket-"
CONNECTIONS_OF_RUN = 40
MESSAGE_MOST = 64 << 20
CHUNK = 64 * 1024
WAITING = """<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="3"><title>dstackweb</title>
<body style="font: 16px system-ui; margin: 4rem auto; max-width: 36rem; padding: 0 1rem; color-scheme: light dark">
<p>{text}<p>This page tries again every 3 seconds.</body>"""
SIGN_IN = """<!doctype html><meta charset="utf-8"><title>dstackweb</title>
<body style="font: 16px system-ui; margin: 4rem auto; max-width: 36rem; padding: 0 1rem; color-scheme: light dark">
<p>Open this from the page of the run in <a href="{url}">dstackweb</a>.</body>"""


@dataclass
class Bridge:
    """The way of HTTP requests to one run: a socket whose connections lead to its job."""

    session: ClientSession
    server: asyncio.AbstractServer
    trouble: str = ""
    """Why the last connection could not be made; empty if it could."""

    async def close(self) -> None:
        self.server.close()
        await self.session.close()


class Pages:
    """All pages of runs, below one domain."""

    def __init__(self, tunnels: Tunnels) -> None:
        self._tunnels, self._tickets = tunnels, Tickets()
        self._bridges: dict[int, Bridge] = {}
        self._allowed: dict[tuple[Visit, str], float] = {}
        """When visits to runs were last found to be allowed."""
        self._folder = tempfile.TemporaryDirectory(prefix="dstackweb-gateway-")
        parts = urlsplit(settings.DSTACKWEB_GATEWAY_URL or "http://localhost")
        self._domain, self._scheme = parts.hostname or "", parts.scheme

    def application(self) -> web.Application:
        found = web.Application()
        found.router.add_get(JOBS + "{job}", self._tunnels.take)
        found.router.add_route("*", "/{path:.*}", self.handle)
        return found

    async def close(self) -> None:
        for bridge in self._bridges.values():
            await bridge.close()
        self._folder.cleanup()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """A request to any host name."""
        uid = self._run_of(request.host)
        if uid is None:
            return web.Response(status=404, text="dstackweb: pages of runs have host names of their own\n")
        if request.path == ENTER:
            return await self._enter(request, uid)
        visit = visits.read_cookie(request.cookies.get(visits.cookie_name(), ""))
        if visit is None or not await self._is_allowed(visit, uid):
            return _sign_in()
        if not is_own(request.headers, request.method, f"{self._scheme}://{request.host}"):
            return web.Response(status=403, text="dstackweb: refused to a page of another origin\n")
        bridge = await self._bridge(visit.run_id)
        headers = request_headers(request.headers, request.remote or "", request.host, self._scheme)
        try:
            if request.headers.get("Upgrade", "").lower() == "websocket":
                return await self._carry_messages(request, visit, uid, bridge, headers)
            if request.method not in ("GET", "HEAD") or request.headers.get("Sec-Fetch-Mode") == "navigate":
                self._use(visit)
            return await _carry(request, bridge, headers)
        except aiohttp.ClientError as error:
            text = bridge.trouble or str(error)
            return web.Response(status=502, text=WAITING.format(text=html.escape(text)), content_type="text/html")

    def _run_of(self, host: str) -> str | None:
        """The id of the run that a host name belongs to."""
        name, _, domain = host.partition(":")[0].lower().partition(".")
        try:
            return str(UUID(name)) if domain == self._domain and len(name) == len(str(UUID(int=0))) else None
        except ValueError:
            return None

    async def _enter(self, request: web.Request, uid: str) -> web.StreamResponse:
        """A ticket becomes a cookie of this host name alone."""
        visit = self._tickets.take(request.query.get("ticket", ""))
        if visit is None or not await in_database(visits.is_allowed, visit, uid):
            return _sign_in()
        headers = {"Location": "/", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
        response = web.Response(status=303, headers=headers)
        response.set_cookie(
            visits.cookie_name(), visits.cookie(visit), max_age=COOKIE_S, httponly=True, samesite="Lax", path="/",
            secure=visits.is_secure(),
        )  # fmt: skip
        return response

    async def _is_allowed(self, visit: Visit, uid: str) -> bool:
        now = time.monotonic()
        if now - self._allowed.get((visit, uid), -RECHECK_S) < RECHECK_S:
            return True
        self._allowed = {one: at for one, at in self._allowed.items() if now - at < RECHECK_S}
        if not await in_database(visits.is_allowed, visit, uid):
            return False
        self._allowed[visit, uid] = now
        return True

    def _use(self, visit: Visit) -> None:
        """A person does something. Pages that are only open poll with GET, which says nothing."""
        if (tunnel := self._tunnels.of_run(visit.run_id)) is not None:
            tunnel.use()

    async def _bridge(self, run_id: int) -> Bridge:
        found = self._bridges.get(run_id)
        if found is None:
            for over in [one for one in self._bridges if self._tunnels.of_run(one) is None]:
                await self._bridges.pop(over).close()
                Path(self._folder.name, str(over)).unlink(missing_ok=True)
            path = str(Path(self._folder.name) / str(run_id))
            session = ClientSession(
                connector=UnixConnector(path, limit=CONNECTIONS_OF_RUN), auto_decompress=False,
                timeout=ClientTimeout(total=None, sock_connect=10), cookie_jar=aiohttp.DummyCookieJar(),
            )  # fmt: skip
            server = asyncio.start_unix_server(lambda reader, writer: self._lead(run_id, reader, writer), path)
            self._bridges[run_id] = found = Bridge(session, await server)
        return found

    async def _lead(self, run_id: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Lead a connection of the bridge to the job."""
        bridge = self._bridges[run_id]
        try:
            stream = await self._tunnels.open(run_id, kind="ide")
        except StreamRefused as refused:
            bridge.trouble = str(refused)
            writer.close()
            return
        bridge.trouble = ""
        await pump(stream, reader, writer)

    async def _carry_messages(
        self, request: web.Request, visit: Visit, uid: str, bridge: Bridge, headers: CIMultiDict[str]
    ) -> web.StreamResponse:
        """A WebSocket, both ways, for as long as the visit is allowed."""
        asked = request.headers.get("Sec-WebSocket-Protocol", "")
        protocols = [word.strip() for word in asked.split(",") if word.strip()]
        own = CIMultiDict((name, value) for name, value in headers.items() if not name.lower().startswith(WEBSOCKET))
        address = URL(f"http://run{request.raw_path}", encoded=True)
        async with bridge.session.ws_connect(
            address, headers=own, protocols=protocols, max_msg_size=MESSAGE_MOST, autoping=True
        ) as job:
            chosen = [job.protocol] if job.protocol else []
            person = web.WebSocketResponse(protocols=chosen, max_msg_size=MESSAGE_MOST, heartbeat=30)
            await person.prepare(request)

            async def send() -> None:
                async for message in person:
                    self._use(visit)
                    if message.type is WSMsgType.TEXT:
                        await job.send_str(message.data)
                    elif message.type is WSMsgType.BINARY:
                        await job.send_bytes(message.data)

            async def receive() -> None:
                async for message in job:
                    if message.type is WSMsgType.TEXT:
                        await person.send_str(message.data)
                    elif message.type is WSMsgType.BINARY:
                        await person.send_bytes(message.data)

            async def recheck() -> None:
                while await self._is_allowed(visit, uid):
                    await asyncio.sleep(RECHECK_S)

            tasks = [asyncio.ensure_future(work()) for work in (send, receive, recheck)]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await person.close()
            return person


def _sign_in() -> web.Response:
    text = SIGN_IN.format(url=html.escape(settings.DSTACKWEB_API_URL))
    return web.Response(status=401, text=text, content_type="text/html", headers={"Cache-Control": "no-store"})


async def _carry(request: web.Request, bridge: Bridge, headers: CIMultiDict[str]) -> web.StreamResponse:
    """A request and its answer, neither of which is held in memory."""
    body = request.content if request.can_read_body else None
    address = URL(f"http://run{request.raw_path}", encoded=True)
    async with bridge.session.request(
        request.method, address, headers=headers, data=body, allow_redirects=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    ) as answer:  # fmt: skip
        response = web.StreamResponse(status=answer.status, reason=answer.reason)
        for name, value in response_headers(answer.headers):
            response.headers.add(name, value)
        await response.prepare(request)
        if request.method != "HEAD":
            async for data in answer.content.iter_chunked(CHUNK):
                await response.write(data)
        await response.write_eof()
        return response


def is_own(headers: Mapping[str, str], method: str, origin: str) -> bool:
    """Whether a request is of the run's own pages, or of a person who follows a link; and not of a page of elsewhere.

    Browsers say it in Fetch Metadata on https and on localhost; else only in the origin of what may change something.
    """
    site = headers.get("Sec-Fetch-Site", "same-origin")
    if site not in ("same-origin", "none"):
        return method == "GET" and headers.get("Sec-Fetch-Mode") == "navigate" and _is_page(headers)
    return headers.get("Origin", origin) == origin


def _is_page(headers: Mapping[str, str]) -> bool:
    return headers.get("Sec-Fetch-Dest") == "document"


def request_headers(headers: CIMultiDictProxy[str], address: str, host: str, scheme: str) -> CIMultiDict[str]:
    """What the job gets of a request's headers: nothing of this connection, and not the gateway's cookie."""
    dropped = {word.strip().lower() for word in headers.get("Connection", "").split(",")} | HOP_BY_HOP | OWN
    found = CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)
    if cookies := without_cookie("; ".join(headers.getall("Cookie", [])), visits.cookie_name()):
        found["Cookie"] = cookies
    found["Host"] = found["X-Forwarded-Host"] = host
    found["X-Forwarded-For"], found["X-Forwarded-Proto"] = address, scheme
    if "Content-Length" in headers:
        found["Content-Length"] = headers["Content-Length"]
    return found


def without_cookie(cookies: str, name: str) -> str:
    """A Cookie header without those of this name."""
    pairs = [pair.strip() for pair in cookies.split(";")]
    return "; ".join(pair for pair in pairs if pair and pair.partition("=")[0].strip() != name)


def response_headers(headers: CIMultiDictProxy[str]) -> Iterator[tuple[str, str]]:
    """What a browser gets of an answer's headers: no cookie that reaches beyond this host name."""
    dropped = {word.strip().lower() for word in headers.get("Connection", "").split(",")} | HOP_BY_HOP
    for name, value in headers.items():
        if name.lower() in dropped or name.lower() == "strict-transport-security":
            continue
        if name.lower() == "set-cookie":
            parts = [part.strip() for part in value.split(";")]
            if parts[0].partition("=")[0].strip() == visits.cookie_name():
                continue
            value = "; ".join(part for part in parts if not part.lower().startswith("domain"))
        yield name, value
