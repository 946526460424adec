"""When each part of a job's output was written, and whether to stdout or stderr: records of `(offset, time, stream)`.

The relay writes them beside the spool, whose bytes stay exactly the output. A record holds from its offset to the next
one's. Their number is bounded: the more there are, the longer the time that one stands for.
"""

from __future__ import annotations

import contextlib
import os
import struct

OUT, ERR, BOTH = 0, 1, 2
"""Streams; `BOTH` where changes between them are no longer recorded."""
RECORD = struct.Struct("<QQ")
"""The offset in bytes, and the time in milliseconds since 1970, times 4, plus the stream."""
GAP_S = 0.05
DOUBLED_AFTER = 1 << 14
"""So many records on, one stands for twice as long."""
EXACT = 1 << 17
"""So many records have each change of stream."""
MOST = 1 << 18
PIECE = 1 << 16


def marks_path(spool: str) -> str:
    return f"{spool}.marks"


class MarkWriter:
    """Writes the records of one spool. A full disk only makes them fewer."""

    def __init__(self, spool: str) -> None:
        self._file = os.open(marks_path(spool), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._count = os.fstat(self._file).st_size // RECORD.size
        self._stream, self._due = -1, 0.0

    def note(self, offset: int, stream: int, now: float) -> None:
        """What begins at `offset` in the output was written to `stream` at `now`, in seconds since 1970."""
        if self._count >= EXACT:
            stream = BOTH
        if (stream == self._stream and now < self._due) or self._count >= MOST:
            return
        with contextlib.suppress(OSError):
            os.write(self._file, RECORD.pack(offset, int(now * 1000) << 2 | stream))
            self._count += 1
            self._stream, self._due = stream, now + GAP_S * 2.0 ** (self._count // DOUBLED_AFTER)


def read_marks(spool: str, start: int, head: int, dropped: int, added: int, complete: bool) -> bytes:
    """Records from byte `start` of their file on, with offsets of the log instead of the output.

    They are the same up to `head`. What follows is in a log only once it is `complete`: `dropped` bytes of the output
    are missing then, and the log has `added` bytes in their place.
    """
    try:
        with open(marks_path(spool), "rb") as file:
            file.seek(start)
            data = file.read(PIECE)
    except FileNotFoundError:
        return b""
    found = []
    for offset, value in RECORD.iter_unpack(data[: len(data) // RECORD.size * RECORD.size]):
        if offset >= head:
            if not complete:
                break
            offset = max(head, offset - dropped + added)
        found.append(RECORD.pack(offset, value))
    return b"".join(found)
