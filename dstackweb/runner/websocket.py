"""A client of WebSockets (RFC 6455) for binary messages, on asyncio's streams."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import ssl
import struct
from collections.abc import Mapping
from urllib.parse import urlsplit

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
HEAD_MAX = 16 * 1024
OPEN_S = 15.0
FAILURES = (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)


class NotConnected(Exception):
    """The connection can't be made, or was closed; the message says why. `status` is an HTTP status that refused it."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.status = status


def masked(data: bytes, key: bytes) -> bytes:
    """`data` XOR the repeated four bytes of `key`, which is its own inverse."""
    size = len(data)
    if not size:
        return b""
    pad = key * (size // 4 + 1)
    return (int.from_bytes(data, "big") ^ int.from_bytes(pad[:size], "big")).to_bytes(size, "big")


def frame(opcode: int, data: bytes, key: bytes | None) -> bytes:
    """One whole frame; clients have a `key`, servers none."""
    size, bit = len(data), 0x80 if key is not None else 0
    if size < 126:
        head = struct.pack("!BB", 0x80 | opcode, bit | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", 0x80 | opcode, bit | 126, size)
    else:
        head = struct.pack("!BBQ", 0x80 | opcode, bit | 127, size)
    return head + (data if key is None else key + masked(data, key))


class WebSocket:
    """An open connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int) -> None:
        self._reader, self._writer, self._most = reader, writer, most
        self._sending = asyncio.Lock()

    async def send(self, data: bytes, opcode: int = BINARY) -> None:
        """Raises OSError."""
        async with self._sending:
            self._writer.write(frame(opcode, data, os.urandom(4)))
            await self._writer.drain()

    async def receive(self, silence_s: float) -> bytes:
        """The next message. Raises NotConnected, also after so long without a word of the other end."""
        message, is_open = b"", False
        while True:
            try:
                final, opcode, data = await asyncio.wait_for(self._frame(), silence_s)
            except (asyncio.TimeoutError, *FAILURES) as error:  # noqa: UP041  # another class before Python 3.11
                raise NotConnected(f"{type(error).__name__}: {error}") from None
            if opcode == CLOSE:
                raise NotConnected("it was closed")
            if opcode == PING:
                await self.send(data, PONG)
            elif opcode in (TEXT, BINARY, CONTINUATION):
                if (opcode == CONTINUATION) != is_open:
                    raise NotConnected("a frame is out of turn")
                message += data
                if len(message) > self._most:
                    raise NotConnected("a message is too long")
                if final:
                    return message
                is_open = True

    async def _frame(self) -> tuple[bool, int, bytes]:
        first, second = await self._reader.readexactly(2)
        size = second & 0x7F
        if size == 126:
            (size,) = struct.unpack("!H", await self._reader.readexactly(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", await self._reader.readexactly(8))
        if size > self._most:
            raise NotConnected("a frame is too long")
        key = await self._reader.readexactly(4) if second & 0x80 else None
        data = await self._reader.readexactly(size)
        return bool(first & 0x80), first & 0x0F, masked(data, key) if key else data

    def close(self) -> None:
        self._writer.close()


async def connect(url: str, headers: Mapping[str, str], *, most: int) -> WebSocket:
    """Connect to an `http` or `https` address. Raises NotConnected."""
    parts = urlsplit(url)
    is_secure = parts.scheme == "https"
    try:
        return await asyncio.wait_for(_open(parts.hostname or "", parts.port or (443 if is_secure else 80), is_secure,
                                            parts.path, parts.netloc, headers, most), OPEN_S)  # fmt: skip
    except (asyncio.TimeoutError, *FAILURES) as error:  # noqa: UP041  # another class before Python 3.11
        raise NotConnected(f"{type(error).__name__}: {error}") from None


async def _open(
    host: str, port: int, is_secure: bool, path: str, name: str, headers: Mapping[str, str], most: int
) -> WebSocket:
    context = ssl.create_default_context() if is_secure else None
    reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=HEAD_MAX)
    try:
        key = base64.b64encode(os.urandom(16)).decode()
        asked = {"Host": name, "Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": key,
                 "Sec-WebSocket-Version": "13", **headers}  # fmt: skip
        lines = "".join(f"{field}: {value}\r\n" for field, value in asked.items())
        writer.write(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = int(head.split(" ", 2)[1]) if head.startswith("HTTP/1.") else 0
        proof = base64.b64encode(hashlib.sha1((key + GUID).encode(), usedforsecurity=False).digest()).decode()
        if status != 101 or proof not in head:
            raise NotConnected(head.split("\r\n", 1)[0][:200], status)
    except BaseException:
        writer.close()
        raise
    return WebSocket(reader, writer, most)
