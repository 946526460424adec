"""The job's output on disk, and how it reads: whole up to its limit, else its beginning and its end.

The spool itself takes the beginning. What follows goes into segments beside it, in `spool.tail`, of which the last two
are kept; each is named by its offset in the output. `close` ends that when the job has ended: the segments are then
`spool.end`, and belong to the log. Until then they don't, since the next bytes may push them out: a log only grows.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from dstackweb.runner.masking import Masker

T = TypeVar("T")
DISK_FULL_WAIT_S = 1.0
ROOM = 1 << 17
SEGMENTS = 8
"""A segment's part of the limit: two of them are the tail, the others the beginning."""
LINE_MAX = 1 << 16
"""Up to so many bytes a tail begins later, so that it begins with a line."""
CUT = b"\n[dstackweb: the log has reached its limit; the last part of the output follows when the job has ended]\n"
OUT, ERR, BOTH = 0, 1, 2
"""Streams; `BOTH` where changes between them are no longer recorded."""
MARK = struct.Struct("<QQ")
"""The offset in bytes, and the time in milliseconds since 1970, times 4, plus the stream."""
GAP_S = 0.05
DOUBLED_AFTER = 1 << 14
"""So many records on, one stands for twice as long."""
EXACT_MARKS = 1 << 17
"""So many records have each change of stream."""
MOST_MARKS = 1 << 18
MARKS_AT_ONCE = 1 << 16


def missing_line(count: int) -> bytes:
    """The line before the tail of a log from which `count` bytes are missing."""
    return b"[dstackweb: %s bytes of output are missing here]\n" % f"{count:,}".encode()


class Writer:
    """Writes a job's output: to the descriptor `file` of the spool at `path`, then to segments. For one process."""

    def __init__(self, file: int, path: str, limit: int) -> None:
        self._file, self._folder = file, f"{path}.tail"
        self._size = max(1, limit // SEGMENTS)
        self._at = os.fstat(file).st_size  # of an earlier runner that started nothing
        self._room = max(0, limit - 2 * self._size - self._at)
        self._segments: list[str] = []
        self._closed = False

    @property
    def offset(self) -> int:
        """The number of bytes written so far, also those that are dropped since."""
        return self._at

    def write(self, data: bytes) -> None:
        """Store it all. On a full disk it waits, and so do the commands, as for any full pipe."""
        rest = memoryview(data)
        while rest and not self._closed:
            if not self._room and not self._next_segment():
                self._closed = True
                return
            piece = rest[: self._room]
            _append(self._file, piece)
            rest = rest[len(piece) :]
            self._room -= len(piece)
            self._at += len(piece)

    def _next_segment(self) -> bool:
        """Start a segment, and remove the oldest of three. False once the output is closed."""
        if self._segments:
            os.close(self._file)
        else:
            _patiently(lambda: os.makedirs(self._folder, 0o700, exist_ok=True))
        if len(self._segments) == 2:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._segments.pop(0))
        path = os.path.join(self._folder, f"{self._at:020d}")
        try:
            self._file = _patiently(lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        except FileNotFoundError:
            return False
        self._segments.append(path)
        self._room = self._size
        return True


def _append(file: int, data: memoryview) -> None:
    while data:
        data = data[_patiently(partial(os.write, file, data)) :]


def _patiently(act: Callable[[], T]) -> T:
    """Repeat while the disk is full."""
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            time.sleep(DISK_FULL_WAIT_S)


def has_room(path: str) -> bool:
    """Whether what waits for a full disk can be written beside the spool now: a piece and what its pipe holds."""
    draft = f"{path}.room"
    try:
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            return os.write(file, bytes(ROOM)) == ROOM
        finally:
            os.close(file)
            os.unlink(draft)
    except OSError as error:
        return error.errno not in (errno.ENOSPC, errno.EDQUOT)


def close(path: str) -> None:
    """Make the tail part of the log; later output of a process that escaped is discarded. Repeatable."""
    if not os.path.isdir(f"{path}.end"):
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}.tail", f"{path}.end")


@dataclass(frozen=True)
class Piece:
    """A part of the log: bytes of a file, or `text` where `path` is empty."""

    size: int
    path: str = ""
    start: int = 0
    text: bytes = b""

    def read(self, start: int, size: int) -> bytes:
        if not self.path:
            return self.text[start : start + size]
        with open(self.path, "rb") as file:
            file.seek(self.start + start)
            return file.read(min(size, self.size - start))


def pieces(path: str, masker: Masker) -> tuple[list[Piece], int]:
    """The log as far as it is certain, in order, and how many bytes are missing before its tail."""
    closed, segments = _segments(path)
    try:
        head = os.path.getsize(path)
    except FileNotFoundError:
        return [], 0
    first = segments[0][0] if segments else head
    if first <= head:
        tail = [Piece(size, name) for _, name, size in segments] if closed else []
        return [Piece(head, path), *tail], 0
    # What is cut may go through a secret: neither half is shown.
    edge = Piece(head, path).read(max(0, head - masker.longest), masker.longest)
    shown = head - len(edge) + masker.settled(edge)
    found = [Piece(shown, path), _text(b"*" * (head - shown) + CUT)]
    if not closed:
        return found, 0
    tail = [Piece(size, name) for _, name, size in segments]
    skip = _beginning(tail, masker.longest - 1)
    count = first + skip - head
    found.append(_text(missing_line(count)))
    for piece in tail:
        used = min(skip, piece.size)
        skip -= used
        found.append(Piece(piece.size - used, piece.path, used))
    return found, count


def _segments(path: str) -> tuple[bool, list[tuple[int, str, int]]]:
    """Whether the log is closed; and the segments as offset, path and size, oldest first."""
    for folder, closed in ((f"{path}.end", True), (f"{path}.tail", False)):
        with contextlib.suppress(FileNotFoundError):
            names = sorted(os.listdir(folder))
            return closed, [(int(n), os.path.join(folder, n), os.path.getsize(os.path.join(folder, n))) for n in names]
    return False, []


def _text(text: bytes) -> Piece:
    return Piece(len(text), text=text)


def _beginning(tail: Sequence[Piece], least: int) -> int:
    """Where the first whole line behind `least` bytes begins; `least` if that is far. The first segment is complete."""
    start = read(tail, least, min(LINE_MAX, tail[0].size // 2))
    return least + start.find(b"\n") + 1


def read(log: Sequence[Piece], offset: int, size: int) -> bytes:
    """Up to `size` bytes of a log from `offset`."""
    found = bytearray()
    for piece in log:
        if offset < piece.size and len(found) < size:
            data = piece.read(offset, size - len(found))
            found += data
            offset += len(data)
        offset -= piece.size
        if offset < 0:
            break
    return bytes(found)


def read_masked(path: str, offset: int, masker: Masker, most: int, final: bool, least: int = 1) -> bytes:
    """The next bytes of a log, masked with the bytes before and after them in view.

    Possible beginnings of a secret, of `least` bytes or more, wait for what follows, except at the end (`final`).
    """
    log, around = pieces(path, masker)[0], masker.longest
    if sum(piece.size for piece in log) <= offset:
        return b""
    start = max(0, offset - around + 1)
    window = read(log, start, offset - start + most + around)
    end = len(window) if final else masker.settled(window, least)
    return masker.mask(window)[offset - start : min(end, offset - start + most)]


def marks_path(spool: str) -> str:
    return f"{spool}.marks"


class MarkWriter:
    """Notes when each part of the output was written, and whether to stdout or stderr: marks beside the spool.

    A mark holds from its offset to the next one's. Their number is bounded: the more there are, the longer the time
    that one stands for. A full disk only makes them fewer.
    """

    def __init__(self, spool: str) -> None:
        self._file = os.open(marks_path(spool), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._count = os.fstat(self._file).st_size // MARK.size
        self._stream, self._due = -1, 0.0

    def note(self, offset: int, stream: int, now: float) -> None:
        """What begins at `offset` in the output was written to `stream` at `now`, in seconds since 1970."""
        if self._count >= EXACT_MARKS:
            stream = BOTH
        if (stream == self._stream and now < self._due) or self._count >= MOST_MARKS:
            return
        with contextlib.suppress(OSError):
            os.write(self._file, MARK.pack(offset, int(now * 1000) << 2 | stream))
            self._count += 1
            self._stream, self._due = stream, now + GAP_S * 2.0 ** (self._count // DOUBLED_AFTER)


def read_marks(path: str, start: int, masker: Masker) -> bytes:
    """Marks from byte `start` of their file on, with offsets of the log instead of the output.

    They are the same up to the log's beginning. What follows is in it once it is closed, with other bytes in the place
    of those that are missing.
    """
    closed, segments = _segments(path)
    head, moved = 2**63, 0
    if segments:
        head, missing = os.path.getsize(path), pieces(path, masker)[1]
        moved = len(CUT) + len(missing_line(missing)) - missing if missing else 0
    try:
        with open(marks_path(path), "rb") as file:
            file.seek(start)
            data = file.read(MARKS_AT_ONCE)
    except FileNotFoundError:
        return b""
    found = []
    for offset, value in MARK.iter_unpack(data[: len(data) // MARK.size * MARK.size]):
        if offset >= head:
            if not closed:
                break
            offset = max(head, offset + moved)
        found.append(MARK.pack(offset, value))
    return b"".join(found)
