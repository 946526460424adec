from __future__ import annotations

import io
import os
import pwd
import tarfile
from pathlib import Path

import pytest

from dstackweb.runner.archive import BadArchive, check, unpack, unpack_as
from dstackweb.runner.child import Account

SAME_USER = Account("me", "/", None)


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file


def member(name: str, data: bytes = b"", *, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644):  # type: ignore[no-untyped-def]  # fmt: skip
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info, data


def test_files_folders_and_inner_links_are_unpacked_with_their_modes(tmp_path: Path) -> None:
    file = packed(
        member("pkg", kind=tarfile.DIRTYPE, mode=0o755),
        member("pkg/run.sh", b"#!", mode=0o755),
        member("latest", kind=tarfile.SYMTYPE, link="pkg/run.sh"),
    )
    unpack(file, str(tmp_path))
    assert (tmp_path / "latest").read_bytes() == b"#!"
    assert (tmp_path / "pkg" / "run.sh").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    "bad",
    [
        member("../outside", b"x"),
        member("/outside/x", b"x"),
        member("link", kind=tarfile.SYMTYPE, link="/etc"),
        member("link", kind=tarfile.LNKTYPE, link="../../etc/passwd"),
        member("device", kind=tarfile.CHRTYPE),
    ],
)
def test_what_would_leave_the_folder_is_refused(tmp_path: Path, bad: tuple[tarfile.TarInfo, bytes]) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    with pytest.raises(BadArchive):
        unpack(packed(bad), str(inner))
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]


def test_what_an_attempt_put_in_a_files_place_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    outside, inner = tmp_path / "outside", tmp_path / "inner"
    outside.write_bytes(b"untouched")
    inner.mkdir()
    (inner / "link").symlink_to(outside)
    (inner / "read-only").write_bytes(b"old")
    (inner / "read-only").chmod(0o400)
    unpack(packed(member("link", b"new"), member("read-only", b"new")), str(inner))
    assert outside.read_bytes() == b"untouched"
    assert [(inner / name).read_bytes() for name in ("link", "read-only")] == [b"new", b"new"]


def test_a_linked_folder_leads_nowhere(tmp_path: Path) -> None:
    outside, inner = tmp_path / "outside", tmp_path / "inner"
    outside.mkdir()
    inner.mkdir()
    (inner / "data").symlink_to(outside)
    with pytest.raises(BadArchive, match="outside"):
        unpack(packed(member("data/file", b"x")), str(inner))
    assert list(outside.iterdir()) == []


def test_bytes_with_another_digest_are_refused() -> None:
    with pytest.raises(BadArchive, match="not the code that was uploaded"):
        check(io.BytesIO(b"other"), "0" * 64)


@pytest.mark.parametrize("raw", [b"", b"no archive", b"\x1f\x8b\x08broken"])
def test_what_is_no_archive_says_so(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a").write_bytes(raw)
    with (tmp_path / "a").open("rb") as file, pytest.raises(BadArchive, match="could not be unpacked"):
        unpack_as(SAME_USER, file, str(tmp_path))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_code_is_unpacked_with_the_rights_of_the_jobs_user_alone(place: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    switch = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": [nobody.pw_gid]}
    who = Account("nobody", "/", switch)
    mine, theirs = place / "mine", place / "theirs"
    mine.mkdir()
    theirs.mkdir()
    os.chown(theirs, nobody.pw_uid, nobody.pw_gid)
    (place / "archive").write_bytes(packed(member("code.py", b"print()")).getvalue())
    (place / "archive").chmod(0o600)
    with (place / "archive").open("rb") as file:
        unpack_as(who, file, str(theirs))
        with pytest.raises(BadArchive, match="Permission denied"):
            unpack_as(who, file, str(mine))
    assert (theirs / "code.py").stat().st_uid == nobody.pw_uid
