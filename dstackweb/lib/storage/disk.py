"""Files in a folder: the server's own, or one that all servers mount (with locks that work there, as NFS 4 has)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dstackweb.lib.storage import Gap, StorageAway


class DiskStorage:
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

    def is_whole(self, key: str) -> bool:
        return self.size(key) is not None

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

    def settle(self) -> bool:
        return True

    def check(self) -> None:
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise StorageAway(f"the folder {self.root} is not there, or this program can't write to it")


@contextlib.contextmanager
def _explained(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageAway(f"the folder {root} can't be written to: {error.strerror}") from error
