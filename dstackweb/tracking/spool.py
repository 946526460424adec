"""Undelivered entries of a multiprocessing child, in files that outlive it.

A pool ends its workers by SIGTERM as soon as it has their last results. The parent finds these files, sends the
remaining entries and reports that the children have ended. Needs file locks; without them these entries are lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dstackweb.tracking.client import Entry

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]  # a module's type has no None

SIZE_MAX = 16 * 1024 * 1024
"""Bytes of each of the two files. Beyond it nothing is added: the server is unreachable."""


def spool_folder(pid: int, token: str) -> Path:
    """Where the children of process `pid` that use `token` keep their files."""
    mark = hashlib.sha256(token.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"dstackweb-tracking-{mark}-{pid}")


class Spool:
    """Two alternating files: one holds the entries being sent, the other those added since. Raises OSError."""

    def __init__(self, folder: Path, reporter: str) -> None:
        if fcntl is None:
            raise OSError("no file locks here")
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_own(folder):
            raise PermissionError(f"{folder} belongs to another user")
        self._paths = [folder / f"{reporter}.{number}" for number in range(2)]
        self._files = [_open_locked(path) for path in self._paths]
        self._now = 0
        self._size = 0

    def write(self, kind: str, key: Any, values: tuple[Any, ...]) -> None:
        entry = marshal.dumps((kind, key, values))  # read by the same Python; takes a third of the time of JSON
        size = len(entry) + 4
        if self._size + size > SIZE_MAX:
            return
        file = self._files[self._now]
        with contextlib.suppress(OSError):  # disk full: the entry is in memory only
            if os.write(file, len(entry).to_bytes(4, "big") + entry) == size:
                self._size += size
            else:  # entries behind a partial one would be unreadable
                os.ftruncate(file, self._size)

    def rotate(self) -> None:
        """Switch files: later entries go to the other one."""
        self._now = 1 - self._now
        self._size = os.fstat(self._files[self._now]).st_size

    def clear_sent(self) -> None:
        """Empty the file of the entries that were delivered."""
        os.ftruncate(self._files[1 - self._now], 0)

    def remove(self) -> None:
        """Delete both files: everything was delivered."""
        for path in self._paths:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files without deleting them, as a forked child does with its parent's."""
        for file in self._files:
            os.close(file)


def resend_orphans(folder: Path, send: Callable[[str, list[Entry]], bool]) -> None:
    """Call `send` for each reporter that died without reporting its end; it returns True once all was delivered."""
    if fcntl is None or not _is_own(folder):
        return
    for name in sorted({path.name.rpartition(".")[0] for path in folder.iterdir()}):
        paths = [folder / f"{name}.{number}" for number in range(2)]
        files: list[int] = []
        try:
            for path in paths:
                files.append(_open_locked(path))
            if send(name, [entry for path in paths for entry in _read_entries(path)]):
                for path in paths:
                    path.unlink(missing_ok=True)
        except OSError:  # it is still running
            continue
        finally:
            for file in files:
                os.close(file)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _open_locked(path: Path) -> int:
    """Open a file and lock it. Raises OSError when another process has locked it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def _read_entries(path: Path) -> list[Entry]:
    """The entries of a file, up to the first damaged one; the last one may be incomplete."""
    data, at = path.read_bytes(), 0
    found: list[Entry] = []
    with contextlib.suppress(ValueError, TypeError, EOFError):
        while at + 4 <= len(data) and (end := at + 4 + int.from_bytes(data[at : at + 4], "big")) <= len(data):
            kind, key, values = marshal.loads(data[at + 4 : end])
            found.append((kind, key, values))
            at = end
    return found


def _is_own(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and found.st_mode & 0o170077 == 0o040000
