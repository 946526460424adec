"""The job's output, from the commands through a file (the spool) to the API.

A relay process copies it from a pipe to the spool (`spool.py`). With the file itself as their output, a
command that opens /dev/stdout or /dev/stderr, as many scripts do, would truncate it, or be refused where it runs as
another user, and a flood of output would fill the disk. The relay outlives the runner and still writes every byte.

The runner sends the spool by offset, with secrets masked byte for byte so that offsets stay the same.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import time
from typing import Any

from dstackweb.runner import tree
from dstackweb.runner.client import Client, Refused, Unreachable
from dstackweb.runner.masking import BARE, Masker
from dstackweb.runner.spool import Writer, pieces, read_masked
from dstackweb.runner.state import is_locked, say

PIECE, CHUNK = 1 << 16, 1 << 18
"""Bytes that are copied, and sent, at once."""
QUIET_S = 2.0


def start_relay(spool: str, limit: int, account: pwd.struct_passwd) -> int:
    """Start the relay; returns the end of the pipe that the commands, run by `account`, are to write to.

    The relay ends when the last writer has closed the pipe; until then it holds a lock on the spool. Call this before
    `tree.adopt_orphans`.
    """
    source, sink = os.pipe()
    if account.pw_uid != os.getuid():
        os.fchown(sink, account.pw_uid, account.pw_gid)  # opening /dev/stdout opens the pipe anew
    file = os.open(spool, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    tree.detach(lambda: _relay(spool, limit), source, file)
    os.close(source)
    os.close(file)
    return sink


def _relay(spool: str, limit: int) -> None:
    writer = Writer(1, spool, limit)
    try:
        while data := os.read(0, PIECE):
            writer.write(data)
    except OSError as error:
        say(f"the output can't be stored any more: {error}")


def is_done(spool: str) -> bool:
    """Whether a spool is complete: no relay writes to it any more."""
    return not is_locked(spool)


class Shipper:
    """Sends one spool. `offset` is how much has arrived, None until the API has reported it."""

    def __init__(self, client: Client, spool: str, masker: Masker) -> None:
        self.client, self.spool, self.masker = client, spool, masker
        self.offset: int | None = None
        self.cut = False
        """Whether the API keeps no more of it."""
        self._quiet_since = time.monotonic()

    def size(self) -> int:
        """The size of the log, with what the API did not keep."""
        return sum(piece.size for piece in pieces(self.spool, self.masker)[0]) if self.cut else self.offset or 0

    def missing(self) -> int:
        """How many bytes of the output are missing in the log."""
        return pieces(self.spool, self.masker)[1]

    def ship(self, final: bool = False) -> bool:
        """Send one piece; False when there is nothing more to send now. Raises Unreachable or Refused.

        Possible beginnings of a secret wait for the following bytes, except at the end (`final`); a few bytes, which
        are more likely none, at most for QUIET_S.
        """
        if self.offset is None:
            self.offset = self._taken(self.client.post_bytes("logs?offset=0", b""))
        if self.cut:
            return False
        data = read_masked(self.spool, self.offset, self.masker, CHUNK, final)
        if not data and time.monotonic() - self._quiet_since > QUIET_S:
            data = read_masked(self.spool, self.offset, self.masker, CHUNK, final, least=BARE)
        if not data:
            return False
        self._quiet_since = time.monotonic()
        try:
            arrived = self._taken(self.client.post_bytes(f"logs?offset={self.offset}", data))
        except Refused as refused:
            if refused.status != 409 or "expected" not in refused.body:
                raise
            arrived = int(refused.body["expected"])
        if arrived == self.offset:
            raise Unreachable(f"the API's log remains at {arrived} bytes")
        self.offset = arrived
        return True

    def _taken(self, answer: dict[str, Any]) -> int:
        if answer.get("cut") and not self.cut:
            self.cut = True
            say(f"the API keeps no more of the output ({answer['cut']}); the job continues")
        return int(answer["next"])
