"""Finding one's way in a log of any length, in bounded work: lines by number, text, and when lines were written.

The number of line ends in each block of a log is kept beside it, and counted by the first who reads the log that far.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

from dstackweb.lib.storage import Gap, storage
from dstackweb.runner.spool import MARK, MOST_MARKS
from dstackweb.runs import files

BLOCK = 1 << 18
COUNTED_AT_ONCE = 128
"""Blocks that one request counts at most."""
SEARCHED_AT_ONCE = 64
MATCHES_AT_ONCE = 200
TEXT_MOST = 200
"""The longest text that is searched for, in characters."""
MARKS_MOST = MOST_MARKS * MARK.size
MARKS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Lines:
    """The line ends in blocks from the one asked for on, at a log of `size` bytes. `more`: ask again.

    The last block, which is complete only once there is more behind it, is not among them.
    """

    size: int
    counts: list[int]
    more: bool


def lines(job_id: UUID, first: int) -> Lines:
    """The line ends in blocks from the number `first` on. Raises storage.Missing and StorageAway."""
    key = files.lines_key(job_id)
    size, known = files.log_size(job_id), (storage().size(key) or 0) // 4
    blocks = max(0, size - 1) // BLOCK
    if known < blocks:
        until = min(blocks, known + COUNTED_AT_ONCE)
        pieces = (files.read_log(job_id, block * BLOCK, BLOCK) for block in range(known, until))
        counts = array("I", (piece.count(b"\n") for piece in pieces))
        try:
            storage().append(key, 4 * known, counts.tobytes())
        except Gap:  # its file was removed with the log meanwhile
            until = known
        known = until
    first = min(first, known)
    found = array("I")
    found.frombytes(storage().read(key, 4 * first, 4 * (known - first)))
    return Lines(size, found.tolist(), first + len(found) < blocks)


@dataclass(frozen=True)
class Matches:
    """Offsets of matches, as far as `following`, None at the end of the log."""

    offsets: list[int]
    following: int | None


def search(job_id: UUID, text: str, start: int) -> Matches:
    """Where `text` occurs from the offset `start` on, in any case for ASCII. Raises storage.Missing and StorageAway."""
    wanted = text[:TEXT_MOST].encode().lower()
    if not wanted:
        return Matches([], None)
    found: list[int] = []
    size = files.log_size(job_id)
    start = min(start, size)
    for offset, data in _windows(job_id, start, len(wanted) - 1):
        at = data.find(wanted)
        while at >= 0:
            if len(found) == MATCHES_AT_ONCE:
                return Matches(found, offset + at)
            found.append(offset + at)
            at = data.find(wanted, at + len(wanted))
    following = start + SEARCHED_AT_ONCE * BLOCK
    return Matches(found, following if following < size else None)


def _windows(job_id: UUID, start: int, overlap: int) -> Iterator[tuple[int, bytes]]:
    """Pieces of the log in lower case, each with the `overlap` bytes behind it, in which no further match begins."""
    for offset in range(start, start + SEARCHED_AT_ONCE * BLOCK, BLOCK):
        data = files.read_log(job_id, offset, BLOCK + overlap)
        if not data:
            return
        yield offset, data.lower()


def append_marks(job_id: UUID, offset: int, data: bytes) -> int:
    """Add records of `runner.spool`; returns the size of what is kept, or was dropped behind the limit. Repeatable."""
    if offset + len(data) > MARKS_MOST:
        return offset + len(data)
    try:
        return storage().append(files.marks_key(job_id), offset, data)
    except Gap as gap:
        return gap.expected


def marks(job_id: UUID, offset: int) -> bytes:
    """Records from a byte offset of theirs on."""
    return storage().read(files.marks_key(job_id), min(offset, MARKS_MOST), MARKS_AT_ONCE)
