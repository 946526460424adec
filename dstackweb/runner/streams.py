"""Many streams over one connection, each with a window of its own: a slow one holds up no other, and fills no memory.

The gateway opens streams, the runner accepts them. A message is a kind, the stream's number, and bytes. The sender of
data may have WINDOW bytes under way; the reader returns credit as it takes them.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Any

HEAD, CREDIT = struct.Struct("!BI"), struct.Struct("!I")
WINDOW = 256 * 1024
CHUNK = 32 * 1024
"""Bytes of data in one message at most."""
MESSAGE_MAX = 1 << 20
"""A connection may refuse longer messages."""
STREAMS_MAX = 128
BUSY = "busy"
"""The code of a stream that is refused since STREAMS_MAX are open."""
COMMAND_MAX = 512 * 1024

Send = Callable[[bytes], Awaitable[None]]


class MessageKind(IntEnum):
    OPEN = 1
    OPENED = 2
    DATA = 3
    ERROR_DATA = 4
    """Data of the second output, stderr."""
    CREDIT = 5
    EOF = 6
    CONTROL = 7
    """Out of turn: a window's size, a signal."""
    END = 8


class ProtocolError(Exception):
    """The other end does not keep to the protocol: the connection is of no use."""


class StreamRefused(Exception):
    """The other end did not open the stream; the message says why, and `code`, where that is a known reason."""

    def __init__(self, why: str, code: str = "") -> None:
        super().__init__(why)
        self.code = code


def encode(kind: MessageKind, number: int, payload: bytes = b"") -> bytes:
    return HEAD.pack(kind, number) + payload


def decode(message: bytes) -> tuple[MessageKind, int, bytes]:
    """Raises ProtocolError."""
    try:
        kind, number = HEAD.unpack_from(message)
        return MessageKind(kind), number, message[HEAD.size :]
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"not a message: {error}") from None


def _read_json(payload: bytes) -> dict[str, Any]:
    try:
        found = json.loads(payload)
    except ValueError:
        raise ProtocolError("not JSON") from None
    if not isinstance(found, dict):
        raise ProtocolError("not an object")
    return found


class Stream:
    """One stream. `end` is what the other end said at its end; None while it is open.

    `on_control` gets what comes out of turn.
    """

    def __init__(self, mux: Mux, number: int) -> None:
        self.number = number
        self.end: dict[str, Any] | None = None
        self.on_control: Callable[[dict[str, Any]], None] = lambda _what: None
        self._mux = mux
        self._inbox: deque[tuple[MessageKind, bytes]] = deque()
        self._expected = WINDOW
        """How much the other end may still send."""
        self._owed = 0
        """What was taken, and not returned as credit yet."""
        self._credit = WINDOW
        self._changed = asyncio.Event()
        self.is_closed = False
        """Whether this end has ended it."""

    async def read(self) -> tuple[MessageKind, bytes] | None:
        """The next DATA, ERROR_DATA or EOF; None once it has ended."""
        while not self._inbox:
            if self.end is not None or self.is_closed:
                return None
            await self._wait()
        kind, data = self._inbox.popleft()
        self._owed += len(data)
        if self._owed >= WINDOW // 2 and self.end is None:
            owed, self._owed = self._owed, 0
            self._expected += owed
            await self._mux.send(MessageKind.CREDIT, self.number, CREDIT.pack(owed))
        return kind, data

    async def write(self, data: bytes, kind: MessageKind = MessageKind.DATA) -> None:
        """Send data, waiting for the reader. Raises ConnectionError once it has ended."""
        rest = memoryview(data)
        while rest:
            while not self._credit and self.end is None and not self.is_closed:
                await self._wait()
            if self.end is not None or self.is_closed:
                raise ConnectionError("the stream has ended")
            part = rest[: min(self._credit, CHUNK)]
            self._credit -= len(part)
            rest = rest[len(part) :]
            await self._mux.send(kind, self.number, bytes(part))

    async def finish(self) -> None:
        """Nothing more is written."""
        if self.end is None and not self.is_closed:
            await self._mux.send(MessageKind.EOF, self.number)

    async def accept(self) -> None:
        await self._mux.send(MessageKind.OPENED, self.number)

    async def control(self, **what: Any) -> None:
        if self.end is None and not self.is_closed:
            await self._mux.send(MessageKind.CONTROL, self.number, json.dumps(what).encode())

    async def close(self, **why: Any) -> None:
        """End it at both ends."""
        if self.is_closed:
            return
        self.is_closed = True
        self._changed.set()
        if self._mux.forget(self.number) and self.end is None:
            await self._mux.send(MessageKind.END, self.number, json.dumps(why).encode())

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def take(self, kind: MessageKind, payload: bytes) -> None:
        """A message of the other end has arrived. Raises ProtocolError."""
        if kind in (MessageKind.DATA, MessageKind.ERROR_DATA):
            self._expected -= len(payload)
            if self._expected < 0:
                raise ProtocolError("more data than its window has room for")
            self._inbox.append((kind, payload))
        elif kind == MessageKind.EOF:
            self._inbox.append((kind, b""))
        elif kind == MessageKind.CREDIT:
            if len(payload) != CREDIT.size:
                raise ProtocolError("not a credit")
            self._credit += CREDIT.unpack(payload)[0]
        elif kind == MessageKind.CONTROL:
            self.on_control(_read_json(payload))
        elif kind == MessageKind.END:
            self.end = _read_json(payload)
        self._changed.set()


class Mux:
    """The streams of one connection. `send` sends a message; `serve` handles a stream that the other end opened."""

    def __init__(
        self,
        send: Send,
        serve: Callable[[Stream, dict[str, Any]], Awaitable[None]] | None = None,
        most: int = STREAMS_MAX,
    ) -> None:
        self._send, self._serve, self._most = send, serve, most
        self._streams: dict[int, Stream] = {}
        self._opening: dict[int, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._last = 0
        self.is_lost = False

    def __len__(self) -> int:
        return len(self._streams)

    async def open(self, **what: Any) -> Stream:
        """Open a stream; `what` says what it is to lead to. Raises StreamRefused."""
        if self.is_lost:
            raise StreamRefused("the connection is lost")
        if len(self._streams) >= self._most:
            raise StreamRefused("too many streams are open", BUSY)
        self._last += 1
        stream = self._streams[self._last] = Stream(self, self._last)
        opened = self._opening[self._last] = asyncio.get_running_loop().create_future()
        try:
            await self.send(MessageKind.OPEN, stream.number, json.dumps(what).encode())
            await opened
        except asyncio.CancelledError:
            await stream.close()
            raise
        finally:
            self._opening.pop(stream.number, None)
        return stream

    async def send(self, kind: MessageKind, number: int, payload: bytes = b"") -> None:
        if self.is_lost:
            if kind in (MessageKind.DATA, MessageKind.ERROR_DATA):
                raise ConnectionError("the connection is lost")
            return
        await self._send(encode(kind, number, payload))

    def receive(self, message: bytes) -> None:
        """A message has arrived. Never waits. Raises ProtocolError."""
        kind, number, payload = decode(message)
        if kind == MessageKind.OPEN:
            self._accept(number, _read_json(payload))
            return
        stream = self._streams.get(number)
        if stream is None:  # ended here, and the other end does not know it yet
            return
        opening = self._opening.get(number)
        stream.take(kind, payload)
        if kind == MessageKind.OPENED and opening is not None and not opening.done():
            opening.set_result(None)
        if kind == MessageKind.END:
            self.forget(number)
            if opening is not None and not opening.done():
                end = stream.end or {}
                opening.set_exception(StreamRefused(str(end.get("error", "it was refused")), str(end.get("code", ""))))

    def _accept(self, number: int, what: dict[str, Any]) -> None:
        if self._serve is None or number in self._streams:
            raise ProtocolError("a stream can't be opened here")
        stream = Stream(self, number)
        if len(self._streams) >= self._most:
            self._keep(stream.close(error="too many streams are open", code=BUSY))
            return
        self._streams[number] = stream
        self._keep(self._serving(stream, what))

    async def _serving(self, stream: Stream, what: dict[str, Any]) -> None:
        assert self._serve is not None
        try:
            await self._serve(stream, what)
        except (OSError, ValueError, KeyError, TypeError) as error:
            await stream.close(error=f"{type(error).__name__}: {error}")
        finally:
            await stream.close()

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, number: int) -> bool:
        """Whether it was open."""
        return self._streams.pop(number, None) is not None

    def lose(self) -> None:
        """The connection is lost, and all streams with it."""
        self.is_lost = True
        for stream in list(self._streams.values()):
            stream.take(MessageKind.END, b'{"error": "the connection is lost"}')
        for opening in list(self._opening.values()):
            if not opening.done():
                opening.set_exception(StreamRefused("the connection is lost"))
        self._streams.clear()
