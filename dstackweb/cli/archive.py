"""The working directory as one tar.gz that depends on names, contents and the executable bit alone.

Times, owners and the order on disk are left out, so that the same code makes the same bytes, and is uploaded once.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from dstackweb.cli.errors import CliError
from dstackweb.cli.ignore import Entry, walk
from dstackweb.cli.output import size_text

LARGEST_NAMED = 5


@dataclass(frozen=True)
class Packed:
    """An archive in a temporary file that vanishes with it."""

    file: IO[bytes]
    sha256: str
    size: int
    files: int
    links_left_out: list[str] = field(default_factory=list)


class _Sink:
    """Hashes and counts what goes into the archive, and ends the packing once it is over the limit."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self.file, self.limit = file, limit
        self.digest, self.size = hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.size += len(data)
        if self.size > self.limit:
            raise _OverLimit
        self.digest.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


class _OverLimit(Exception):
    pass


def pack(root: Path, limit: int, progress: Callable[[int, int], None] = lambda done, total: None) -> Packed:
    """Pack what git would not ignore below `root` (see `ignore.walk`) into at most `limit` bytes.

    `progress` is told bytes read so far and in all. Links that lead out of `root` are left out and named, since the
    run's directory elsewhere has nothing there. Raises CliError: over the limit (naming the largest files), a file
    that can't be read, or one that shrank meanwhile.
    """
    root = root.resolve()
    try:
        entries = list(walk(root))
    except OSError as error:
        raise _unreadable(error) from None
    left_out = [entry.path for entry in entries if entry.is_link and _leads_out(root, entry.path)]
    kept = [entry for entry in entries if entry.path not in set(left_out)]
    total = sum(entry.info.st_size for entry in kept)
    file = tempfile.TemporaryFile(prefix="dstackweb-code-")  # noqa: SIM115  it outlives this function
    sink, done = _Sink(file, limit), 0
    try:
        # Level 6 packs source code within 2 % of level 9, in a third of the time.
        with (
            gzip.GzipFile(filename="", mode="wb", fileobj=sink, compresslevel=6, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for entry in kept:
                _add(tar, root, entry)
                done += entry.info.st_size
                progress(done, total)
    except _OverLimit:
        file.close()
        raise _too_large(root, kept, limit) from None
    except OSError as error:
        file.close()
        raise _unreadable(error) from None
    file.seek(0)
    return Packed(file, sink.digest.hexdigest(), sink.size, len(kept), left_out)


def _add(tar: tarfile.TarFile, root: Path, entry: Entry) -> None:
    member = tarfile.TarInfo(entry.path)
    source = root / entry.path
    if entry.is_link:
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(source)
        tar.addfile(member)
        return
    with source.open("rb") as content:
        # Of a file that grows, as logs do, the part that was there is taken.
        info = os.fstat(content.fileno())
        member.size = info.st_size
        member.mode = 0o755 if info.st_mode & stat.S_IXUSR else 0o644
        tar.addfile(member, content)


def _leads_out(root: Path, path: str) -> bool:
    target = os.readlink(root / path)
    return os.path.isabs(target) or not Path(os.path.realpath(root / path)).is_relative_to(root)


def _unreadable(error: OSError) -> CliError:
    if error.filename is None:  # tarfile's own word for a file that ended early
        return CliError("a file became shorter while it was being packed; nothing was sent.", "Try again.")
    return CliError(
        f"can't read {error.filename}: {error.strerror}; nothing was sent.",
        "Make it readable, name it in .gitignore, or send no code: --no-code",
    )


def _too_large(root: Path, entries: list[Entry], limit: int) -> CliError:
    largest = sorted(entries, key=lambda entry: entry.info.st_size, reverse=True)[:LARGEST_NAMED]
    return CliError(
        f"the code in {root} is over the limit of {size_text(limit)}, even packed; nothing was sent.",
        "The largest files that .gitignore doesn't name:",
        *(f"{size_text(entry.info.st_size):>9}  {entry.path}" for entry in largest),
        "Name what the run doesn't need in .gitignore, fetch data in the run, or send no code: --no-code",
    )
