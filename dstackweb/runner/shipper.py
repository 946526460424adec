"""Sending the spool to the API: by offset, masked, up to the log's limit."""

from __future__ import annotations

import contextlib
import os

from dstackweb.runner.client import Client, Refused
from dstackweb.runner.redact import mask, settled
from dstackweb.runner.state import State

CHUNK = 256 * 1024
SPOOL_EXCESS = 1 << 20
"""How much more than the log may hold lies in the spool before it is cut (bytes)."""


class Shipper:
    """Sends one stream: the spool, masked, and past `limit` one last line instead. `offset` is how much has arrived.

    Each byte of it follows from the spool alone, so that a successor goes on in the middle with the same ones.
    """

    def __init__(self, client: Client, state: State, secrets: list[bytes], limit: int) -> None:
        self.client, self.state, self.secrets, self.limit = client, state, secrets, limit
        self.offset: int | None = None
        self._base: int = state.read_json("base") or 0
        self._longest = max(map(len, secrets), default=1)
        line = f"\n[dstackweb: the log reached its limit of {limit >> 20} MB; what followed is lost]\n"
        self._last_line = line.encode()

    def ship(self, final: bool = False) -> bool:
        """Send one piece; False when there is nothing more to send now. Raises Unreachable or Refused.

        What may be the beginning of a secret waits for what follows, except at the end (`final`).
        """
        if self.offset is None:
            self.offset = int(self.client.post_bytes("logs?offset=0", b"")["next"])
        data = self._piece(self.offset, final)
        if not data:
            return False
        try:
            self.offset = int(self.client.post_bytes(f"logs?offset={self.offset}", data)["next"])
        except Refused as refused:
            if refused.status != 409 or "expected" not in refused.body:
                raise
            self.offset = int(refused.body["expected"])
        return True

    def trim(self) -> None:
        """Cut what will never be sent, so that a flood doesn't fill the disk. The commands append, and go on there."""
        kept = max(0, self.limit - self._base) + self._longest
        if self._spool_size() > kept + SPOOL_EXCESS:
            os.truncate(self.state.path("spool"), kept)

    def _piece(self, offset: int, final: bool) -> bytes:
        """The stream's next bytes, masked with what stands before and behind them in view."""
        size = self._spool_size()
        if offset > self.limit or (offset == self.limit and self._base + size > self.limit):
            return self._last_line[offset - self.limit :]
        if not 0 <= offset - self._base <= size:
            self._begin_anew(offset)
        at = offset - self._base
        start = max(0, at - self._longest + 1)
        window = self._read(start, at - start + CHUNK + self._longest)
        end = len(window) if final else settled(window, self.secrets)
        end = min(end, at - start + min(CHUNK, self.limit - offset))
        return mask(window, self.secrets)[at - start : end]

    def _begin_anew(self, offset: int) -> None:
        """The spool is not what it was: a command opened /dev/stdout anew and so emptied it, or a disk lost its end.

        What it holds now follows on what has arrived.
        """
        self._base = offset
        with contextlib.suppress(OSError):
            self.state.write("base", str(offset))

    def _spool_size(self) -> int:
        try:
            return os.path.getsize(self.state.path("spool"))
        except FileNotFoundError:
            return 0

    def _read(self, start: int, length: int) -> bytes:
        try:
            with open(self.state.path("spool"), "rb") as spool:
                spool.seek(start)
                return spool.read(length)
        except FileNotFoundError:
            return b""
