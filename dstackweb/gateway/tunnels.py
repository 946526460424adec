"""The connections of runners, by which jobs are reached, and the use that people make of them."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from aiohttp import WSMsgType, web
from django.db import close_old_connections
from django.utils import timezone

from dstackweb.gateway import access
from dstackweb.gateway.access import RunnerAccess
from dstackweb.gateway.places import Places
from dstackweb.runner.streams import MESSAGE_MAX, Mux, ProtocolError, Stream, StreamRefused
from dstackweb.runs import inactivity
from dstackweb.runs.inactivity import Use

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

HEARTBEAT_S = 20.0
NOTE_S = 10.0
"""How often the use of runs is noted."""
NO_TUNNEL = "no_tunnel"
"""The code of a stream that is refused since no runner is connected; the reason is the run's status."""
SEND_S = 60.0
"""A runner that takes nothing for so long is gone."""

_threads = ThreadPoolExecutor(4, "database")


async def in_database(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run what uses the database in a thread for that."""

    def call() -> T:
        close_old_connections()
        try:
            return work(*args, **kwargs)
        finally:
            close_old_connections()

    return await asyncio.get_running_loop().run_in_executor(_threads, call)


class Tunnel:
    def __init__(self, runner: RunnerAccess, mux: Mux, now: float) -> None:
        self.runner, self.mux = runner, mux
        self.noted, self.used = now, 0.0

    def use(self) -> None:
        self.used = time.monotonic()

    def use_since(self, now: float, moment: dt.datetime) -> Use:
        """Its use since this was last asked; `moment` is `now` of the clock that people read."""
        was_used = self.used > self.noted
        idle_s = now - max(self.noted, self.used)
        self.noted = now
        used_at = moment - dt.timedelta(seconds=idle_s)
        return Use(self.runner.attempt, used_at if was_used else None, idle_s)


class Tunnels:
    """All connected runners, one per run. `watch` goes on for each of them while it is connected."""

    def __init__(self, places: Places, watch: Callable[[Tunnel], Awaitable[None]] | None = None) -> None:
        self._places, self._watch = places, watch
        self._by_run: dict[int, tuple[Tunnel, web.WebSocketResponse]] = {}

    async def take(self, request: web.Request) -> web.StreamResponse:
        """A runner connects, and stays connected."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            job = UUID(request.match_info["job"])
        except ValueError:
            raise web.HTTPNotFound from None
        runner = await in_database(access.runner_of, job, token, request.headers.get("X-Nonce", ""))
        if runner is None:
            raise web.HTTPForbidden(text="this is not the runner of a job that people connect to")
        self._places.trust(request.transport)
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_S, compress=False, max_msg_size=MESSAGE_MAX)
        await socket.prepare(request)

        async def send(message: bytes) -> None:
            await asyncio.wait_for(socket.send_bytes(message), SEND_S)

        tunnel = Tunnel(runner, Mux(send), time.monotonic())
        former = self._by_run.get(runner.run_id)
        self._by_run[runner.run_id] = tunnel, socket
        log.info("the runner of job %s is connected", runner.job)
        if former is not None:
            former[0].mux.lose()
            await former[1].close()
        await self._note([tunnel])
        watching = asyncio.ensure_future(self._watch(tunnel)) if self._watch else None
        try:
            async for message in socket:
                if message.type is not WSMsgType.BINARY:
                    break
                tunnel.mux.receive(message.data)
        except ProtocolError as error:
            log.warning("the runner of job %s does not keep to the protocol: %s", runner.job, error)
        finally:
            if watching is not None:
                watching.cancel()
            tunnel.mux.lose()
            if self._by_run.get(runner.run_id, (None,))[0] is tunnel:
                del self._by_run[runner.run_id]
            log.info("the runner of job %s is no longer connected", runner.job)
        return socket

    def of_run(self, run_id: int) -> Tunnel | None:
        found = self._by_run.get(run_id)
        return found[0] if found else None

    async def open(self, run_id: int, **what: Any) -> Stream:
        """Open a stream to a run's job. Raises StreamRefused, whose code may be NO_TUNNEL."""
        tunnel = self.of_run(run_id)
        if tunnel is None:
            raise StreamRefused(await in_database(access.status_of, run_id), NO_TUNNEL)
        return await tunnel.mux.open(**what)

    async def keep_notes(self) -> None:
        """Note the use of all connected runs, again and again."""
        while True:
            await asyncio.sleep(NOTE_S)
            await self._note([tunnel for tunnel, _socket in self._by_run.values()])

    async def _note(self, tunnels: list[Tunnel]) -> None:
        if not tunnels:
            return
        now, moment = time.monotonic(), timezone.now()
        uses = {tunnel.runner.run_id: tunnel.use_since(now, moment) for tunnel in tunnels}
        try:
            await in_database(inactivity.note, uses, moment)
        except Exception:
            log.exception("the use of %d runs can't be noted", len(uses))
