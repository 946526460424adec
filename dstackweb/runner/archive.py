"""Unpacks the code that a run was shipped with: the whole of a tar.gz, or nothing of it.

Any member can ship any bytes. `tarfile` reads extended headers of any size into memory and recurses into them, its
releases differ in what they refuse, and some of them never come to an end. So the archive is read here as a stream, and
only what code is made of is taken: files, folders, and links that stay inside.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import BinaryIO

from dstackweb.runner.child import CannotStart
from dstackweb.runner.disk import remove
from dstackweb.runner.limits import LIMITS, TEXT_MAX, ArchiveLimits, is_too_long

BLOCK, PIECE = 512, 1 << 20
STAGED = ".dstackweb-code-"
"""How the folder in the target begins in which an archive is unpacked before it is moved to its place."""
EXTENSION_MAX = 1 << 16
EXTENSIONS_MAX = 4
"""So many headers that only extend the next one may precede it, each with so many bytes."""


class Fault(str, Enum):  # noqa: UP042 - Python 3.9 has no StrEnum
    """Why an archive was refused."""

    BROKEN = "broken"
    OUTSIDE = "outside"
    LINK_OUTSIDE = "link_outside"
    KIND = "kind"
    CLASH = "clash"
    TOO_LARGE = "too_large"
    TOO_MANY = "too_many"
    TOO_LONG = "too_long"


class BadArchive(Exception):
    """The archive was refused, and nothing of it is left. `name` is the member at fault, `limit` what it exceeds."""

    def __init__(self, fault: Fault, name: bytes = b"", limit: int | None = None) -> None:
        self.fault, self.name, self.limit = fault, _shown(name), limit
        about = (f": {self.name}" if name else "") + (f", limit {limit}" if limit is not None else "")
        super().__init__(f"the code could not be unpacked ({fault.value.replace('_', ' ')}{about})")


def _shown(name: bytes) -> str:
    text = name[:200].decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def unpack(archive: BinaryIO, sha256: str, target: str, limits: ArchiveLimits = LIMITS) -> None:
    """Check a tar.gz and unpack it into `target`, over what is there.

    Of a file's mode only whether its owner may execute it is kept. Raises BadArchive; CannotStart if the bytes are not
    what was uploaded, or something in `target` is in the way; OSError. `target` is then as it was.
    """
    digest, packed = hashlib.sha256(), 0
    while piece := archive.read(PIECE):
        digest.update(piece)
        packed += len(piece)
    if digest.hexdigest() != sha256:
        raise CannotStart("the downloaded code differs from the uploaded code")
    archive.seek(0)
    for name in os.listdir(target):  # of a runner that was killed
        if name.startswith(STAGED):
            remove(os.path.join(target, name))
    staged = tempfile.mkdtemp(prefix=STAGED, dir=target)
    try:
        limits = limits.of(packed)
        tree = _Tree(os.fsencode(staged), limits)
        for entry in _entries(_Stream(archive, limits.size)):
            tree.add(entry)
        tree.make_links()
        for check_only in (True, False):
            _move(staged, target, check_only=check_only)
    finally:
        remove(staged)


class _Stream:
    """The unpacked bytes, `most` of them at most."""

    def __init__(self, archive: BinaryIO, most: int) -> None:
        self._file = gzip.GzipFile(fileobj=archive, mode="rb")
        self._left = self._most = most

    def spend(self, size: int) -> None:
        """Count bytes that will be read or written. Raises BadArchive."""
        if size > self._left:
            raise BadArchive(Fault.TOO_LARGE, limit=self._most)
        self._left -= size

    def block(self) -> bytes | None:
        """The next header; None at the archive's end."""
        self.spend(BLOCK)
        data = self._read(BLOCK)
        if not data or data == bytes(BLOCK):
            return None
        if len(data) < BLOCK or _number(data[148:156]) != sum(data[:148]) + sum(data[156:]) + 8 * ord(" "):
            raise BadArchive(Fault.BROKEN)
        return data

    def content(self, size: int) -> Iterator[bytes]:
        """The bytes after a header, in pieces."""
        padding = -size % BLOCK
        self.spend(size + padding)
        while size:
            piece = self._read(min(size, PIECE))
            if not piece:
                raise BadArchive(Fault.BROKEN)
            size -= len(piece)
            yield piece
        if len(self._read(padding)) < padding:
            raise BadArchive(Fault.BROKEN)

    def _read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except (gzip.BadGzipFile, zlib.error, EOFError):
            raise BadArchive(Fault.BROKEN) from None


@dataclass(frozen=True)
class _Entry:
    """A member: a file with its `size` bytes in the stream, a folder, a link to `link`, or another name of `link`."""

    kind: bytes
    name: bytes
    link: bytes
    size: int
    executable: bool
    stream: _Stream


FILE, HARD_LINK, LINK, FOLDER = b"0", b"1", b"2", b"5"
KINDS = {b"\0": FILE, b"0": FILE, b"7": FILE, b"1": HARD_LINK, b"2": LINK, b"5": FOLDER}
EXTENSIONS = {b"x": b"", b"g": b"", b"L": b"path", b"K": b"linkpath"}


def _entries(stream: _Stream) -> Iterator[_Entry]:
    while (header := stream.block()) is not None:
        more: dict[bytes, bytes] = {}
        for _ in range(EXTENSIONS_MAX):
            kind = header[156:157]
            if kind not in EXTENSIONS:
                break
            found = _extension(kind, _number(header[124:136]), stream)
            more.update(found if kind != b"g" else {})
            following = stream.block()
            if following is None:
                raise BadArchive(Fault.BROKEN)
            header = following
        if header[156:157] in EXTENSIONS:
            raise BadArchive(Fault.BROKEN)
        yield _entry(header, more, stream)


def _extension(kind: bytes, size: int, stream: _Stream) -> dict[bytes, bytes]:
    """What a header says of the next one."""
    if size > EXTENSION_MAX:
        raise BadArchive(Fault.BROKEN)
    data = b"".join(stream.content(size))
    return {EXTENSIONS[kind]: data.partition(b"\0")[0]} if EXTENSIONS[kind] else _records(data)


def _records(data: bytes) -> dict[bytes, bytes]:
    """The lines `LENGTH KEY=VALUE` of a pax header."""
    found, at = {}, 0
    while at < len(data):
        space = data.find(b" ", at, at + 10)
        end = at + _decimal(data[at:space] if space > at else b"")
        if not space < end <= len(data) or data[end - 1 : end] != b"\n":
            raise BadArchive(Fault.BROKEN)
        key, _, value = data[space + 1 : end - 1].partition(b"=")
        found[key] = value
        at = end
    return found


def _entry(header: bytes, more: dict[bytes, bytes], stream: _Stream) -> _Entry:
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345:346] != b"\0":
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    name = more.get(b"path", name)
    kind = KINDS.get(header[156:157])
    if header[156:157] == b"\0" and name.endswith(b"/"):
        kind = FOLDER
    if kind is None or any(key.startswith(b"GNU.sparse.") for key in more):
        raise BadArchive(Fault.KIND, name)
    link = more.get(b"linkpath", header[157:257].partition(b"\0")[0])
    size = 0
    if kind == FILE:
        size = _decimal(more[b"size"]) if b"size" in more else _number(header[124:136])
    return _Entry(kind, name, link, size, bool(_number(header[100:108]) & 0o100), stream)


def _number(field: bytes) -> int:
    """A number of a header: octal digits, or binary after 0x80."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip()
    if digits.strip(b"01234567"):
        raise BadArchive(Fault.BROKEN)
    return int(digits or b"0", 8)


def _decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 19:
        raise BadArchive(Fault.BROKEN)
    return int(digits)


class _Tree:
    """What an archive has so far, in the folder `root`. Links are made last: nothing is written through one."""

    def __init__(self, root: bytes, limits: ArchiveLimits) -> None:
        self._root, self._limits = root, limits
        self._kinds: dict[bytes, bytes] = {b"": FOLDER}
        self._links: dict[bytes, bytes] = {}
        self._text = 0

    def add(self, entry: _Entry) -> None:
        """Write a file or make a folder. Of two files or links with one name the later one is taken."""
        path = _path(entry.name)
        if entry.kind == HARD_LINK:
            if (source := _path(entry.link)) == path and self._kinds.get(path) == FILE:
                return  # a file that was packed twice
            if self._kinds.get(source) != FILE:
                raise BadArchive(Fault.KIND, entry.name)
            self._note(path, FILE, entry.name)
            self._copy(source, path, entry)
            return
        self._note(path, entry.kind, entry.name, len(entry.link))
        if entry.kind == FILE:
            self._write(path, entry.stream.content(entry.size), entry.executable)
        elif entry.kind == LINK:
            self._links[path] = entry.link

    def _note(self, path: bytes, kind: bytes, name: bytes, more: int = 0) -> None:
        """Count an entry and the folders above it, and make them."""
        found = self._kinds.get(path)
        if found is None:
            self._note(path.rpartition(b"/")[0], FOLDER, name)
            if len(self._kinds) > self._limits.entries:
                raise BadArchive(Fault.TOO_MANY, limit=self._limits.entries)
            if self._text > TEXT_MAX:
                raise BadArchive(Fault.TOO_LONG, name)
            if kind == FOLDER:
                os.mkdir(os.path.join(self._root, path), 0o755)
            self._kinds[path] = kind
            self._text += len(path)
        elif found != kind:
            raise BadArchive(Fault.CLASH, name)
        self._text += more

    def _write(self, path: bytes, content: Iterator[bytes], executable: bool) -> None:
        place = os.path.join(self._root, path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)
        with open(place, "xb") as file:
            for piece in content:
                file.write(piece)
            os.fchmod(file.fileno(), 0o755 if executable else 0o644)

    def _copy(self, source: bytes, path: bytes, entry: _Entry) -> None:
        """Another name of a file becomes a file of its own, whose bytes count as well."""
        with open(os.path.join(self._root, source), "rb") as file:
            info = os.fstat(file.fileno())
            entry.stream.spend(info.st_size)
            self._write(path, iter(lambda: file.read(PIECE), b""), bool(info.st_mode & 0o100))

    def make_links(self) -> None:
        """Raises BadArchive if one leads outside."""
        for path, link in self._links.items():
            if not self._stays_inside(path, link):
                raise BadArchive(Fault.LINK_OUTSIDE, path)
        for path, link in self._links.items():
            os.symlink(link, os.path.join(self._root, path))

    def _stays_inside(self, path: bytes, link: bytes) -> bool:
        """Whether no step leaves the root. Behind another link, which is checked itself, it may only go down."""
        place, through = path.split(b"/")[:-1], False
        for name in link.split(b"/"):
            if name == b"..":
                if through or not place:
                    return False
                place.pop()
            elif name not in (b"", b"."):
                place.append(name)
                through = through or b"/".join(place) in self._links
        return bool(link) and not link.startswith(b"/")


def _path(name: bytes) -> bytes:
    """A member's path below the root; empty for the root itself. Raises BadArchive."""
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if name.startswith(b"/") or b".." in parts or b"\0" in name:
        raise BadArchive(Fault.OUTSIDE, name)
    if is_too_long(name):
        raise BadArchive(Fault.TOO_LONG, name)
    return b"/".join(parts)


def _move(source: str, target: str, *, check_only: bool) -> None:
    """Move what is in one folder to another, in the place of the files and links of the same kind there.

    Raises CannotStart if something else is in the way, which may be a run's results: asked before anything is moved.
    """
    with os.scandir(source) as found:
        entries = list(found)
    for entry in entries:
        place, is_folder = os.path.join(target, entry.name), entry.is_dir(follow_symlinks=False)
        try:
            there = stat.S_IFMT(os.lstat(place).st_mode)
        except FileNotFoundError:
            there = 0
        if is_folder and there == stat.S_IFDIR:
            _move(entry.path, place, check_only=check_only)
            continue
        if there not in ((0, stat.S_IFLNK) if is_folder else (0, stat.S_IFLNK, stat.S_IFREG)):
            raise CannotStart(f"{entry.name!r} in the run's folder is in the way of the code, which has another there")
        if not check_only:
            if there and is_folder:
                os.unlink(place)
            os.rename(entry.path, place)
