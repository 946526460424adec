"""The job's output, from the commands through a file (the spool) to the API.

A relay process copies it from a pipe to the spool, up to the log's limit. With the file itself as their output, a
command that opens /dev/stdout or /dev/stderr, as many scripts do, would truncate it, or be refused where it runs as
another user, and a flood of output would fill the disk. The relay outlives the runner and still writes every byte.

The runner sends the spool by offset, with secrets masked byte for byte so that offsets stay the same.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import time
from collections.abc import Sequence

from dstackweb.runner import tree
from dstackweb.runner.client import Client, Refused, Unreachable
from dstackweb.runner.state import is_locked, say

PIECE, CHUNK = 1 << 16, 1 << 18
"""Bytes that are copied, and sent, at once."""
DISK_FULL_WAIT_S = 1.0


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
    tree.detach(lambda: _relay(limit), source, file)
    os.close(source)
    os.close(file)
    return sink


def _relay(limit: int) -> None:
    try:
        copy(0, 1, limit)
    except OSError as error:
        say(f"the output can't be stored any more: {error}")


def copy(source: int, file: int, limit: int) -> None:
    """Copy `source` to the end of `file`; after `limit` bytes one last line instead."""
    room = limit
    while data := os.read(source, PIECE):
        if room < 0:
            continue
        _append(file, data[:room])
        room -= len(data)
        if room < 0:
            _append(file, last_line(limit))


def last_line(limit: int) -> bytes:
    """The last line of a log of more than `limit` bytes."""
    size = f"{limit >> 20} MB" if limit >= 1 << 20 else f"{limit} bytes"
    return f"\n[dstackweb: the log reached its limit of {size}; further output is discarded]\n".encode()


def _append(file: int, data: bytes) -> None:
    """Write all of it. On a full disk it waits, and the commands wait as for any full pipe."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(file, rest) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            time.sleep(DISK_FULL_WAIT_S)


def is_done(spool: str) -> bool:
    """Whether a spool is complete: no relay writes to it any more."""
    return not is_locked(spool)


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
