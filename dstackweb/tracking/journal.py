"""What a child of multiprocessing has not delivered yet, in files that outlive it.

A pool ends its workers by SIGTERM, as soon as it has their last results: their parent finds these files, tells what
was left, and that they have ended. Only on systems with file locks; elsewhere what is left is lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dstackweb.tracking.entries import Entry

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

SIZE_MAX = 16 * 1024 * 1024
"""Bytes of each of the two files, beyond which nothing is added: the server is away."""


def folder_of(pid: int, token: str) -> Path:
    """Where children of this process write, those with the same token only."""
    mark = hashlib.sha256(token.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"dstackweb-tracking-{mark}-{pid}")


class Journal:
    """Two files that take turns: one has what is being sent, the other what was told since. Raises OSError."""

    def __init__(self, folder: Path, reporter: str) -> None:
        if fcntl is None:
            raise OSError("no file locks here")
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_own(folder):
            raise PermissionError(f"{folder} is somebody else's")
        self._paths = [folder / f"{reporter}.{number}" for number in range(2)]
        self._files = [_locked(path) for path in self._paths]
        self._now = 0
        self._size = 0

    def write(self, kind: str, key: Any, told: tuple[Any, ...]) -> None:
        """Keep an entry, as the sender has it."""
        entry = marshal.dumps((kind, key, told))  # the same Python reads it, and a third of the time of JSON
        size = len(entry) + 4
        if self._size + size > SIZE_MAX:
            return
        file = self._files[self._now]
        with contextlib.suppress(OSError):  # a full disk: then it is only in memory
            if os.write(file, len(entry).to_bytes(4, "big") + entry) == size:
                self._size += size
            else:  # nothing that follows could be read behind a half
                os.ftruncate(file, self._size)

    def turn(self) -> None:
        """What is written from now on is not what is sent now."""
        self._now = 1 - self._now
        self._size = os.fstat(self._files[self._now]).st_size

    def delivered(self) -> None:
        """What was written before the last turn has arrived."""
        os.ftruncate(self._files[1 - self._now], 0)

    def remove(self) -> None:
        """All is told, the end too."""
        for path in self._paths:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the files, as a fork's child does with those of its parent."""
        for file in self._files:
            os.close(file)


def left(folder: Path, tell: Callable[[str, list[Entry]], bool]) -> None:
    """`tell` each reporter that died without telling its end, with what it had not delivered; true when it arrived."""
    if fcntl is None or not _is_own(folder):
        return
    for name in sorted({path.name.rpartition(".")[0] for path in folder.iterdir()}):
        paths = [folder / f"{name}.{number}" for number in range(2)]
        files: list[int] = []
        try:
            for path in paths:
                files.append(_locked(path))
            if tell(name, [entry for path in paths for entry in _whole(path)]):
                for path in paths:
                    path.unlink(missing_ok=True)
        except OSError:  # it lives
            continue
        finally:
            for file in files:
                os.close(file)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _locked(path: Path) -> int:
    """The file, open and locked for as long. Raises OSError when another process has it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def _whole(path: Path) -> list[Entry]:
    """The entries of a file up to where it is damaged, if it is."""
    found: list[Entry] = []
    with contextlib.suppress(ValueError, TypeError, EOFError):
        for entry in _entries(path):
            found.append(entry)
    return found


def _entries(path: Path) -> Iterator[Entry]:
    data = path.read_bytes()
    at = 0
    while at + 4 <= len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        if end > len(data):  # the last one is half
            return
        kind, key, told = marshal.loads(data[at + 4 : end])
        yield kind, key, told
        at = end


def _is_own(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and found.st_mode & 0o170077 == 0o040000
