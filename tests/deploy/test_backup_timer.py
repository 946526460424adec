"""The nightly backup, started as its unit starts it: what it writes and removes, and what a failed one leaves."""

from __future__ import annotations

import os
import shlex
import sqlite3
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from tests.deploy.test_service_files import service
from tests.support import REPO, deployment_env

UNIT = REPO / "deploy" / "systemd" / "dstackweb-backup.service"
TIMER = UNIT.with_suffix(".timer")


@pytest.mark.needs("systemd")
def test_systemd_understands_the_timer_and_catches_up_on_a_night_that_the_machine_was_off(tmp_path: Path) -> None:
    for path in (UNIT, TIMER):
        text = path.read_text().replace(service(UNIT)["ExecStart"].split()[0], "/bin/true")
        (tmp_path / path.name).write_text(text)
    argv = ["systemd-analyze", "verify", str(tmp_path / TIMER.name), str(tmp_path / UNIT.name)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert not [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    assert {"OnCalendar=*-*-* 03:00", "Persistent=true", "WantedBy=timers.target"} < set(TIMER.read_text().splitlines())


@pytest.mark.slow
def test_a_nightly_backup_keeps_the_newest_and_a_failed_one_changes_no_file(open_home: Path, tmp_path: Path) -> None:
    unit, folder = service(UNIT), tmp_path / "backups"
    assert unit["Type"] == "oneshot", "systemd waits for its end, and never starts two at once"
    program, *argv, target = shlex.split(unit["ExecStart"])
    assert target == f"/var/lib/{unit['StateDirectory']}"
    argv = [str(Path(sys.executable).with_name(Path(program).name)), *argv, str(folder)]
    if os.getuid() == 0:  # as the unit has it: without the rights of root to files of others
        assert unit["CapabilityBoundingSet"] == ""
        argv = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *argv]
    env = deployment_env(open_home)

    folder.mkdir()
    nights = [f"dstackweb-202601{day:02}T030000Z.tar" for day in range(1, 16)]
    # By hand, of a clock that was wrong, being written by another process, someone's, and left by a killed process.
    others = [
        "dstackweb.tar", "dstackweb-20260101.tar", "dstackweb-29990101T030000Z.tar",
        ".dstackweb-backup-now", ".dstackweb-backup-notes", ".dstackweb-backup-old",
    ]  # fmt: skip
    for name in nights + others[:3]:
        (folder / name).write_text("an older backup")
    for name in others[3:]:
        (folder / name).mkdir()
        (folder / name / ("notes.txt" if "notes" in name else "tar")).write_text("half of one")
    long_ago = time.time() - 86_400
    for name in others[4:]:
        for path in (*(folder / name).iterdir(), folder / name):
            os.utime(path, (long_ago, long_ago))

    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in folder.iterdir()}
    (made,) = names - {*nights, *others}
    assert names == {made, *nights[3:], *others[:5]}, "14 that are named by a time, and what else was there"
    assert f"{made}: database (sqlite)" in done.stdout
    assert (folder / made).stat().st_mode & 0o777 == 0o600
    with tarfile.open(folder / made) as tar:
        tar.extract("database", tmp_path)
    with sqlite3.connect(tmp_path / "database") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert database.execute("SELECT count(*) FROM django_migrations").fetchone()[0] > 0

    # A disk that is full after 200,000 bytes.
    failed = subprocess.run(["prlimit", "--fsize=200000", *argv], env=env, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "could not be written" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert {path.name for path in folder.iterdir()} == names


@pytest.mark.parametrize("keep", ["0", "3"])
def test_a_number_to_keep_without_a_folder_is_refused(keep: str, tmp_path: Path) -> None:
    target = tmp_path if keep == "0" else tmp_path / "backup.tar"
    with pytest.raises(CommandError, match="Nothing was written"):
        call_command("backup", str(target), "--keep", keep)
    assert list(tmp_path.iterdir()) == []
