"""Sending the spool to the API, piece by piece, from wherever the API has it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dstackweb.runner.redact import margin, mask, settled

CHUNK = 256 * 1024


class Stuck(Exception):
    """The API took a piece and its log did not grow."""


class Shipper:
    """`offset` is how far the API has the stream, which is as long as the spool: masking changes no length.

    With `offset` None an earlier runner has shipped some of it, and the API is asked how much. `end` is the stream's
    whole length, once that is known.
    """

    def __init__(
        self, spool: str, secrets: Sequence[str], send: Callable[[int, bytes], int], offset: int | None = 0
    ) -> None:
        self.spool, self.send = spool, send
        self.secrets = [secret.encode("utf-8", "surrogatepass") for secret in secrets]
        self.offset = offset
        self.end: int | None = None

    def ship(self) -> bool:
        """Send one piece; False when there was nothing to send. Raises what `send` raises, and Stuck."""
        if self.offset is None:
            self.offset = self.send(0, b"")
        data = self._piece(self.offset)
        if not data:
            return False
        reached = self.send(self.offset, data)
        if reached == self.offset:
            raise Stuck(f"the API's log stays at {reached} bytes")
        self.offset = reached
        return True

    def _piece(self, offset: int) -> bytes:
        """The bytes from `offset`, masked. What may begin a secret waits, unless nothing can follow it."""
        around = margin(self.secrets)
        start = max(0, offset - around)
        want = offset - start + CHUNK + around
        if self.end is not None:
            want = min(want, self.end - start)
        if want <= 0:
            return b""
        try:
            with open(self.spool, "rb") as file:
                file.seek(start)
                window = file.read(want)
        except FileNotFoundError:
            return b""
        complete = self.end is not None and start + len(window) >= self.end
        stop = len(window) if complete else settled(window, self.secrets)
        return mask(window, self.secrets)[offset - start : min(stop, offset - start + CHUNK)]
