"""The log of each job as one file of raw bytes, addressed by offset (docs/design.md, rule 5).

The file's own size is the truth about what has arrived: overlap is trimmed, a gap is refused.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from uuid import UUID

from django.conf import settings


class LogGap(Exception):
    """Bytes are missing before the offered offset; `expected` is where the stream goes on."""

    def __init__(self, expected: int) -> None:
        super().__init__(f"the log goes on at offset {expected}")
        self.expected = expected


def path(job_id: UUID) -> Path:
    """Where the log of a job lies; it may not exist yet."""
    text = str(job_id)
    return Path(settings.DSTACKWEB_HOME) / "joblogs" / text[:2] / text


def append(job_id: UUID, offset: int, data: bytes) -> int:
    """Add `data`, which begins at `offset` of the stream; returns the stream's new size in bytes.

    Raises LogGap when `offset` lies behind the end. Two senders at once are put in order by a lock on the file.
    """
    target = path(job_id)
    target.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        end = os.fstat(fd).st_size
        if offset > end:
            raise LogGap(end)
        rest = memoryview(data)[end - offset :]
        while rest:
            written = os.pwrite(fd, rest, end)
            end += written
            rest = rest[written:]
        return end
    finally:
        os.close(fd)


def size(job_id: UUID) -> int:
    """Bytes that have arrived so far."""
    try:
        return path(job_id).stat().st_size
    except FileNotFoundError:
        return 0


def read(job_id: UUID, offset: int, limit: int) -> bytes:
    """Up to `limit` bytes from `offset`; empty behind the end."""
    try:
        with path(job_id).open("rb") as file:
            if offset >= os.fstat(file.fileno()).st_size:
                return b""  # a file system may refuse to seek as far
            file.seek(offset)
            return file.read(limit)
    except FileNotFoundError:
        return b""


def tail_offset(job_id: UUID, lines: int, window: int = 1 << 20) -> int:
    """The offset at which the last `lines` lines begin, looking back at most `window` bytes."""
    end = size(job_id)
    start = max(0, end - window)
    data = read(job_id, start, end - start)
    at = len(data) - 1 if data.endswith(b"\n") else len(data)
    for _ in range(lines):
        found = data.rfind(b"\n", 0, at)
        if found < 0:
            return start
        at = found
    return start + at + 1
