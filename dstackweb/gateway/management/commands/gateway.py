"""`dstackweb-server gateway`: the way for people to their dev environments, by SSH and by pages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from dstackweb.gateway.checks import Checks
from dstackweb.gateway.http import HttpFront
from dstackweb.gateway.pages import Pages
from dstackweb.gateway.places import FILES, places, report_refused_connections
from dstackweb.gateway.ssh import SshServer
from dstackweb.gateway.tunnels import Tunnels, in_database
from dstackweb.lib import schema, ssh_keys
from dstackweb.lib.process import REFUSED, raise_file_limit
from dstackweb.scheduler.processes.protection import end_jobs_on

log = logging.getLogger("dstackweb.gateway")

BIND_AGAIN_S = 5.0
SCHEMA_EVERY_S = 5.0


class Command(BaseCommand):
    help = __doc__

    def handle(self, *args: Any, **options: Any) -> None:
        if not asyncio.run(serve()):
            sys.exit(REFUSED)


async def serve() -> bool:
    """Serve both fronts until SIGTERM or SIGINT. False: this program does not fit the database."""
    logging.getLogger("asyncssh").setLevel(logging.WARNING)  # it logs commands, which are people's own
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    report_refused_connections(loop)
    files, checks, host = raise_file_limit(FILES), Checks(), settings.DSTACKWEB_HOST
    of_http, of_ssh = places(strangers=1000, known=2000, files=files), places(strangers=100, known=500, files=files)
    tunnels = Tunnels(of_http, checks.watch)
    pages = Pages(tunnels, of_http)
    front, ssh_front = HttpFront(pages.application(), of_http), SshServer(tunnels, of_ssh)
    key = await asyncio.to_thread(ssh_keys.host_key, Path(settings.DSTACKWEB_HOME))

    async def listen_http() -> None:
        await front.listen(host, settings.DSTACKWEB_GATEWAY_PORT)

    async def listen_ssh() -> None:
        await ssh_front.listen(host, settings.DSTACKWEB_SSH_PORT, str(key))

    work: list[Awaitable[Any]] = [
        bind(listen_http, "DSTACKWEB_GATEWAY_PORT", settings.DSTACKWEB_GATEWAY_PORT),
        tunnels.keep_notes(),
        ssh_front.recheck(),
        checks.keep(),
    ]
    if settings.DSTACKWEB_SSH_PORT:
        work.append(bind(listen_ssh, "DSTACKWEB_SSH_PORT", settings.DSTACKWEB_SSH_PORT))
    tasks = [asyncio.ensure_future(one) for one in work]
    fits = True
    try:
        while fits and not stopping.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stopping.wait(), SCHEMA_EVERY_S)
            fits = stopping.is_set() or not await in_database(schema.refusal)
    finally:
        for task in tasks:
            task.cancel()
        await front.close()
        await pages.close()
    return fits


async def bind(listen: Callable[[], Awaitable[None]], setting: str, port: int) -> None:
    """Listen on a port, trying again while something else does. A job that does is ended."""
    reported = False
    while True:
        try:
            await listen()
        except OSError as error:
            if not reported:
                log.error("port %d can't be opened: %s. Set %s to another one", port, error.strerror, setting)
            reported = True
            if not await asyncio.to_thread(end_jobs_on, port, settings.DSTACKWEB_JOB_USER):
                await asyncio.sleep(BIND_AGAIN_S)
        else:
            log.info("listening on port %d", port)
            return
