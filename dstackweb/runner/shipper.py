"""Sending the spool to the API: by offset, masked, up to the log's limit."""

from __future__ import annotations

import os

from dstackweb.runner.client import Client, Refused
from dstackweb.runner.redact import mask, settled
from dstackweb.runner.state import State

CHUNK = 256 * 1024
SPOOL_KEPT = 1 << 20
"""Once the log has reached its limit, the spool is emptied whenever it is larger than this (bytes)."""


class Shipper:
    """`offset` is how much of the stream has arrived, None until the API has said so."""

    def __init__(self, client: Client, state: State, secrets: list[bytes], limit: int) -> None:
        self.client, self.state, self.limit = client, state, limit
        self.secrets = secrets
        self.offset: int | None = None
        self.capped: int | None = state.read_json("capped")
        self._longest = max(map(len, secrets), default=1)

    def ship(self, final: bool = False) -> bool:
        """Send one piece; False when there is nothing more to send now. Raises Unreachable or Refused.

        What may be the beginning of a secret waits for what follows, except at the end (`final`).
        """
        if self.capped is not None:
            self._empty_spool()
            return False
        if self.offset is None:
            self.offset = int(self.client.post_bytes("logs?offset=0", b"")["next"])
        data = self._piece(final)
        if not data:
            return False
        if self.offset + len(data) >= self.limit:
            self._cap(data)
            return False
        self._send(data)
        return True

    def _send(self, data: bytes) -> None:
        try:
            self.offset = int(self.client.post_bytes(f"logs?offset={self.offset}", data)["next"])
        except Refused as refused:
            if refused.status != 409 or "expected" not in refused.body:
                raise
            self.offset = int(refused.body["expected"])

    def _piece(self, final: bool) -> bytes:
        """The next bytes of the stream, masked with what stands before and behind them in view."""
        assert self.offset is not None
        start = max(0, self.offset - self._longest + 1)
        try:
            with open(self.state.path("spool"), "rb") as spool:
                spool.seek(start)
                window = spool.read(self.offset - start + CHUNK + self._longest)
        except FileNotFoundError:
            return b""
        end = len(window) if final else settled(window, self.secrets)
        end = min(end, self.offset - start + CHUNK)
        return mask(window, self.secrets)[self.offset - start : end]

    def _cap(self, data: bytes) -> None:
        """Send what still fits and one last line. The line is part of the limit's file, so it is sent once."""
        assert self.offset is not None
        line = f"\n[dstackweb: the log reached its limit of {self.limit >> 20} MB; what followed is lost]\n".encode()
        last = data[: max(0, self.limit - self.offset)] + line
        end = self.offset + len(last)
        self._send(last)
        if self.offset == end:
            self.capped = end
            self.state.write("capped", str(end))

    def _empty_spool(self) -> None:
        """The commands append, so an emptied spool simply begins anew."""
        path = self.state.path("spool")
        try:
            if os.path.getsize(path) > SPOOL_KEPT:
                os.truncate(path, 0)
        except FileNotFoundError:
            pass
