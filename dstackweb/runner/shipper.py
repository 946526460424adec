"""Sending the spool to the API by offset, with secrets masked byte for byte so that offsets stay the same."""

from __future__ import annotations

from collections.abc import Sequence

from dstackweb.runner.client import Client, Refused, Unreachable

CHUNK = 256 * 1024


class Shipper:
    """Sends one spool. `offset` is how much has arrived, None until the API has reported it."""

    def __init__(self, client: Client, spool: str, secrets: list[bytes]) -> None:
        self.client, self.spool, self.secrets = client, spool, secrets
        self.offset: int | None = None

    def ship(self, final: bool = False) -> bool:
        """Send one piece; False when there is nothing more to send now. Raises Unreachable or Refused.

        Possible beginnings of a secret wait for the following bytes, except at the end (`final`).
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
            raise Unreachable(f"the API's log remains at {arrived} bytes")
        self.offset = arrived
        return True


def read_masked(path: str, offset: int, secrets: Sequence[bytes], most: int, final: bool) -> bytes:
    """The next bytes of a spool, masked with the bytes before and after them in view.

    Possible beginnings of a secret wait for the following bytes, except at the end (`final`).
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


def mask(data: bytes, secrets: Sequence[bytes]) -> bytes:
    """`data` with every occurrence of every secret, overlapping ones too, as asterisks of the same length."""
    out = bytearray(data)
    for secret in filter(None, secrets):
        at = data.find(secret)
        while at >= 0:
            out[at : at + len(secret)] = b"*" * len(secret)
            at = data.find(secret, at + 1)
    return bytes(out)


def settled(data: bytes, secrets: Sequence[bytes]) -> int:
    """The length of `data` without a possible beginning of a secret at its end."""
    longest = max(map(len, secrets), default=0)
    firsts = {secret[:1] for secret in secrets}
    for start in range(max(0, len(data) - longest + 1), len(data)):
        if data[start : start + 1] in firsts:
            tail = data[start:]
            if any(len(secret) > len(tail) and secret.startswith(tail) for secret in secrets):
                return start
    return len(data)
