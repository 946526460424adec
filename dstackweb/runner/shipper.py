"""Sending the spool to the API: by offset, masked."""

from __future__ import annotations

from dstackweb.runner.client import Client, Refused, Unreachable
from dstackweb.runner.redact import mask, settled

CHUNK = 256 * 1024


class Shipper:
    """Sends one spool. `offset` is how much has arrived, None until the API has said so.

    Masking keeps lengths, so offsets in the spool and in the API's log are the same.
    """

    def __init__(self, client: Client, spool: str, secrets: list[bytes]) -> None:
        self.client, self.spool, self.secrets = client, spool, secrets
        self.offset: int | None = None
        self._longest = max(map(len, secrets), default=1)

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
            arrived = int(self.client.post_bytes(f"logs?offset={self.offset}", data)["next"])
        except Refused as refused:
            if refused.status != 409 or "expected" not in refused.body:
                raise
            arrived = int(refused.body["expected"])
        if arrived == self.offset:
            raise Unreachable(f"the API's log stays at {arrived} bytes")
        self.offset = arrived
        return True

    def _piece(self, offset: int, final: bool) -> bytes:
        """The next bytes, masked with what stands before and behind them in view."""
        start = max(0, offset - self._longest + 1)
        try:
            with open(self.spool, "rb") as spool:
                spool.seek(start)
                window = spool.read(offset - start + CHUNK + self._longest)
        except FileNotFoundError:
            return b""
        end = len(window) if final else settled(window, self.secrets)
        return mask(window, self.secrets)[offset - start : min(end, offset - start + CHUNK)]
