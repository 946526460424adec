"""Streams over one connection: whatever is written arrives in order, and no stream holds up another."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from dstackweb.runner.streams import WINDOW, MessageKind, Mux, ProtocolError, Stream, StreamRefused, decode, encode
from dstackweb.runner.websocket import frame, masked
from tests.support import run_async

PIECES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3 * WINDOW // 2), st.booleans()), max_size=6)


class Pair:
    """Two ends, and messages that are under way between them."""

    def __init__(self, serve: Callable[[Stream, dict[str, Any]], Awaitable[None]], most: int = 64) -> None:
        self.most_held = 0
        self.here = Mux(self._sender("there"), most=most)
        self.there = Mux(self._sender("here"), serve, most=most)

    def _sender(self, to: str) -> Callable[[bytes], Awaitable[None]]:
        async def send(message: bytes) -> None:
            getattr(self, to).receive(message)
            await asyncio.sleep(0)

        return send


async def collected(stream: Stream) -> dict[MessageKind, bytes]:
    found = {MessageKind.DATA: b"", MessageKind.ERROR_DATA: b""}
    while (one := await stream.read()) is not None:
        if one[0] == MessageKind.EOF:
            break
        found[one[0]] += one[1]
    return found


@given(PIECES)
def test_what_is_written_arrives_in_order_on_every_stream(pieces: list[tuple[int, int, bool]]) -> None:
    async def serve(stream: Stream, what: dict[str, Any]) -> None:
        await stream.accept()
        got = await collected(stream)
        await stream.write(got[MessageKind.DATA])
        await stream.write(got[MessageKind.ERROR_DATA], MessageKind.ERROR_DATA)
        await stream.close(status=what["number"])

    async def use(pair: Pair, number: int) -> None:
        stream = await pair.here.open(number=number)
        sent = {MessageKind.DATA: b"", MessageKind.ERROR_DATA: b""}
        reading = asyncio.ensure_future(collected(stream))
        for of, size, is_error in pieces:
            if of == number:
                kind, data = (MessageKind.ERROR_DATA if is_error else MessageKind.DATA), os.urandom(size)
                sent[kind] += data
                await stream.write(data, kind)
        await stream.finish()
        assert await reading == sent
        assert stream.end == {"status": number}

    async def run() -> None:
        pair = Pair(serve)
        await asyncio.wait_for(asyncio.gather(*(use(pair, number) for number in range(3))), 20)
        assert len(pair.here) == 0

    run_async(run())


def test_a_stream_that_nobody_reads_holds_up_its_writer_alone() -> None:
    async def serve(stream: Stream, what: dict[str, Any]) -> None:
        await stream.accept()
        if what["reads"]:
            await stream.write((await collected(stream))[MessageKind.DATA])
        else:
            await asyncio.sleep(60)

    async def run() -> None:
        pair = Pair(serve)
        stuck, other = await pair.here.open(reads=False), await pair.here.open(reads=True)
        writing = asyncio.ensure_future(stuck.write(b"x" * (WINDOW + 1)))
        await other.write(b"through")
        await other.finish()
        assert await asyncio.wait_for(collected(other), 5) == {
            MessageKind.DATA: b"through",
            MessageKind.ERROR_DATA: b"",
        }
        assert not writing.done()
        await stuck.close()
        with pytest.raises(ConnectionError):
            await writing

    run_async(run())


def test_an_end_that_sends_more_than_its_window_is_cut_off() -> None:
    async def run() -> None:
        async def send(message: bytes) -> None:
            kind, number, _payload = decode(message)
            if kind == MessageKind.OPEN:
                mux.receive(encode(MessageKind.OPENED, number))

        mux = Mux(send)
        stream = await mux.open()
        mux.receive(encode(MessageKind.DATA, stream.number, b"x" * WINDOW))
        with pytest.raises(ProtocolError):
            mux.receive(encode(MessageKind.DATA, stream.number, b"x"))

    run_async(run())


def test_streams_are_limited_refused_and_lost_with_their_connection() -> None:
    async def serve(stream: Stream, what: dict[str, Any]) -> None:
        if what.get("refuse"):
            await stream.close(error="nothing listens there")
            return
        await stream.accept()
        await stream.read()

    async def run() -> None:
        pair = Pair(serve, most=2)
        with pytest.raises(StreamRefused, match="nothing listens there"):
            await pair.here.open(refuse=True)
        first, _second = await pair.here.open(), await pair.here.open()
        with pytest.raises(StreamRefused, match="too many"):
            await pair.here.open()
        pair.here.lose()
        assert await first.read() is None
        with pytest.raises(ConnectionError):
            await first.write(b"x")
        with pytest.raises(StreamRefused, match="lost"):
            await pair.here.open()

    run_async(run())


@given(st.binary(max_size=40))
def test_what_is_no_message_is_refused_and_never_crashes(message: bytes) -> None:
    async def run() -> None:
        async def send(_message: bytes) -> None:
            return

        mux = Mux(send)
        try:
            mux.receive(message)
        except ProtocolError:
            return

    run_async(run())


@settings(max_examples=30)
@given(st.binary(max_size=70_000), st.binary(min_size=4, max_size=4))
def test_a_frame_is_masked_as_websockets_have_it(data: bytes, key: bytes) -> None:
    assert masked(data, key) == bytes(byte ^ key[at % 4] for at, byte in enumerate(data))
    assert frame(2, data, key).endswith(key + masked(data, key))
