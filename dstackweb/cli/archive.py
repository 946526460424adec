"""The working directory as a tar.gz whose bytes depend only on names, contents and the executable bit.

Times, owners and the order on disk are left out: the same code gives the same bytes, and is uploaded once.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pathspec import GitIgnoreSpec

from dstackweb.cli.language import N_, _, size_text
from dstackweb.cli.output import CliError
from dstackweb.cli.tables import padding_of
from dstackweb.runner.limits import DEPTH_MAX, LIMITS, NAME_MAX, PATH_MAX, TEXT_MAX, ArchiveLimits, is_too_long

LARGEST_NAMED = 5
LEAVE_OUT = N_(
    "Add files that the run doesn't need to .gitignore, download data in the run, or upload no code: --no-code"
)


@dataclass(frozen=True)
class CodeArchive:
    """An archive in a temporary file, which is deleted when it is closed."""

    file: IO[bytes]
    sha256: str
    size: int
    files: int
    links_left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SourceFile:
    """A file or a symbolic link to upload; `path` is relative to the root."""

    path: str
    info: os.stat_result

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.info.st_mode)


def entries(root: Path) -> list[SourceFile]:
    """Files and links below `root` that git doesn't ignore, sorted by name. Raises OSError.

    In a work tree git lists them; elsewhere, or without git, the `.gitignore` files below `root` are read here.
    """
    listed = _listed_by_git(root)
    found = []
    for path in sorted(_walk(root, "", ()) if listed is None else listed, key=os.fsencode):
        try:
            info = (root / path).lstat()
        except (FileNotFoundError, NotADirectoryError):  # in the index of git, but deleted
            continue
        if stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
            found.append(SourceFile(path, info))
    return found


def _listed_by_git(root: Path) -> set[str] | None:
    """The paths below `root` that git lists, those of nested work trees too; None if it is in no work tree."""
    if not any((place / ".git").exists() for place in (root, *root.parents)):
        return None
    # Set in a git hook, for example: they would name another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", os.fspath(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, env=env, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    paths = set()
    for path in (os.fsdecode(name) for name in done.stdout.split(b"\0") if name):
        inner = root / path
        if inner.is_dir() and not inner.is_symlink():  # a submodule, or a clone of its own
            nested = _listed_by_git(inner)
            paths |= {os.path.join(path, name) for name in (nested if nested is not None else _walk(inner, "", ()))}
        else:
            paths.add(path)
    return paths


def _walk(root: Path, prefix: str, above: tuple[tuple[str, GitIgnoreSpec], ...]) -> Iterator[str]:
    """The paths in a directory; `above` has the `.gitignore` files that apply, each with its directory's prefix."""
    levels = above
    file = root / prefix / ".gitignore"
    if file.is_file() and not file.is_symlink():
        levels = (*above, (prefix, GitIgnoreSpec.from_lines(file.read_text("utf-8", "replace").splitlines())))
    with os.scandir(root / prefix) as found:
        for entry in found:
            is_directory = entry.is_dir(follow_symlinks=False)
            path = prefix + entry.name + ("/" if is_directory else "")
            if entry.name == ".git" or _is_ignored(path, levels):
                continue
            if is_directory:
                yield from _walk(root, path, levels)
            else:
                yield path


def _is_ignored(path: str, levels: tuple[tuple[str, GitIgnoreSpec], ...]) -> bool:
    for prefix, spec in reversed(levels):
        include = spec.check_file(path[len(prefix) :]).include
        if include is not None:
            return include
    return False


class _Sink:
    """Hashes and counts the bytes of the archive, and stops packing when they exceed the limit."""

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


def pack(
    root: Path,
    limit: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    hosts_take: ArchiveLimits = LIMITS,
) -> CodeArchive:
    """Pack the files below `root` that git doesn't ignore into at most `limit` bytes.

    `progress` gets the bytes read so far and in total. Links that point outside `root` are left out and listed: they
    would point nowhere in the run's directory. Raises CliError if the archive exceeds the limit (with the largest
    files), hosts would not unpack it, or a file can't be read or becomes shorter.
    """
    root = root.resolve()
    try:
        found = entries(root)
    except OSError as error:
        raise _unreadable(error) from None
    left_out = [entry.path for entry in found if entry.is_link and _points_outside(root, entry.path)]
    kept = [entry for entry in found if entry.path not in set(left_out)]
    total = sum(entry.info.st_size for entry in kept)
    _check_paths(root, kept, hosts_take)
    if total > (most := hosts_take.of(limit).size):
        raise _too_large(kept, _unpacks_to(root, total, most))
    file = tempfile.TemporaryFile(prefix="dstackweb-code-")  # noqa: SIM115  it outlives this function
    sink, done = _Sink(file, limit), 0
    try:
        # Level 6 is within 2 % of level 9 for source code, in a third of the time.
        with (
            gzip.GzipFile(filename="", mode="wb", fileobj=sink, compresslevel=6, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for entry in kept:
                _add(tar, root, entry)
                done += entry.info.st_size
                progress(done, total)
            unpacked = tar.offset + tarfile.BLOCKSIZE  # a reader goes to the block behind
    except _OverLimit:
        file.close()
        values = {"root": root, "limit": size_text(limit)}
        why = _("the code in {root} exceeds the limit of {limit} after packing. Nothing was sent.", **values)
        raise _too_large(kept, why) from None
    except OSError as error:
        file.close()
        raise _unreadable(error) from None
    if unpacked > (most := hosts_take.of(sink.size).size):
        file.close()
        raise _too_large(kept, _unpacks_to(root, unpacked, most))
    file.seek(0)
    return CodeArchive(file, sink.digest.hexdigest(), sink.size, len(kept), left_out)


def _check_paths(root: Path, found: list[SourceFile], limits: ArchiveLimits) -> None:
    """Raises CliError if there are too many files and folders for a host, or a path is too long for it."""
    paths = {os.fsencode(entry.path) for entry in found}
    if long := next(filter(is_too_long, sorted(paths)), None):
        limit = {"path": PATH_MAX, "depth": DEPTH_MAX, "name": NAME_MAX}
        raise CliError(
            _("the path {path} is too long. Nothing was sent.", path=os.fsdecode(long)),
            _("Hosts unpack paths of up to {path:,} bytes, with {depth} names of {name} bytes each.", **limit),
            _(LEAVE_OUT),
        )
    everything = paths | {path[:at] for path in paths for at, byte in enumerate(path) if byte == ord("/")}
    why = ""
    if (number := len(everything)) > limits.entries:
        why = _(
            "the code in {root} has {number:,} files and folders, and hosts unpack at most {most:,}. Nothing was sent.",
            root=root,
            number=number,
            most=limits.entries,
        )
    elif sum(map(len, everything)) > TEXT_MAX:
        values = {"root": root, "most": size_text(TEXT_MAX)}
        why = _("the paths of the code in {root} are longer than {most} together. Nothing was sent.", **values)
    if why:
        raise CliError(why, _(LEAVE_OUT))


def _unpacks_to(root: Path, size: int, most: int) -> str:
    values = {"root": root, "size": size_text(size), "most": size_text(most)}
    return _(
        "the code in {root} takes {size} when unpacked, and hosts unpack at most {most} of it. Nothing was sent.",
        **values,
    )


def _add(tar: tarfile.TarFile, root: Path, entry: SourceFile) -> None:
    member = tarfile.TarInfo(entry.path)
    source = root / entry.path
    if entry.is_link:
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(source)
        tar.addfile(member)
        return
    with source.open("rb") as content:
        # A file that grows meanwhile, such as a log, is packed up to the size that it has now.
        info = os.fstat(content.fileno())
        member.size = info.st_size
        member.mode = 0o755 if info.st_mode & stat.S_IXUSR else 0o644
        tar.addfile(member, content)


def _points_outside(root: Path, path: str) -> bool:
    target = os.readlink(root / path)
    return os.path.isabs(target) or not Path(os.path.realpath(root / path)).is_relative_to(root)


def _unreadable(error: OSError) -> CliError:
    if error.filename is None:  # raised by tarfile for a file that ended early
        return CliError(_("a file became shorter while it was packed. Nothing was sent."), _("Try again."))
    return CliError(
        _("can't read {file}: {reason}. Nothing was sent.", file=error.filename, reason=error.strerror),
        _("Make it readable, add it to .gitignore, or upload no code: --no-code"),
    )


def _too_large(packed: list[SourceFile], why: str) -> CliError:
    largest = sorted(packed, key=lambda entry: entry.info.st_size, reverse=True)[:LARGEST_NAMED]
    return CliError(
        why,
        _("Largest files not in .gitignore:"),
        *(f"{padding_of(size := size_text(entry.info.st_size), 9)}{size}  {entry.path}" for entry in largest),
        _(LEAVE_OUT),
    )
