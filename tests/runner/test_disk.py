"""What a job's files take of the disk, and what follows when it is too much."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstackweb.runner import disk
from dstackweb.runner.disk import DiskWatch, Room, TooDeep, used
from tests.runner.api import Api
from tests.runner.conftest import Box

MIB = 1 << 20


def write(path: Path, mib: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(MIB) * mib)
    return path


def mib_of(*folders: Path) -> int:
    return used([str(folder) for folder in folders]).size // MIB


def test_what_is_on_the_disk_counts_once_and_nothing_outside(tmp_path: Path) -> None:
    run, tmp = tmp_path / "run", tmp_path / "run.tmp"
    first = write(run / "a" / "b" / "first", 2)
    os.link(first, run / "again")
    write(tmp_path / "elsewhere" / "large", 8)
    (run / "link").symlink_to(tmp_path / "elsewhere")
    with (run / "sparse").open("wb") as file:
        file.truncate(1 << 34)
    assert mib_of(run, tmp) == 2, "a folder may be missing"
    write(tmp / "third", 3)
    assert mib_of(run, tmp) == 5


def test_a_deleted_file_counts_until_it_is_closed(tmp_path: Path) -> None:
    with write(tmp_path / "hidden", 2).open("rb") as held:
        (tmp_path / "hidden").unlink()
        assert used([str(tmp_path)]).size < MIB
        assert used([str(tmp_path)], [os.getpid()]).size >= 2 * MIB, held


def test_folders_too_deep_to_be_looked_at_are_no_place_to_hide(tmp_path: Path) -> None:
    here, at = os.getcwd(), tmp_path
    try:
        for _ in range(disk.DEPTH + 2):
            os.chdir(at)
            os.mkdir("d")
            at = Path("d")
    finally:
        os.chdir(here)
    with pytest.raises(TooDeep):
        used([str(tmp_path)])
    watch = DiskWatch(lambda: [str(tmp_path)], tuple, limit=MIB, reserve=None)
    assert watch.look(0.0) == {"used": None, "limit": MIB}


def test_no_folder_stays_open(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "c", 1)
    before = len(os.listdir("/proc/self/fd"))
    assert mib_of(tmp_path) == 1
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is free on the disk: MiB, and inodes of 1,000."""
    left = [100, 1000]
    monkeypatch.setattr(disk, "_room", lambda folder: Room(left[0] * MIB, left[1], 1000))
    return left


def test_who_goes_on_writing_where_too_little_is_free_ends(tmp_path: Path, free: list[int]) -> None:
    """And not who has many files there, or writes little."""
    write(tmp_path / "before", 20)
    watch = DiskWatch(lambda: [str(tmp_path)], tuple, limit=None, reserve=64 * MIB)
    assert watch.look(0.0) is None
    free[0] = 60
    assert watch.look(1.0) is None
    write(tmp_path / "little", 3)
    assert watch.look(100.0) is None
    write(tmp_path / "more", 3)
    assert watch.look(200.0) == {"free": 60 * MIB, "reserve": 64 * MIB}
    free[0] = 70
    assert watch.look(300.0) is None


def touch(folder: Path, files: int) -> None:
    for number in range(files):
        (folder / f"{number}-of-{files}").touch()


def test_who_goes_on_making_files_where_too_few_inodes_are_free_ends(tmp_path: Path, free: list[int]) -> None:
    """And not who has many files there, makes few, or writes into the ones that it has."""
    touch(tmp_path, 300)
    watch = DiskWatch(lambda: [str(tmp_path)], tuple, limit=None, reserve=64 * MIB, inode_reserve=10)
    assert watch.look(0.0) is None
    free[1] = 90
    assert watch.look(1.0) is None
    touch(tmp_path, 5)
    write(tmp_path / "0-of-5", 8)
    assert watch.look(100.0) is None
    touch(tmp_path, 6)
    assert watch.look(200.0) == {"free_inodes": 90, "inode_reserve": 100}
    free[1] = 100
    assert watch.look(300.0) is None


def test_who_has_taken_a_quarter_of_all_inodes_ends_once_there_are_none(tmp_path: Path, free: list[int]) -> None:
    """They may go between two looks, before there are too few."""
    watch = DiskWatch(lambda: [str(tmp_path)], tuple, limit=None, reserve=None, inode_reserve=5)
    touch(tmp_path, 240)
    free[1] = 0
    assert watch.look(0.0) is None
    touch(tmp_path, 2)
    assert watch.look(100.0) is None
    (tmp_path / "more").mkdir()
    touch(tmp_path / "more", 7)
    free[1] = 1
    assert watch.look(200.0) == {"free_inodes": 1, "inode_reserve": 50}, "or takes more then"
    watch = DiskWatch(lambda: [str(tmp_path)], tuple, limit=None, reserve=None, inode_reserve=5)
    free[1] = 0
    assert watch.look(300.0) == {"free_inodes": 0, "inode_reserve": 50}


def test_a_file_system_that_makes_inodes_at_need_has_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_room", lambda folder: Room(100 * MIB, 0, 0))
    watch = DiskWatch(lambda: [str(tmp_path)], tuple, limit=None, reserve=64 * MIB, inode_reserve=5)
    touch(tmp_path, 100)
    assert watch.look(0.0) is None


@pytest.mark.parametrize(
    ("others", "commands"),
    [
        (0, "seq 3000 | xargs touch 2> /dev/null || sleep 60"),
        (1880, "i=0; while :; do i=$((i+1)); touch f$i 2> /dev/null; sleep 0.01; done"),
    ],
    ids=["alone and at once", "beside others, one by one"],
)
@pytest.mark.needs("root")
def test_a_job_that_uses_up_the_inodes_of_its_disk_ends_with_out_of_disk(
    small_disk: Callable[[int], Path], others: int, commands: str
) -> None:
    place = small_disk(2000)
    touch(place, others)
    job = Box(place, Api(f"touch kept; {commands}", inode_reserve=5))
    job.launch()
    end: dict[str, Any] = job.end()
    job.api.go_down()
    assert end["reason"] == "out_of_disk"
    assert end["disk"]["inode_reserve"] == 100 > end["disk"]["free_inodes"]
    assert (job.run_dir / "kept").exists()


def test_a_job_over_its_limit_ends_with_out_of_disk(box: Callable[..., Box]) -> None:
    job = box("head -c 20000000 /dev/zero > large; sync; while :; do sleep 0.05; done", disk_limit=10 * MIB)
    job.launch()
    end: dict[str, Any] = job.end()
    assert end["reason"] == "out_of_disk"
    assert end["disk"]["limit"] == 10 * MIB < end["disk"]["used"]
    assert (job.run_dir / "large").exists(), "files are kept"


def test_a_job_within_its_limit_is_left_alone(box: Callable[..., Box]) -> None:
    job = box("head -c 2000000 /dev/zero > small; sleep 0.6", disk_limit=10 * MIB, disk_reserve=1)
    job.launch()
    assert job.end()["reason"] == "done_by_runner"
