"""What a process leaves for its parent to report."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dstackweb.tracking import spool as module
from dstackweb.tracking.client import Entry
from dstackweb.tracking.spool import Spool, resend_orphans, spool_folder


def found(folder: Path, sent: bool = True) -> dict[str, list[Entry]]:
    got: dict[str, list[Entry]] = {}

    def send(name: str, entries: list[Entry]) -> bool:
        got[name] = entries
        return sent

    resend_orphans(folder, send)
    return got


def test_only_spools_of_dead_processes_are_collected(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    dead, alive = Spool(folder, "dead"), Spool(folder, "alive")
    dead.write("events", "a-1", ("processing", 1, None, None, None, ""))
    dead.rotate()
    dead.clear_sent()
    dead.write("events", "a-1", ("memory", 2, None, None, 0.5, "\udc80"))
    dead.rotate()
    dead.write("counts", ("a", "b"), ({"memory": 3}, 3, 0, 0.0))
    dead.close()
    alive.write("events", "a-2", ("processing", 1, None, None, None, ""))
    entries = [
        ("counts", ("a", "b"), ({"memory": 3}, 3, 0, 0.0)),
        ("events", "a-1", ("memory", 2, None, None, 0.5, "\udc80")),
    ]
    assert {name: sorted(each) for name, each in found(folder, sent=False).items()} == {"dead": entries}
    assert set(found(folder)) == {"dead"}  # that time it arrived
    assert found(folder) == {}
    alive.remove()
    alive.close()
    assert found(folder) == {}
    assert not folder.exists()


def test_an_entry_that_is_half_written_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    spool = Spool(folder, "dead")
    spool.write("events", "a-1", ("memory", 1, None, None, None, ""))
    spool.close()
    with (folder / "dead.0").open("ab") as file:
        file.write(b"\0\0\0\x30\xa9\x03")
    assert [key for _kind, key, _values in found(folder)["dead"]] == ["a-1"]


def test_a_damaged_file_does_not_block_others(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    for name in ("a", "b"):
        spool = Spool(folder, name)
        spool.write("events", f"{name}-1", ("memory", 1, None, None, None, ""))
        spool.close()
    with (folder / "a.0").open("ab") as file:
        file.write(b"\0\0\0\x03???" + b"\0\0\0\x01N")
    assert [[key for _kind, key, _values in each] for each in found(folder).values()] == [["a-1"], ["b-1"]]


def test_an_entry_that_a_full_disk_cuts_is_left_out_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "left"
    spool = Spool(folder, "dead")
    spool.write("events", "a-1", ("memory", 1, None, None, None, ""))
    with monkeypatch.context() as full:
        write = os.write
        full.setattr(os, "write", lambda file, data: write(file, data[:7]))
        spool.write("events", "a-2", ("memory", 2, None, None, None, ""))
    spool.write("events", "a-3", ("memory", 3, None, None, None, ""))
    spool.close()
    assert [key for _kind, key, _values in found(folder)["dead"]] == ["a-1", "a-3"]


def test_a_system_without_file_locks_has_no_journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fcntl", None)
    monkeypatch.delattr(os, "getuid")
    with pytest.raises(OSError, match="no file locks"):
        Spool(tmp_path / "left", "one")
    assert found(tmp_path / "left") == {}


def test_a_journal_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIZE_MAX", 100)
    spool = Spool(tmp_path / "left", "slow")
    for number in range(10):
        spool.write("events", f"a-{number}", ("memory", number, None, None, None, ""))
    assert (tmp_path / "left" / "slow.0").stat().st_size <= 100
    spool.close()


def test_a_folder_that_others_may_write_to_is_not_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    Spool(folder, "dead").close()
    folder.chmod(0o777)
    assert found(folder) == {}
    with pytest.raises(PermissionError):
        Spool(folder, "other")
    link = tmp_path / "link"
    folder.chmod(0o700)
    link.symlink_to(folder)
    assert found(link) == {}


def test_where_nothing_was_left_nothing_is_sent(tmp_path: Path) -> None:
    assert found(tmp_path / "nowhere") == {}


def test_programs_with_other_tokens_have_other_folders() -> None:
    assert spool_folder(os.getpid(), "one") != spool_folder(os.getpid(), "other")
