"""Where logs and uploaded code are kept: bytes by key, in one place that all servers of a deployment share.

`DSTACKWEB_STORAGE` says where: on a disk (of one server, or a folder that all of them mount), as rows of the database,
or in S3-compatible object storage. A key is a relative path. A file is appended by offset, or put there whole.
"""

from __future__ import annotations

import functools
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

    def read(self, key: str, offset: int, limit: int) -> bytes:
        """Up to `limit` bytes from `offset`; empty behind the end. Raises Missing."""

    def remove(self, key: str) -> None:
        """Remove it, if it is there."""

    def settle(self) -> bool:
        """Put small pieces together, for some seconds at most; True if nothing is left to do now."""

    def check(self) -> None:
        """Raises StorageAway if it could not be written to."""


def storage() -> Storage:
    return storage_at(settings.DSTACKWEB_STORAGE, settings.DSTACKWEB_HOME)


@functools.lru_cache(8)
def storage_at(url: str, home: Path) -> Storage:
    """The storage of a value of DSTACKWEB_STORAGE."""
    from dstackweb.lib.storage.disk import DiskStorage
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
