"""The job's output, from the commands through a file (the spool) to the API.

A relay process copies it from two pipes, for stdout and stderr, to the spool (`spool.py`), and notes when it was
written and to which of them. With the file itself as their output, a command that opens /dev/stdout or
/dev/stderr, as many scripts do, would truncate it, or be refused where it runs as another user, and a flood of output
would fill the disk. The relay outlives the runner and still writes every byte.

The runner sends the spool by offset, with secrets masked byte for byte so that offsets stay the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import select
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dstackweb.runner import tree
from dstackweb.runner.client import Client, Refused, Unreachable
from dstackweb.runner.masking import BARE, Masker
from dstackweb.runner.spool import ERR, OUT, MarkWriter, Writer, pieces, read_marks, read_masked
from dstackweb.runner.state import is_locked, say

PIECE, CHUNK = 1 << 16, 1 << 18
"""Bytes that are copied, and sent, at once."""
QUIET_S = 2.0
PIPE_SIZE, SET_PIPE_SIZE = 4096, 1031
"""Bytes of the smallest pipe, and F_SETPIPE_SZ, which Python has from 3.10 on."""
MISSED_S = 5.0


@dataclass(frozen=True)
class Sinks:
    """The ends of the pipes that the commands write to."""

    out: int
    err: int

    def close(self) -> None:
        os.close(self.out)
        os.close(self.err)


def start_relay(spool: str, limit: int, account: pwd.struct_passwd) -> Sinks:
    """Start the relay; returns what the commands, run by `account`, are to write to.

    The relay ends when the last writer has closed the pipes; until then it holds a lock on the spool. Call this before
    `tree.adopt_orphans`.
    """
    (out, to_out), (err, to_err) = (_pipe(account) for _ in range(2))
    file = os.open(spool, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    tree.detach(lambda: _relay(spool, limit), out, file, err)
    for used in (out, err, file):
        os.close(used)
    return Sinks(to_out, to_err)


def _pipe(account: pwd.struct_passwd) -> tuple[int, int]:
    """A pipe that has room for one write only, so that `written` sees which of two came first."""
    source, sink = os.pipe2(os.O_CLOEXEC | os.O_DIRECT)
    os.set_blocking(source, False)
    fcntl.fcntl(sink, SET_PIPE_SIZE, PIPE_SIZE)
    if account.pw_uid != os.getuid():
        os.fchown(sink, account.pw_uid, account.pw_gid)  # opening /dev/stdout opens the pipe anew
    return source, sink


def _relay(spool: str, limit: int) -> None:
    writer, marks = Writer(1, spool, limit), MarkWriter(spool)
    try:
        for stream, data in written({0: OUT, 3: ERR}):
            at, now = writer.offset, time.time()
            writer.write(data)
            marks.note(at, stream, now)
    except OSError as error:
        say(f"the output can't be stored any more: {error}")


def written(streams: Mapping[int, int]) -> Iterator[tuple[int, bytes]]:
    """What is written to these pipes, each write with its stream, in its order, until all writers have closed them.

    The kernel lists pipes in the order in which they became readable (epoll, edge-triggered), and each has room for one
    write. So a write is read before the same pipe takes another one, and after those that came before it.
    """
    left = dict(streams)
    with select.epoll() as ready:
        for pipe in left:
            ready.register(pipe, select.EPOLLIN | select.EPOLLET)
        while left:
            for pipe, event in ready.poll(MISSED_S) or [(pipe, 0) for pipe in left]:
                with contextlib.suppress(BlockingIOError):
                    while data := os.read(pipe, PIECE):
                        yield left[pipe], data
                        if not event & select.EPOLLHUP:
                            break
                    else:
                        ready.unregister(pipe)
                        del left[pipe]


def is_done(spool: str) -> bool:
    """Whether a spool is complete: no relay writes to it any more."""
    return not is_locked(spool)


class Shipper:
    """Sends one spool. `offset` is how much has arrived, None until the API has reported it."""

    def __init__(self, client: Client, spool: str, masker: Masker, *, with_marks: bool = False) -> None:
        self.client, self.spool, self.masker, self.with_marks = client, spool, masker, with_marks
        self.offset: int | None = None
        self.marks_sent = 0
        """How many bytes of the marks have arrived."""
        self.cut = False
        """Whether the API keeps no more of it."""
        self._quiet_since = time.monotonic()

    def size(self) -> int:
        """The size of the log, with what the API did not keep."""
        return sum(piece.size for piece in pieces(self.spool, self.masker)[0]) if self.cut else self.offset or 0

    def missing(self) -> int:
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
        has_marks = self.with_marks and (data or final)
        marks = read_marks(self.spool, self.marks_sent, self.masker) if has_marks else b""
        if not data and not marks:
            return False
        if data:
            self._quiet_since = time.monotonic()
        path = f"logs?offset={self.offset}"
        if marks:  # an older server would take them for output
            path += f"&marks={self.marks_sent}&marks_size={len(marks)}"
        before = self.offset, self.marks_sent
        try:
            arrived = self._taken(self.client.post_bytes(path, marks + data))
        except Refused as refused:
            if refused.status != 409 or "expected" not in refused.body:
                raise
            arrived = int(refused.body["expected"])
        if (arrived, self.marks_sent) == before:
            raise Unreachable(f"the API's log remains at {arrived} bytes")
        self.offset = arrived
        return True

    def _taken(self, answer: dict[str, Any]) -> int:
        if answer.get("cut") and not self.cut:
            self.cut = True
            say(f"the API keeps no more of the output ({answer['cut']}); the job continues")
        self.marks_sent = int(answer.get("marks", self.marks_sent))
        return int(answer["next"])
