"""What a run's code may be unpacked: the command line keeps to it before it uploads, the runner when it unpacks."""

from __future__ import annotations

from dataclasses import dataclass

PATH_MAX, NAME_MAX, DEPTH_MAX = 1024, 255, 64
"""Bytes of a path and of each name in it, and how many names it may have."""
TEXT_MAX = 32 << 20
"""Bytes of all paths together, which are kept in memory."""
RATIO_MAX = 20


@dataclass(frozen=True)
class ArchiveLimits:
    """Of an unpacked archive: bytes, and how many files, folders and links."""

    size: int = 4 << 30
    entries: int = 200_000

    def of(self, packed: int) -> ArchiveLimits:
        """Those of an archive of `packed` bytes: a large one may unpack to more."""
        return ArchiveLimits(max(self.size, RATIO_MAX * packed), self.entries)


LIMITS = ArchiveLimits()


def is_too_long(path: bytes) -> bool:
    """Whether a path has too many bytes or folders, or a name that is too long."""
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    return len(path) > PATH_MAX or len(parts) > DEPTH_MAX or max(map(len, parts), default=0) > NAME_MAX
