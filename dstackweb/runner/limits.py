"""What code may be unpacked to and what artifacts may be called, which runner, server and command line keep to."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from enum import Enum

PATH_MAX, NAME_MAX, DEPTH_MAX = 1024, 255, 64
"""Bytes of a path in an archive of code and of each name in it, and how many names it may have."""
TEXT_MAX = 32 << 20
"""Bytes of all paths together, which are kept in memory."""
RATIO_MAX = 20
ARTIFACT_PATH_MAX, ARTIFACT_DEPTH_MAX = 512, 32
"""The same of an artifact's path."""
LISTED = 50
"""So many of the artifacts that were left out are named."""
UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode's kinds of characters that change how a path is shown: no artifact's path may have one."""


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


class ArtifactLeft(str, Enum):  # noqa: UP042 - Python 3.9 has no StrEnum
    """Why a file in a job's artifacts directory was not kept, as its runner or the server finds."""

    NAME = "name"
    KIND = "kind"
    """A link, a device, or on another file system."""
    UNREADABLE = "unreadable"
    CHANGED = "changed"
    TOO_MANY = "too_many"
    TIME = "time"
    FILE_LIMIT = "file_limit"
    RUN_LIMIT = "run_limit"
    PROJECT_QUOTA = "project_quota"
    UNFINISHED = "unfinished"
    """The runner was lost while it sent it."""


def is_safe(path: str) -> bool:
    """Whether a path may name an artifact: relative, in UTF-8, without `..` and characters that hide what it is."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in path or len(parts) > ARTIFACT_DEPTH_MAX:
        return False
    if shown(path) != path:
        return False
    return len(path.encode()) <= ARTIFACT_PATH_MAX and all(len(part.encode()) <= NAME_MAX for part in parts)


def shown(path: str) -> str:
    return "".join("?" if unicodedata.category(letter) in UNSAFE else letter for letter in path)
