"""What jobs leave behind is removed, however they have nested it."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from dstackweb.runner import jobs, sandbox
from dstackweb.runner.child import acting_as
from dstackweb.runner.disk import remove

as_root = pytest.mark.needs("root")


def nest(folder: Path, depth: int) -> None:
    """Folders in folders, deeper than any path reaches, each with a file."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=here))
        os.mkdir("below", dir_fd=here)
        below = os.open("below", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


@pytest.fixture
def run_dirs(tmp_path: Path) -> Iterator[list[Path]]:
    folders = [tmp_path / str(uuid4()) / "node-0" for _ in range(2)]
    for folder in folders:
        folder.mkdir(parents=True)
    yield folders
    subprocess.run(["rm", "-rf", *folders], check=True)  # pytest can't remove them either


def test_folders_nested_a_thousand_deep_do_not_stop_clean_up(run_dirs: list[Path], tmp_path: Path) -> None:
    nest(run_dirs[0], 1200)
    (run_dirs[1] / "results").write_text("results")
    runs = [folder.parent.name for folder in run_dirs]
    assert jobs.remove_runs(str(tmp_path), runs, float("inf")) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_jobs_own_tmp_is_removed_however_deep(run_dirs: list[Path]) -> None:
    os.mkdir(sandbox.tmp_of(str(run_dirs[0])))
    nest(Path(sandbox.tmp_of(str(run_dirs[0]))), 1200)
    sandbox.remove_tmp(str(run_dirs[0]))
    assert [entry.name for entry in run_dirs[0].parent.iterdir()] == ["node-0"]


def test_links_are_removed_and_what_they_lead_to_stays(run_dirs: list[Path], tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    (run_dirs[0] / "link").symlink_to(outside)
    (tmp_path / "folder").symlink_to(outside)
    assert remove(run_dirs[0])
    assert not remove(tmp_path / "folder")
    assert (outside / "kept").is_dir()
    assert remove(tmp_path / "nothing")


@as_root
def test_one_folder_that_cannot_be_removed_stops_nothing_else(run_dirs: list[Path]) -> None:
    [folder, _other], problems = run_dirs, list[str]()
    for name in ("a/mounted", "b/c"):
        (folder / name).mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", folder / "a/mounted"], check=True)
    try:
        (folder / "a/mounted/kept").touch()
        assert not remove(folder, problems.append)
        [mounted] = folder.rglob("kept")
        assert not (folder / "b").exists()
    finally:
        subprocess.run(["umount", folder / "a/mounted"], check=True)
    assert mounted == folder / "a/mounted/kept"
    assert len(problems) == 1
    assert remove(folder, problems.append)


@as_root
def test_a_user_removes_folders_of_its_own_whatever_their_modes(open_home: Path) -> None:
    nobody, home = pwd.getpwnam("nobody"), open_home / "theirs"
    home.mkdir()
    os.chown(home, nobody.pw_uid, nobody.pw_gid)
    with acting_as(nobody):
        folder = home / "folder"
        (folder / "closed/below/file").mkdir(parents=True)
        (folder / "closed/below").chmod(0o555)
        (folder / "closed").chmod(0)
        assert remove(folder)
