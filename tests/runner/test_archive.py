"""The code that a run was shipped with is there as a whole or not at all, and nothing else is touched."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from dstackweb.runner import archive
from dstackweb.runner.archive import BadArchive, Fault, unpack
from dstackweb.runner.child import CannotStart
from dstackweb.runner.limits import LIMITS, RATIO_MAX, ArchiveLimits
from tests.support import examples

SMALL = ArchiveLimits(size=1 << 16, entries=12)


def header(
    name: bytes = b"a",
    kind: bytes = b"0",
    size: int | bytes = 0,
    link: bytes = b"",
    *,
    mode: int = 0o644,
    prefix: bytes = b"",
    magic: bytes = b"ustar\x0000",
) -> bytes:
    """512 bytes before a member, whatever sense they make."""
    length = size if isinstance(size, bytes) else b"%011o\0" % size
    start = name.ljust(100, b"\0")[:100] + b"%07o\0" % mode + bytes(16) + length.ljust(12, b"\0")[:12] + bytes(12)
    end = kind + link.ljust(100, b"\0")[:100] + magic + bytes(80) + prefix.ljust(155, b"\0")[:155] + bytes(12)
    total = sum(start) + sum(end) + 8 * ord(" ")
    return start + b"%06o\0 " % total + end


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def member(name: bytes, content: bytes = b"", kind: bytes = b"0", **more: int) -> bytes:
    return header(name, kind, len(content), **more) + padded(content)  # type: ignore[arg-type]


def link(name: bytes, target: bytes) -> bytes:
    return header(name, b"2", link=target)


def pax(*records: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    """A header that extends the next one."""
    lines = b""
    for key, value in records:
        rest = b" " + key + b"=" + value + b"\n"
        length = len(rest) + 1
        while len(b"%d" % length) + len(rest) != length:
            length += 1
        lines += b"%d" % length + rest
    return member(b"PaxHeaders/x", lines, kind)


def packed(*parts: bytes, end: bytes = bytes(1024)) -> bytes:
    return gzip.compress(b"".join(parts) + end, 1, mtime=0)


def unpacked(data: bytes, target: Path, limits: ArchiveLimits = LIMITS) -> None:
    unpack(io.BytesIO(data), hashlib.sha256(data).hexdigest(), str(target), limits)


@pytest.fixture(autouse=True, scope="module")
def _usual_umask() -> Iterator[None]:
    """Modes below are those of code that is unpacked with the umask of most machines, whatever this one has."""
    former = os.umask(0o022)
    yield
    os.umask(former)


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Kind, mode and content of everything below a folder, no link followed."""
    found = {}
    for path in folder.rglob("*"):
        info = path.lstat()
        content = b"" if path.is_dir() else os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
        found[str(path.relative_to(folder))] = (0 if path.is_symlink() else info.st_mode, content)
    return found


LONG_NAME = b"n" * 200
FILES = b"".join(header(b"f%d" % number) for number in range(SMALL.entries))
TWINS = member(b"a", bytes(9000)) + b"".join(header(b"l%d" % number, b"1", link=b"a") for number in range(9))
REFUSED: list[tuple[bytes, Fault, str]] = [
    (member(b"../out.txt", b"x"), Fault.OUTSIDE, "../out.txt"),
    (member(b"a/../../out.txt", b"x"), Fault.OUTSIDE, "a/../../out.txt"),
    (member(b"/tmp/out.txt", b"x"), Fault.OUTSIDE, "/tmp/out.txt"),
    (pax((b"path", b"../out")) + member(b"in", b"x"), Fault.OUTSIDE, "../out"),
    (pax((b"path", b"a\0b")) + member(b"in", b"x"), Fault.OUTSIDE, "a?b"),
    (member(b"@LongLink", b"/out\0", b"L") + member(b"in", b"x"), Fault.OUTSIDE, "/out"),
    (header(b"out", prefix=b".."), Fault.OUTSIDE, "../out"),
    (header(b"twin", b"1", link=b"/etc/passwd"), Fault.OUTSIDE, "/etc/passwd"),
    (link(b"up", b".."), Fault.LINK_OUTSIDE, "up"),
    (link(b"abs", b"/etc/passwd"), Fault.LINK_OUTSIDE, "abs"),
    (link(b"none", b""), Fault.LINK_OUTSIDE, "none"),
    (link(b"d/back", b"../../code/a"), Fault.LINK_OUTSIDE, "d/back"),
    (link(b"here", b".") + link(b"up", b"here/.."), Fault.LINK_OUTSIDE, "up"),
    (link(b"up", b"later/..") + link(b"later", b"."), Fault.LINK_OUTSIDE, "up"),
    (link(b"here", b".") + member(b"here/a", b"x"), Fault.CLASH, "here/a"),
    (member(b"d/a", b"x") + link(b"d", b"."), Fault.CLASH, "d"),
    (member(b"a", b"x") + member(b"a/b", b"x"), Fault.CLASH, "a/b"),
    (member(b"a", b"x") + link(b"a", b"b"), Fault.CLASH, "a"),
    (member(b".", b"x"), Fault.CLASH, "."),
    (header(b"pipe", b"6"), Fault.KIND, "pipe"),
    (header(b"null", b"3"), Fault.KIND, "null"),
    (header(b"sda", b"4"), Fault.KIND, "sda"),
    (header(b"holes", b"S"), Fault.KIND, "holes"),
    (pax((b"GNU.sparse.major", b"1")) + member(b"holes"), Fault.KIND, "holes"),
    (header(b"twin", b"1", link=b"missing"), Fault.KIND, "twin"),
    (link(b"soft", b"first") + header(b"twin", b"1", link=b"soft"), Fault.KIND, "twin"),
    (header(b"zeros", size=1 << 20) + bytes(1 << 20), Fault.TOO_LARGE, ""),
    (header(b"huge", size=b"\x80" + b"\xff" * 11), Fault.TOO_LARGE, ""),
    (pax((b"size", b"9" * 19)) + header(b"huge"), Fault.TOO_LARGE, ""),
    (TWINS, Fault.TOO_LARGE, ""),
    (FILES, Fault.TOO_MANY, ""),
    (header(b"a/b/c/d/e/f/g/h/i/j/k/l"), Fault.TOO_MANY, ""),
    (header(b"x/" * 49), Fault.TOO_MANY, ""),
    (pax((b"path", b"x/" * 65)) + header(), Fault.TOO_LONG, "x/" * 65),
    (pax((b"path", b"n" * 256)) + header(), Fault.TOO_LONG, "n" * 200),
    (pax((b"path", b"n/" * 600)) + header(), Fault.TOO_LONG, "n/" * 100),
    (pax((b"comment", b"x" * (1 << 16))) + header(), Fault.BROKEN, ""),
    (header(b"x", b"L", size=1 << 40), Fault.BROKEN, ""),
    (pax((b"a", b"b")) * 2000, Fault.BROKEN, ""),
    (pax(kind=b"g") * 5, Fault.BROKEN, ""),
    (pax((b"path", b"a")), Fault.BROKEN, ""),
    (pax((b"size", b"-512")) + header(), Fault.BROKEN, ""),
    (member(b"x", b"0 a=b\n", b"x") + header(), Fault.BROKEN, ""),
    (member(b"x", b"99 a=b\n", b"x") + header(), Fault.BROKEN, ""),
    (header(size=b"\xff" * 12), Fault.BROKEN, ""),
    (header(size=b"-0000000001\0"), Fault.BROKEN, ""),
    (header()[:-1] + b"x", Fault.BROKEN, ""),
]


@pytest.mark.parametrize(("part", "fault", "name"), REFUSED, ids=range(len(REFUSED)))
def test_an_archive_with_special_files_is_refused_as_a_whole(
    tmp_path: Path, part: bytes, fault: Fault, name: str
) -> None:
    target = tmp_path / "code"
    target.mkdir()
    (target / "kept").write_text("result")
    with pytest.raises(BadArchive) as refused:
        unpacked(packed(member(b"first", b"x"), part), target, SMALL)
    assert (refused.value.fault, refused.value.name) == (fault, name)
    assert [path.name for path in tmp_path.rglob("*")] == ["code", "kept"]


@pytest.mark.parametrize(
    "data",
    [
        packed(header(size=600) + b"x" * 600, end=b""),
        packed(header(size=600) + b"x" * 100, end=b""),
        packed(header()[:100], end=b""),
        packed(member(b"a", os.urandom(9000)))[:-4000],
        gzip.compress(b"no tar at all" * 100),
        b"not even gzip",
    ],
    ids=["in its padding", "in a file", "in a header", "packed", "no tar", "no gzip"],
)
def test_a_truncated_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(BadArchive) as refused:
        unpacked(data, tmp_path)
    assert refused.value.fault == Fault.BROKEN
    assert list(tmp_path.iterdir()) == []


def test_code_of_every_kind_arrives(tmp_path: Path) -> None:
    unpacked(
        packed(
            pax((b"comment", b"of git archive"), kind=b"g"),
            member(b"./", kind=b"5"),
            member(b"./src/run.sh", b"#!/bin/sh\n", mode=0o4755),
            member(b"src", kind=b"5", mode=0o1777),
            header(b"old/", b"\0", magic=bytes(8)),
            member(b"@LongLink", LONG_NAME + b"/b\0", b"L") + member(b"cut", b"long"),
            pax((b"path", "ü/é".encode()), (b"size", b"3")) + member(b"u", b"utf"),
            header(b"name", prefix=b"prefix"),
            link(b"latest", b"src/../src/run.sh"),
            link(b"gone", b"missing/file"),
            header(b"twin", b"1", link=b"src/run.sh"),
            header(b"twin", b"1", link=b"twin"),
            member(b"changed", b"old"),
            member(b"changed", b"new"),
            link(b"loop", b"loop"),
        ),
        tmp_path,
    )
    file, script, folder = stat.S_IFREG | 0o644, stat.S_IFREG | 0o755, stat.S_IFDIR | 0o755
    assert tree(tmp_path) == {
        "src": (folder, b""), "src/run.sh": (script, b"#!/bin/sh\n"), "old": (folder, b""),
        LONG_NAME.decode(): (folder, b""), f"{LONG_NAME.decode()}/b": (file, b"long"),
        "ü": (folder, b""), "ü/é": (file, b"utf"), "prefix": (folder, b""), "prefix/name": (file, b""),
        "latest": (0, b"src/../src/run.sh"), "gone": (0, b"missing/file"), "twin": (script, b"#!/bin/sh\n"),
        "changed": (file, b"new"), "loop": (0, b"loop"),
    }  # fmt: skip


def test_code_replaces_code_and_leaves_results(tmp_path: Path) -> None:
    for path in ("src/out", "outside/kept"):
        (tmp_path / "code" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / path).write_text("result")
    target = tmp_path / "code"
    (target / "data").symlink_to("outside")
    (target / "a").symlink_to("outside/kept")
    (target / f"{archive.STAGED}killed").mkdir()
    unpacked(packed(member(b"src/a", b"1"), member(b"data/kept", b"code"), member(b"a", b"2")), target)
    assert {name: content for name, (mode, content) in tree(target).items() if not stat.S_ISDIR(mode)} == {
        "src/out": b"result", "src/a": b"1", "outside/kept": b"result", "data/kept": b"code", "a": b"2",
    }  # fmt: skip


@pytest.mark.parametrize("data", [packed(member(b"b"), member(b"src", b"x")), packed(member(b"b"), member(b"out/a"))])
def test_results_in_the_place_of_code_stay_and_nothing_is_moved(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "out").write_text("result")
    before = tree(tmp_path)
    with pytest.raises(CannotStart, match="is in the way of the code"):
        unpacked(data, tmp_path)
    assert tree(tmp_path) == before


def test_a_large_archive_may_unpack_to_more() -> None:
    assert ArchiveLimits().of(64 << 20) == ArchiveLimits()
    assert ArchiveLimits().of(1 << 30).size == RATIO_MAX << 30


ODD_NAMES = (b"", b"a\xff", b"n" * 99, b"x/" * 40, archive.STAGED.encode() + b"x")
NAMES = st.sampled_from([*b"a a/b a/b/c b ./a .. ../x a/../.. /abs . a/ l l/x ../code-2/x".split(), *ODD_NAMES])
TARGETS = st.sampled_from(
    [b"a", b".", b"..", b"l", b"l/..", b"../outside", b"/etc", b"a/b/../..", b"a/../../code", b"", b"x/" * 49]
)
SIZES = st.sampled_from(
    [b"%011o\0" % size for size in (0, 1, 511, 512, 513, 9000, 1 << 16, 1 << 32)]
    + [b"\x80" + b"\xff" * 11, b"\xff" * 12, b"\x80" + bytes(10) + b"\7", b"-1", b" 7 ", b"9", b""]
)
KINDS = st.sampled_from([bytes([kind]) for kind in b"000\x00011122257345" + b"6SLKxgDMV"])
HEADERS = st.builds(
    header, NAMES, KINDS, SIZES, TARGETS,
    mode=st.sampled_from([0, 0o644, 0o755, 0o7777]), prefix=st.sampled_from([b"", b"", b"p", b".."]),
    magic=st.sampled_from([b"ustar\x0000", b"ustar  \0", bytes(8)]),
)  # fmt: skip
WHOLE = st.builds(lambda name, size: member(name, b"x" * size), NAMES, st.sampled_from([0, 1, 512, 700, 30_000]))
LINKS = st.builds(link, NAMES, TARGETS) | st.builds(
    lambda name, to: header(name, b"1", link=to), NAMES, TARGETS | NAMES
)
KEYS = st.sampled_from(
    [b"path", b"linkpath", b"size", b"GNU.sparse.map", b"GNU.sparse.realsize", b"mtime", b"comment", b""]
)
RECORDS = st.lists(
    st.tuples(KEYS, NAMES | TARGETS | st.sampled_from([b"0", b"512", b"-1", b"9" * 30, b"1,2", b"\0"])), max_size=3
)
EXTENSIONS = st.builds(
    lambda records, kind: pax(*records, kind=kind), RECORDS, st.sampled_from([b"x", b"x", b"g"])
) | st.builds(lambda name, kind: member(b"@LongLink", name + b"\0", kind), NAMES, st.sampled_from([b"L", b"K"]))
JUNK = st.sampled_from([bytes(512), b"x" * 512, b"y" * 100, bytes(1)])
PARTS = st.one_of(WHOLE, WHOLE, LINKS, LINKS, EXTENSIONS, HEADERS, JUNK)


@st.composite
def hostile(draw: st.DrawFn) -> bytes:
    """An archive that may be anything, from whole and harmless to noise."""
    data = packed(*draw(st.lists(PARTS, max_size=16)), end=draw(st.sampled_from([bytes(1024), bytes(512), b""])))
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(data) - 1))
        data = data[:at] + draw(st.sampled_from([b"", b"\0", b"\xff\xff", data[:20]])) + data[at + 1 :]
    return data


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that holds what an archive may try to reach."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for inside in ("outside", "code-2", "code"):
            (folder / inside).mkdir()
            (folder / inside / "kept").write_text(inside)
        yield folder


@examples(10_000)
@given(data=hostile())
def test_no_archive_reaches_out_exceeds_its_limits_or_is_there_in_part(place: Path, data: bytes) -> None:
    target = place / "code"
    before = tree(place)
    try:
        unpacked(data, target, SMALL)
    except BadArchive:
        assert tree(place) == before
        return
    after = tree(place)
    made = {path: after.pop(path) for path in set(after) - set(before)}
    assert after == before
    assert all(path.startswith("code/") for path in made)
    assert len(made) <= SMALL.entries
    assert sum(len(content) for mode, content in made.values() if stat.S_ISREG(mode)) <= SMALL.size
    assert {stat.S_IMODE(mode) for mode, _ in made.values() if mode} <= {0o644, 0o755}
    assert {stat.S_IFMT(mode) for mode, _ in made.values()} <= {0, stat.S_IFREG, stat.S_IFDIR}
    for path in sorted(made, reverse=True):
        if (found := place / path).is_symlink():
            assert os.path.realpath(found).startswith(f"{os.path.realpath(target)}{os.sep}") or (
                os.path.realpath(found) == os.path.realpath(target)
            )
    for path in sorted(made, key=len, reverse=True):
        found = place / path
        found.rmdir() if stat.S_ISDIR(made[path][0]) else found.unlink()
    assert tree(place) == before


PLAIN_NAMES = st.lists(st.sampled_from(["a", "bb", "ü", "n" * 90, "m" * 120, "\udcff"]), min_size=1, max_size=4).map(
    "/".join
)


@examples(300)
@given(
    names=st.lists(PLAIN_NAMES, unique=True, max_size=8),
    contents=st.lists(st.binary(max_size=1500), min_size=8, max_size=8),
    shape=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_plain_code_arrives_as_tarfile_would_unpack_it(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], contents: list[bytes], shape: int
) -> None:
    names = [name for name in names if not any(other.startswith(f"{name}/") for other in names)]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=shape) as tar:
        for name, content in zip(names, contents, strict=False):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755 if content[:1] < b"\x80" else 0o600
            tar.addfile(info, io.BytesIO(content))
    target = tmp_path_factory.mktemp("code")
    unpacked(buffer.getvalue(), target)
    found = {os.path.relpath(os.path.join(top, file), target) for top, _, files in os.walk(target) for file in files}
    assert {name: (target / name).read_bytes() for name in found} == dict(zip(names, contents, strict=False))
    for name, content in zip(names, contents, strict=False):
        assert bool((target / name).stat().st_mode & 0o111) == (content[:1] < b"\x80")
