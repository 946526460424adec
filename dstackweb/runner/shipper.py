"""Sending the spool to the API: by offset, masked."""

from __future__ import annotations

from collections.abc import Sequence

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

    def ship(self, final: bool = False) -> bool:
        """Send one piece; False when there is nothing more to send now. Raises Unreachable or Refused.

        What may be the beginning of a secret waits for what follows, except at the end (`final`).
        """
        if self.offset is None:
            self.offset = int(self.client.post_bytes("logs?offset=0", b"")["next"])
        data = read_masked(self.spool, self.offset, self.secrets, CHUNK, final)
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


def read_masked(path: str, offset: int, secrets: Sequence[bytes], most: int, final: bool) -> bytes:
    """The next bytes of a spool, masked with what stands before and behind them in view.

    What may be the beginning of a secret waits for what follows, except at the end (`final`).
    """
    longest = max(map(len, secrets), default=1)
    start = max(0, offset - longest + 1)
    try:
        with open(path, "rb") as spool:
            spool.seek(start)
            window = spool.read(offset - start + most + longest)
    except FileNotFoundError:
        return b""
    end = len(window) if final else settled(window, secrets)
    return mask(window, secrets)[offset - start : min(end, offset - start + most)]
