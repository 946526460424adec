"""What a process leaves for its parent to tell."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dstackweb.tracking import journal as module
from dstackweb.tracking.entries import Entry
from dstackweb.tracking.journal import Journal, folder_of, left


def found(folder: Path, told: bool = True) -> dict[str, list[Entry]]:
    got: dict[str, list[Entry]] = {}

    def tell(name: str, entries: list[Entry]) -> bool:
        got[name] = entries
        return told

    left(folder, tell)
    return got


def test_what_was_not_delivered_is_left_by_the_dead_only(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    dead, alive = Journal(folder, "dead"), Journal(folder, "alive")
    dead.write("events", "a-1", ("processing", 1, None, None, None, ""))
    dead.turn()
    dead.delivered()
    dead.write("events", "a-1", ("memory", 2, None, None, 0.5, "\udc80"))
    dead.turn()
    dead.write("counts", ("a", "b"), ({"memory": 3}, 3, 0, 0.0))
    dead.close()
    alive.write("events", "a-2", ("processing", 1, None, None, None, ""))
    entries = [
        ("counts", ("a", "b"), ({"memory": 3}, 3, 0, 0.0)),
        ("events", "a-1", ("memory", 2, None, None, 0.5, "\udc80")),
    ]
    assert {name: sorted(each) for name, each in found(folder, told=False).items()} == {"dead": entries}
    assert set(found(folder)) == {"dead"}  # that time it arrived
    assert found(folder) == {}
    alive.remove()
    alive.close()
    assert found(folder) == {}
    assert not folder.exists()


def test_an_entry_that_is_half_written_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    journal = Journal(folder, "dead")
    journal.write("events", "a-1", ("memory", 1, None, None, None, ""))
    journal.close()
    with (folder / "dead.0").open("ab") as file:
        file.write(b"\0\0\0\x30\xa9\x03")
    assert [key for _kind, key, _told in found(folder)["dead"]] == ["a-1"]


def test_a_damaged_file_keeps_nothing_else_from_being_told(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    for name in ("a", "b"):
        journal = Journal(folder, name)
        journal.write("events", f"{name}-1", ("memory", 1, None, None, None, ""))
        journal.close()
    with (folder / "a.0").open("ab") as file:
        file.write(b"\0\0\0\x03???" + b"\0\0\0\x01N")
    assert [[key for _kind, key, _told in each] for each in found(folder).values()] == [["a-1"], ["b-1"]]


def test_an_entry_that_a_full_disk_cuts_is_left_out_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "left"
    journal = Journal(folder, "dead")
    journal.write("events", "a-1", ("memory", 1, None, None, None, ""))
    with monkeypatch.context() as full:
        write = os.write
        full.setattr(os, "write", lambda file, data: write(file, data[:7]))
        journal.write("events", "a-2", ("memory", 2, None, None, None, ""))
    journal.write("events", "a-3", ("memory", 3, None, None, None, ""))
    journal.close()
    assert [key for _kind, key, _told in found(folder)["dead"]] == ["a-1", "a-3"]


def test_a_system_without_file_locks_has_no_journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fcntl", None)
    monkeypatch.delattr(os, "getuid")
    with pytest.raises(OSError, match="no file locks"):
        Journal(tmp_path / "left", "one")
    assert found(tmp_path / "left") == {}


def test_a_journal_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIZE_MAX", 100)
    journal = Journal(tmp_path / "left", "slow")
    for number in range(10):
        journal.write("events", f"a-{number}", ("memory", number, None, None, None, ""))
    assert (tmp_path / "left" / "slow.0").stat().st_size <= 100
    journal.close()


def test_a_folder_that_others_may_write_to_is_not_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    Journal(folder, "dead").close()
    folder.chmod(0o777)
    assert found(folder) == {}
    with pytest.raises(PermissionError):
        Journal(folder, "other")
    link = tmp_path / "link"
    folder.chmod(0o700)
    link.symlink_to(folder)
    assert found(link) == {}


def test_where_nothing_was_left_nothing_is_told(tmp_path: Path) -> None:
    assert found(tmp_path / "nowhere") == {}


def test_programs_with_other_tokens_have_other_folders() -> None:
    assert folder_of(os.getpid(), "one") != folder_of(os.getpid(), "other")
