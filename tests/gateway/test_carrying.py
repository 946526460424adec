"""Requests on their way to a job, by callers who stand still, and bodies as they are."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import aiohttp
import pytest

from dstackweb.gateway import pages
from dstackweb.gateway.access import Admission
from dstackweb.gateway.http import HttpFront
from dstackweb.gateway.places import Places
from dstackweb.gateway.tunnels import Tunnels
from dstackweb.runner.streams import MessageKind, Stream
from tests.gateway.test_clients import Serve, client_of
from tests.support import run_async

HOST = f"{uuid4()}.localhost"
HEADERS = f"HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer dw_of-ann\r\n".encode()


@pytest.fixture(autouse=True)
def admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def admit(*_asked: object) -> Admission:
        return Admission("ann", 1, "dev", 80)

    monkeypatch.setattr(pages.Pages, "_admit", admit)


@contextlib.asynccontextmanager
async def front_of(job: Serve, known: int = 4) -> AsyncIterator[int]:
    """A front that passes all on to a job; its port."""
    places, client = Places(strangers=4, known=known), client_of(job=job)
    found = pages.Pages(Tunnels(places), places)
    found._clients._clients[1] = client
    front = HttpFront(found.application(), places)
    listener = await front.listen("127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        await front.close()
        await client.close()


async def greets(stream: Stream, what: dict[str, Any]) -> None:
    await stream.accept()
    await stream.read()
    await stream.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")


def test_a_user_has_a_quarter_of_the_places_and_is_told_so_beyond() -> None:
    async def work() -> None:
        async with front_of(greets, known=8) as port:
            connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            statuses = []
            for reader, writer in connections:
                writer.write(b"GET / " + HEADERS + b"\r\n")
                statuses.append((await reader.readline()).split()[1])
            assert statuses == [b"200", b"200", b"503"]

    run_async(work())


def test_a_caller_who_takes_no_more_of_an_answer_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "STILL_S", 0.05)

    async def work() -> None:
        ended = asyncio.Event()

        async def floods(stream: Stream, what: dict[str, Any]) -> None:
            await stream.accept()
            try:
                await stream.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    await stream.write(bytes(65536))
            finally:
                ended.set()

        async with front_of(floods) as port:
            _reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(b"GET / " + HEADERS + b"\r\n")
            await ended.wait()

    run_async(work())


def test_a_caller_who_sends_no_more_of_a_body_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "STILL_S", 0.05)

    async def work() -> None:
        async def waits(stream: Stream, what: dict[str, Any]) -> None:
            await stream.accept()
            while (found := await stream.read()) is not None and found[0] != MessageKind.EOF:
                pass

        async with front_of(waits) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / " + HEADERS + b"Content-Length: 9\r\n\r\nhalf")
            assert b" 408 " in await reader.readline()
            writer.close()

    run_async(work())


def test_a_compressed_body_reaches_the_job_as_it_was_sent() -> None:
    sent, received = gzip.compress(b"x" * 100_000), bytearray()

    async def work() -> None:
        async def takes(stream: Stream, what: dict[str, Any]) -> None:
            await stream.accept()
            while not received.endswith(sent[-8:]) and (found := await stream.read()) is not None:
                received.extend(found[1])
            await stream.write(b"HTTP/1.1 204 No Content\r\n\r\n")

        async with front_of(takes) as port, aiohttp.ClientSession() as session:
            headers = {"Host": HOST, "Authorization": "Bearer dw_of-ann", "Content-Encoding": "gzip"}
            async with session.post(f"http://127.0.0.1:{port}/", data=sent, headers=headers) as answer:
                assert answer.status == 204

    run_async(asyncio.wait_for(work(), 20))
    assert received.partition(b"\r\n\r\n")[2] == sent
