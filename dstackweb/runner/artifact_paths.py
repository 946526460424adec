"""What an artifact's path may be, which runner, server and command line keep to, and why one is left out."""

from __future__ import annotations

import unicodedata
from enum import Enum

PATH_MAX, NAME_MAX, DEPTH_MAX = 512, 255, 32
"""Bytes of a path and of each name in it, and how many names it may have."""
LISTED = 50
"""So many of the files that were left out are named."""
UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories of characters that no path may have: they change how it is shown."""


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
    if any(part in ("", ".", "..") for part in parts) or "\\" in path or len(parts) > DEPTH_MAX:
        return False
    if shown(path) != path:
        return False
    return len(path.encode()) <= PATH_MAX and all(len(part.encode()) <= NAME_MAX for part in parts)


def shown(path: str) -> str:
    """A path as a page can show it."""
    return "".join("?" if unicodedata.category(letter) in UNSAFE else letter for letter in path)
