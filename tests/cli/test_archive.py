from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from dstackweb.cli.archive import CodeArchive, pack
from dstackweb.cli.output import CliError
from dstackweb.runner.archive import BadArchive, unpack
from dstackweb.runner.limits import ArchiveLimits

MB = 1 << 20


def names(packed: CodeArchive) -> list[str]:
    with tarfile.open(fileobj=packed.file, mode="r:gz") as tar:
        return tar.getnames()


def test_the_same_code_makes_the_same_bytes_whenever_and_by_whomever_it_is_packed(tmp_path: Path) -> None:
    for copy, order in (("one", ["a.py", "b.py"]), ("two", ["b.py", "a.py"])):
        for name in order:
            file = tmp_path / copy / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"# {name}")
            os.utime(file, (0, len(copy + order[0]) * 1000.5 if copy == "one" else 5))
            file.chmod(0o600 if copy == "one" else 0o664)
    one, two = pack(tmp_path / "one", MB), pack(tmp_path / "two", MB)
    assert one.sha256 == two.sha256 == hashlib.sha256(one.file.read()).hexdigest()
    (tmp_path / "two" / "a.py").chmod(0o755)
    assert pack(tmp_path / "two", MB).sha256 != one.sha256


def test_an_archive_unpacks_to_the_packed_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("main.py", "package/deep/module.py", "naïve 训练.py", os.fsdecode(b"not-utf8-\xff.py"), "x" * 200):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(name.encode("utf-8", "surrogateescape") * 3)
    (source / "main.py").chmod(0o755)
    (source / "latest").symlink_to("package/deep")
    packed = pack(source, MB)
    with tarfile.open(fileobj=packed.file, mode="r:gz") as tar:
        tar.extractall(tmp_path / "target")  # packed above; filters came with Python 3.11.4
    found = {
        str(file.relative_to(tmp_path / "target")): file.read_bytes()
        for file in (tmp_path / "target").rglob("*")
        if file.is_file() and "latest" not in file.parts
    }
    assert found == {str(f.relative_to(source)): f.read_bytes() for f in source.rglob("*") if f.is_file()}
    assert os.access(tmp_path / "target" / "main.py", os.X_OK)
    assert not os.access(tmp_path / "target" / "package" / "deep" / "module.py", os.X_OK)
    assert (tmp_path / "target" / "latest").readlink() == Path("package/deep")


def test_links_that_lead_out_of_the_directory_are_left_out_and_named(tmp_path: Path) -> None:
    """The runner refuses to unpack them, so that one of them would fail the run."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "code.py").touch()
    (source / "absolute").symlink_to(source / "code.py")
    (source / "above").symlink_to("../elsewhere")
    (source / "inside").symlink_to("code.py")
    (source / "over").symlink_to("above/x")
    packed = pack(source, MB)
    assert packed.links_left_out == ["above", "absolute", "over"]
    assert names(packed) == ["code.py", "inside"]


def test_code_over_the_limit_is_refused_with_the_largest_files_named(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text("x = 1")
    for number in range(7):
        (tmp_path / f"data-{number}.bin").write_bytes(os.urandom((number + 1) * 20_000))
    with pytest.raises(CliError) as refused:
        pack(tmp_path, 100_000)
    printed = "\n".join([refused.value.message, *refused.value.notes])
    assert "exceeds the limit of 97.7 KB" in printed
    assert "Nothing was sent" in printed
    assert "136.7 KB  data-6.bin" in printed
    assert "small.py" not in printed
    assert ".gitignore" in printed


TREE = 3 * (512 + 10_240) + 512
"""Bytes of an archive of three files of 10,000 bytes, with the block that ends it."""


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (ArchiveLimits(size=TREE - 1), "takes 32 KB when unpacked, and hosts unpack at most 32 KB of it"),
        (ArchiveLimits(entries=4), "has 5 files and folders, and hosts unpack at most 4"),
    ],
)
def test_what_hosts_would_not_unpack_is_not_uploaded(tmp_path: Path, limits: ArchiveLimits, words: str) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("x", "a/y", "a/b/z"):
        (tmp_path / name).write_bytes(b"0" * 10_000)
    fitting = ArchiveLimits(size=TREE, entries=5)
    packed = pack(tmp_path, 1_000, hosts_take=fitting)
    (target := tmp_path / "target").mkdir()
    unpack(packed.file, packed.sha256, str(target), fitting)
    packed.file.seek(0)
    with pytest.raises(BadArchive):
        unpack(packed.file, packed.sha256, str(target), limits)
    shutil.rmtree(target)
    with pytest.raises(CliError) as refused:
        pack(tmp_path, 1_000, hosts_take=limits)
    assert words in refused.value.message
    assert "Nothing was sent" in refused.value.message
    assert ".gitignore" in refused.value.notes[-1]


def test_code_that_is_far_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(CliError, match="takes 5 GB when unpacked"):
        pack(tmp_path, MB, lambda done, total: pytest.fail("it was read"))


def test_a_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    (deep := tmp_path.joinpath(*["d"] * 64)).mkdir(parents=True)
    (deep / "file").touch()
    with pytest.raises(CliError, match=r"d/file is too long\. Nothing was sent"):
        pack(tmp_path, MB)


def test_packing_stops_where_the_limit_is_passed(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.bin").write_bytes(os.urandom(50_000))
    seen: list[tuple[int, int]] = []
    with pytest.raises(CliError):
        pack(tmp_path, 100_000, lambda done, total: seen.append((done, total)))
    assert all(total == 1_000_000 for _done, total in seen)
    assert seen[-1][0] < 300_000


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    with pytest.raises(CliError, match=r"can't read .*/b: No such file"):
        pack(tmp_path, MB, lambda done, total: (tmp_path / "b").unlink(missing_ok=True))


def test_a_directory_without_files_makes_an_archive_that_unpacks_to_nothing(tmp_path: Path) -> None:
    packed = pack(tmp_path, MB)
    assert (packed.files, names(packed)) == (0, [])
