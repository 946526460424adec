"""Where logs and uploaded code are kept: bytes by key, in one place that all servers of a deployment share.

`DSTACKWEB_STORAGE` says where: on a disk (of one server, or a folder that all of them mount), as rows of the database,
or in S3-compatible object storage. A key is a relative path. A file is appended by offset, or put there whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from django.conf import settings

from dstackweb.lib.errors import DomainError

PIECE = 1 << 20


class Gap(Exception):
    """Bytes are missing before the offered offset; `expected` is the offset to continue at."""

    def __init__(self, expected: int) -> None:
        super().__init__(f"the file continues at offset {expected}")
        self.expected = expected


class Missing(Exception):
    """Bytes that were stored are not there any more."""


class StorageAway(DomainError):
    """The storage can't be reached, or refuses. Nothing is lost: the same request may be sent again."""

    status = 503


class Storage(Protocol):
    """Each method but `settle` is safe to call from several processes and servers at once. All raise StorageAway."""

    def append(self, key: str, offset: int, data: bytes) -> int:
        """Add `data`, which begins at `offset`; returns the new size in bytes. Overlap is trimmed; raises Gap."""

    def put(self, key: str, path: Path) -> None:
        """Keep a copy of the file at `path`, whole or not at all. The key must be new."""

    def size(self, key: str) -> int | None:
        """The size in bytes; None if nothing was stored."""

    def is_whole(self, key: str) -> bool:
        """Whether it was stored and all its bytes are there; may ask the network."""
        return self.size(key) is not None

    def read(self, key: str, offset: int, limit: int) -> bytes:
        """Up to `limit` bytes from `offset`; empty behind the end. Raises Missing."""

    def remove(self, key: str) -> None:
        """Remove it, if it is there."""

    def settle(self) -> bool:
        """Put small pieces together, for some seconds at most; True if nothing is left to do now."""
        return True

    def check(self) -> None:
        """Raises StorageAway if it could not be written to."""
        return None


class DiskStorage(Storage):
    """Files in a folder: the server's own, or one that all servers mount (with locks that work there, as NFS 4 has)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def append(self, key: str, offset: int, data: bytes) -> int:
        """As Storage.append. Two senders at once are put in order by a lock on the file, whose size is what arrived."""
        with self._opened(key) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)
            end = os.fstat(fd).st_size
            if offset > end:
                raise Gap(end)
            rest = memoryview(data)[end - offset :]
            while rest:
                written = os.pwrite(fd, rest, end)
                end += written
                rest = rest[written:]
            return end

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        target = self.root / key
        with _explained(self.root):
            self._make(target.parent)
            fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                yield fd
            finally:
                os.close(fd)

    def _make(self, folder: Path) -> None:
        """Make a folder and those above it below the root, which others can't even list."""
        if folder != self.root and not folder.is_dir():
            self._make(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)

    def put(self, key: str, path: Path) -> None:
        target = self.root / key
        with _explained(self.root):
            self._make(target.parent)
            with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".upload-", delete=False) as copy:
                try:
                    with path.open("rb") as source:
                        shutil.copyfileobj(source, copy)
                    copy.flush()
                    os.replace(copy.name, target)
                except BaseException:
                    os.unlink(copy.name)
                    raise

    def size(self, key: str) -> int | None:
        try:
            return (self.root / key).stat().st_size
        except FileNotFoundError:
            return None

    def read(self, key: str, offset: int, limit: int) -> bytes:
        try:
            with (self.root / key).open("rb") as file:
                if offset >= os.fstat(file.fileno()).st_size:
                    return b""  # a file system may refuse to seek as far
                file.seek(offset)
                return file.read(limit)
        except FileNotFoundError:
            return b""

    def remove(self, key: str) -> None:
        (self.root / key).unlink(missing_ok=True)

    def check(self) -> None:
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise StorageAway(f"the folder {self.root} is not there, or this program can't write to it")


@contextlib.contextmanager
def _explained(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageAway(f"the folder {root} can't be written to: {error.strerror}") from error


def storage() -> Storage:
    return storage_at(settings.DSTACKWEB_STORAGE, settings.DSTACKWEB_HOME)


@functools.lru_cache(8)
def storage_at(url: str, home: Path) -> Storage:
    from dstackweb.lib.storage.rows import RowStorage

    match urlsplit(url).scheme:
        case "":
            return DiskStorage(home) if url != "database" else RowStorage()
        case "file":
            return DiskStorage(Path(urlsplit(url).path))
        case _:
            from dstackweb.lib.storage.objects import ObjectStorage  # imports boto3: 0.1 s, 24 MB

            return ObjectStorage(url)


def pieces(source: Storage, key: str, start: int, size: int) -> Iterator[bytes]:
    """The bytes of a file from `start` to `size`, piece by piece. Raises Missing if they are not all there."""
    done = start
    while done < size:
        piece = source.read(key, done, min(PIECE, size - done))
        if not piece:
            raise Missing(key)
        yield piece
        done += len(piece)
