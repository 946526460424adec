"""Clients of jobs: what happens to one request says nothing of another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from dstackweb.gateway.clients import JobClient, NotConnected
from dstackweb.runner.streams import STREAMS_MAX, MessageKind, Mux, Stream, StreamRefused
from tests.support import run_async

URL = "http://run/"
Serve = Callable[[Stream, dict[str, Any]], Awaitable[None]]


async def job(stream: Stream, what: dict[str, Any]) -> None:
    """Answers each GET, and closes without an answer at the first request of another method."""
    await stream.accept()
    request = b""
    while (found := await stream.read()) is not None and found[0] != MessageKind.EOF:
        request += found[1]
        if request.endswith(b"\r\n\r\n"):
            if not request.startswith(b"GET"):
                break
            await stream.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
            request = b""
    await stream.close()


async def never_closes(stream: Stream, what: dict[str, Any]) -> None:
    """Answers each request without a body, and leaves the connection to its caller."""
    await stream.accept()
    request = b""
    while (found := await stream.read()) is not None:
        request += found[1]
        if request.endswith(b"\r\n\r\n"):
            await stream.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
            request = b""


def client_of(*refusals: StreamRefused | None, job: Serve = job) -> JobClient:
    """The client of such a job; connections are refused in this order, where that is not None."""

    async def to_job(message: bytes) -> None:
        there.receive(message)

    async def to_us(message: bytes) -> None:
        here.receive(message)

    here, there, order = Mux(to_job), Mux(to_us, job), iter(refusals)

    async def open_stream() -> Stream:
        if (refused := next(order, None)) is not None:
            raise refused
        return await here.open()

    return JobClient(open_stream)


async def fetched(client: JobClient, method: str) -> bytes:
    async with client.session(method).request(method, URL) as answer:
        return await answer.read()


def test_safe_requests_share_a_connection_and_others_get_their_own() -> None:
    async def work() -> None:
        client = client_of(None, StreamRefused("not again", "refused"))
        assert [await fetched(client, "GET") for _ in range(3)] == [b"hello"] * 3
        with pytest.raises(NotConnected):
            await fetched(client, "POST")
        await client.close()

    run_async(work())


def test_many_requests_at_once_wait_for_one_another_where_the_job_closes_no_connection() -> None:
    async def work() -> None:
        client = client_of(job=never_closes)
        found = await asyncio.gather(*(fetched(client, method) for method in ("GET", "DELETE") * 2 * STREAMS_MAX))
        assert found == [b"hello"] * 4 * STREAMS_MAX
        await client.close()

    run_async(work())


@pytest.mark.slow  # 2,400 requests
def test_callers_who_leave_at_any_moment_leave_no_connection_behind() -> None:
    async def work() -> None:
        client = client_of(job=never_closes)
        for steps in [*range(40)] * 60:
            asked = asyncio.ensure_future(fetched(client, "DELETE"))
            for _ in range(steps):
                await asyncio.sleep(0)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        assert await asyncio.wait_for(fetched(client, "DELETE"), 10) == b"hello"
        await client.close()

    run_async(work())


@pytest.mark.parametrize("refused_first", [True, False])
def test_a_request_that_was_sent_is_never_taken_for_one_that_was_not(refused_first: bool) -> None:
    async def work() -> None:
        refusals = [StreamRefused("nothing listens", "refused"), None]
        client = client_of(*refusals if refused_first else reversed(refusals))
        found = await asyncio.gather(*(fetched(client, "POST") for _ in refusals), return_exceptions=True)
        kinds = [NotConnected, aiohttp.ServerDisconnectedError]
        assert [type(one) for one in found] == (kinds if refused_first else kinds[::-1])
        await client.close()

    run_async(work())
