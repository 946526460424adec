"""What a backup needs, and what a restore refuses; `tests/faults/test_restore.py` restores a whole deployment."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

import psycopg
import pytest
from django.conf import settings
from django.db import connection
from django.utils import timezone

from dstackweb.accounts.models import Session
from dstackweb.scheduler.processes import backup
from tests import databases
from tests.factories import make_user
from tests.server import Server
from tests.support import REPO


@pytest.mark.both_sides
@pytest.mark.postgres  # SQLite needs none
@pytest.mark.django_db
def test_programs_that_are_missing_or_older_than_the_server_are_named_with_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SHOW server_version_num")
        server = int(cursor.fetchone()[0]) // 10000
    monkeypatch.setenv("PATH", str(tmp_path))
    package = rf"Nothing was changed.*postgresql-client-{server}\)"
    with pytest.raises(backup.BackupFailed, match=f"pg_dump was not found on PATH.*{package}"):
        backup.write(tmp_path / "backup.tar")
    (tmp_path / "pg_dump").write_text("#!/bin/sh\necho 'pg_dump (PostgreSQL) 9.6.24 (Debian 9.6.24-1)'\n")
    (tmp_path / "pg_dump").chmod(0o755)
    with pytest.raises(backup.BackupFailed, match=rf"pg_dump \(PostgreSQL\) 9.6.24.*older.*{server}.*{package}"):
        backup.write(tmp_path / "backup.tar")
    assert [path.name for path in tmp_path.iterdir()] == ["pg_dump"]


def test_a_file_that_is_not_a_backup_is_refused(tmp_path: Path) -> None:
    for name, content in (("text", b"hello" * 500), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(backup.BackupFailed, match="can't be read"):
            backup.restore(tmp_path / name)
    with tarfile.open(tmp_path / "tar", "w") as tar:
        tar.add(tmp_path / "text", "text")
    with pytest.raises(backup.BackupFailed, match="not a backup of dstackweb"):
        backup.restore(tmp_path / "tar")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A deployment with the key `old`."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "secret_key").write_text("old")
    monkeypatch.setattr(settings, "DSTACKWEB_HOME", folder)
    monkeypatch.setattr(settings, "DSTACKWEB_SECRET_KEY", "")
    return folder


def test_a_damaged_backup_leaves_the_secret_key(home: Path, tmp_path: Path) -> None:
    manifest = {"format": backup.FORMAT, "release": "0.1", "database": connection.vendor, "key": "another"}
    with tarfile.open(tmp_path / "tar", "w") as tar:
        for name, text in (("manifest.json", json.dumps(manifest)), ("database", "no rows"), ("secret_key", "new")):
            backup._add_text(tar, name, text)
    with pytest.raises(backup.BackupFailed, match="Nothing was changed"):
        backup.restore(tmp_path / "tar", replace=True)
    assert {path.name: path.read_text() for path in home.iterdir()} == {"secret_key": "old"}


def test_keys_are_replaced_by_those_of_the_backup_and_set_aside(home: Path, tmp_path: Path) -> None:
    (tmp_path / "secret_key").write_text("new")
    backup._put_keys_in_place(tmp_path)
    (aside,) = home.glob("secret_key.before-restore-*")
    assert ((home / "secret_key").read_text(), aside.read_text()) == ("new", "old")
    backup._put_keys_in_place(tmp_path)
    assert len(list(home.iterdir())) == 2


def test_a_path_out_of_the_home_is_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "evil").write_text("x")
    with tarfile.open(tmp_path / "tar", "w") as tar:
        for name in ("../out", "joblogs/../../out", "/out", "other/file", "joblogs/ok"):
            info = tar.gettarinfo(tmp_path / "evil")
            info.name = name
            with open(tmp_path / "evil", "rb") as file:
                tar.addfile(info, file)
    staged = tmp_path / "staged"
    staged.mkdir()
    with tarfile.open(tmp_path / "tar") as tar:
        backup._unpack(tar, staged)
    assert [path.relative_to(staged) for path in staged.rglob("*") if path.is_file()] == [Path("joblogs/ok")]


def test_an_entry_that_claims_more_bytes_than_the_backup_has_is_not_unpacked(tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    staged.mkdir()
    with tarfile.open(tmp_path / "tar", "w", format=tarfile.PAX_FORMAT) as tar:
        backup._add_text(tar, "joblogs/ok", "text")
        twin = tarfile.TarInfo("joblogs/twin")
        twin.type, twin.linkname = tarfile.LNKTYPE, "joblogs/ok"
        holes = tarfile.TarInfo("joblogs/holes")
        holes.pax_headers = {"GNU.sparse.map": "1000000,0", "GNU.sparse.size": str(1 << 40)}
        for member in (twin, holes, tarfile.TarInfo(".")):
            tar.addfile(member)
    with tarfile.open(tmp_path / "tar") as tar:
        backup._unpack(tar, staged)
    assert [path.name for path in staged.rglob("*")] == ["joblogs", "ok"]


def test_a_backup_of_nested_headers_is_refused(tmp_path: Path) -> None:
    """Python's tarfile takes a call for each."""
    extends = tarfile.TarInfo("x")
    extends.type = tarfile.XHDTYPE
    (tmp_path / "tar").write_bytes(extends.tobuf(tarfile.USTAR_FORMAT) * 3000 + bytes(1024))
    with pytest.raises(backup.BackupFailed, match="can't be read"):
        backup.restore(tmp_path / "tar")


def test_a_log_that_is_longer_here_stays(tmp_path: Path) -> None:
    home, staged = tmp_path / "home", tmp_path / "staged"
    for folder, name, text in (
        (home, "longer", "abcdef"), (staged, "longer", "abc"), (home, "shorter", "a"), (staged, "shorter", "abc"),
        (staged, "missing", "abc"),
    ):  # fmt: skip
        (folder / "joblogs").mkdir(parents=True, exist_ok=True)
        (folder / "joblogs" / name).write_text(text)
    assert backup._put_back(staged, home, "joblogs") == 2
    assert {path.name: path.read_text() for path in (home / "joblogs").iterdir()} == {
        "longer": "abcdef", "shorter": "abc", "missing": "abc",
    }  # fmt: skip


@pytest.mark.both_sides
@pytest.mark.django_db(transaction=True)
def test_a_backup_has_no_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{databases.programs()}:{os.environ['PATH']}")
    Session.objects.create(session_key="left-out", session_data="also-left-out", expire_date=timezone.now())
    make_user("copied")
    target = tmp_path / "database"
    backup._dump(target)
    if connection.vendor == "sqlite":
        copy = target.read_bytes()
    else:
        copy = subprocess.run(["pg_restore", "--file=-", str(target)], capture_output=True, check=True).stdout
    assert b"copied" in copy
    assert b"left-out" not in copy
    assert Session.objects.exists()


@pytest.mark.nightly
@pytest.mark.both_sides
def test_a_database_is_restored_on_sqlite_and_postgresql(open_home: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "backup.tar")
    server = Server(open_home)
    server.env["PATH"] = f"{databases.programs()}:{server.env['PATH']}"
    server.sql("INSERT INTO lib_sequence (name, value) VALUES ('kept', 1)")
    server.sql("INSERT INTO accounts_session VALUES ('left-out', '', '2030-01-01', NULL)")
    made = server.manage("backup", file)
    assert made.returncode == 0, made.stderr
    server.sql("DELETE FROM lib_sequence")
    # As a newer release would have made it.
    server.sql("CREATE TABLE newer (session_key varchar(40) REFERENCES accounts_session (session_key))")
    assert "--replace" in server.manage("restore", file).stderr
    if "DATABASE_URL" in server.env:
        with server._database():
            assert "other connections" in server.manage("restore", file, "--replace").stderr
    done = server.manage("restore", file, "--replace")
    assert done.returncode == 0, done.stderr
    again = server.manage("backup", str(tmp_path / "again.tar"))
    assert again.returncode == 0, again.stderr
    run = partial(subprocess.run, cwd=REPO, env=server.env, capture_output=True, check=True)
    piped = run([sys.executable, "manage.py", "backup", "-"])
    assert b"logs and archives" in piped.stderr
    run([sys.executable, "manage.py", "restore", "--replace", "-"], input=piped.stdout)
    assert not [path for path in open_home.iterdir() if path.name.startswith((".backup-", ".restore-"))]
    with server._database() as database:
        assert database.execute("SELECT count(*) FROM lib_sequence WHERE name = 'kept'").fetchone() == (1,)
        assert database.execute("SELECT count(*) FROM accounts_session").fetchone() == (0,)
        with pytest.raises((sqlite3.Error, psycopg.Error)):
            database.execute("SELECT * FROM newer")
    server.sql("DROP TABLE scheduler_restoredhost")  # as a release had it that could not ask hosts
    old = str(tmp_path / "old.tar")
    assert server.manage("backup", old).returncode == 0
    done = server.manage("restore", old, "--replace")
    assert done.returncode == 0, done.stderr
    assert "The backup is of an older release" in done.stdout
