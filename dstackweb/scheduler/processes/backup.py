"""A deployment in one file: database, logs, code, artifacts, and the fingerprint of the secret key; and back from it.

The file is a tar: `manifest.json`, then `database`, then `joblogs/…`, `archives/…` and `artifacts/…`. The database is
copied first, as of one moment, while all continues: what is written later is at most more than the database knows.
Sessions are left out: people sign in again after a restore.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import sqlite3
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from uuid import UUID

from django.conf import settings
from django.db import connection, connections
from django.utils import timezone

import dstackweb
from dstackweb.accounts.models import Session
from dstackweb.backends.hosts import local
from dstackweb.lib import ssh_keys
from dstackweb.lib.errors import Conflict, DomainError
from dstackweb.lib.storage import DiskStorage, storage
from dstackweb.runs.launch import read_ticket
from dstackweb.runs.models import Job, Run
from dstackweb.runs.sweeps.creation import uids_to_come
from dstackweb.scheduler import restored
from dstackweb.scheduler.models import RestoredHost

FORMAT = 1
MANIFEST, DATABASE, KEY = "manifest.json", "database", "secret_key"
KEYS = (KEY, ssh_keys.HOST_KEY, f"{ssh_keys.HOST_KEY}.pub")
"""In DSTACKWEB_HOME. The first is a setting too; the others are there once the gateway has run."""
FOLDERS = ("joblogs", "archives", "artifacts")
"""Of the storage, where it is a disk. A dump of the database has its rows; objects stay in their bucket."""


DRAFT = ".dstackweb-backup-"
"""The beginning of the folder in which a backup is written, beside its file."""
NAMED_BY_TIME = re.compile(r"dstackweb-\d{8}T\d{6}Z\.tar")
"""The files of `write_into`; it removes no others."""
ABANDONED_S = 6 * 3600
"""For so long nothing was written into a draft that a killed backup has left."""


class BackupFailed(DomainError):
    """Nothing was written, or nothing was changed."""


def fingerprint() -> str:
    """Names the secret key without giving it away."""
    return hashlib.sha256(b"dstackweb.backup:" + settings.SECRET_KEY.encode()).hexdigest()[:16]


def _root() -> Path | None:
    """The folder of the storage, if it is a disk."""
    place = storage()
    return place.root if isinstance(place, DiskStorage) else None


def write(target: Path, *, with_key: bool = False) -> dict[str, Any]:
    """Back up to a new file; returns its manifest. Raises BackupFailed."""
    if target.exists():
        raise BackupFailed(f"{target} exists. Nothing was written. Choose another name.")
    if Job._meta.db_table not in connection.introspection.table_names():
        raise BackupFailed(
            f"There is no deployment in {settings.DSTACKWEB_HOME}. Nothing was written. Set DSTACKWEB_HOME and "
            "DATABASE_URL as the server has them."
        )
    manifest = {
        "format": FORMAT,
        "release": dstackweb.__version__,
        "database": connection.vendor,
        "at": timezone.now().isoformat(timespec="seconds"),
        "key": fingerprint(),
        "with_key": with_key,
        "storage": settings.DSTACKWEB_STORAGE.partition("?")[0],
    }
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=DRAFT) as folder:
            copy = Path(folder) / DATABASE
            _dump(copy)
            draft = Path(folder) / "tar"
            private = os.open(draft, os.O_WRONLY | os.O_CREAT, 0o600)
            with open(private, "wb") as file, tarfile.open(None, "w|", file) as tar:
                _add_text(tar, MANIFEST, json.dumps(manifest, indent=2))
                tar.add(copy, DATABASE)
                if with_key:
                    _add_text(tar, KEY, settings.SECRET_KEY)
                    for name in KEYS[1:]:
                        if (key := settings.DSTACKWEB_HOME / name).exists():
                            _add_text(tar, name, key.read_text())
                root = _root()
                files = sum(_add_files(tar, root, name) for name in FOLDERS) if root else 0
                tar.close()
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, target)
            # The name too must outlast a crash: `write_into` removes older files next.
            listing = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(listing)
            os.close(listing)
    except (OSError, sqlite3.Error) as error:
        raise BackupFailed(f"{target} could not be written: {error}. No other file was changed.") from error
    return manifest | {"files": files, "bytes": target.stat().st_size}


def write_into(folder: Path, *, keep: int = 0, with_key: bool = False) -> tuple[Path, dict[str, Any], list[Path]]:
    """Back up to a file of this folder that is named by the time, and remove all but the newest `keep` (0: none).

    Returns the file, its manifest and what was removed. Raises BackupFailed, and then removes no backup.
    """
    for draft in folder.glob(f"{DRAFT}*"):
        with contextlib.suppress(OSError):
            files = list(draft.iterdir())
            newest = max(path.stat().st_mtime for path in (draft, *files))
            if {path.name for path in files} <= {DATABASE, "tar"} and time.time() - newest > ABANDONED_S:
                shutil.rmtree(draft)
    target = folder / f"dstackweb-{timezone.now():%Y%m%dT%H%M%SZ}.tar"
    manifest = write(target, with_key=with_key)
    # The new one stays, whatever times the names of others claim: the clock may have been wrong.
    older = sorted(path for path in folder.iterdir() if NAMED_BY_TIME.fullmatch(path.name) and path != target)
    removed = older[: max(0, len(older) + 1 - keep)] if keep else []
    for path in removed:
        path.unlink(missing_ok=True)
    return target, manifest, removed


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(text.encode()), 0o600
    tar.addfile(info, io.BytesIO(text.encode()))


def _add_files(tar: tarfile.TarFile, root: Path, name: str) -> int:
    """Add the files of a folder as long as they are now: a log may grow meanwhile, or be pruned."""
    number = 0
    for path in sorted((root / name).rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            with contextlib.suppress(FileNotFoundError):
                tar.add(path, str(path.relative_to(root)))
                number += 1
    return number


def _dump(target: Path) -> None:
    """A copy of the database as of one moment, without stopping anyone, and without what browsers are signed in by."""
    sessions = Session._meta.db_table
    if connection.vendor == "sqlite":
        source = sqlite3.connect(f"file:{settings.DATABASES['default']['NAME']}?mode=ro", uri=True)
        with contextlib.closing(source), contextlib.closing(sqlite3.connect(target)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA secure_delete = ON")  # their bytes too
            copy.execute(f"DELETE FROM {sessions}")
            copy.commit()
    else:
        program = _client_program("pg_dump")
        _postgres(
            program, "--no-password", "--format=custom", "--no-owner", "--no-acl", f"--exclude-table-data={sessions}",
            f"--file={target}",
        )  # fmt: skip


def _client_program(name: str) -> str:
    """Find one of PostgreSQL's programs, which must not be older than the server.

    Returns its path. Raises BackupFailed.
    """
    with connection.cursor() as cursor:
        cursor.execute("SHOW server_version_num")
        server = int(cursor.fetchone()[0]) // 10000
    install = (
        f"Nothing was changed. Install PostgreSQL's client programs of version {server} or newer (on Debian and "
        f"Ubuntu: postgresql-client-{server})."
    )
    path = shutil.which(name)
    if path is None:
        raise BackupFailed(f"{name} was not found on PATH. {install}")
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.strip()
    number = re.search(r"\) (\d+)", version)
    if number is not None and int(number[1]) < server:
        raise BackupFailed(f"{version} is older than the server, which is {server}. {install}")
    return path


def _postgres(program: str, *argv: str, output: IO[bytes] | None = None) -> None:
    """Run one of PostgreSQL's programs on the deployment's database. The password is not among its arguments."""
    name, database = Path(program).name, settings.DATABASES["default"]
    if database["DISABLE_SERVER_SIDE_CURSORS"]:
        raise BackupFailed(
            f"{name} does not work through PgBouncer. Nothing was changed. Run this with the DATABASE_URL of the "
            "database itself."
        )
    keys = {"PGHOST": "HOST", "PGPORT": "PORT", "PGUSER": "USER", "PGPASSWORD": "PASSWORD", "PGDATABASE": "NAME"}
    variables = {variable: str(database[key]) for variable, key in keys.items() if database.get(key)}
    options = {f"PG{key.upper()}": str(value) for key, value in database["OPTIONS"].items() if key.startswith("ssl")}
    env = {**os.environ, **variables, **options}
    done = subprocess.run([program, *argv], env=env, stdout=output or subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode:
        text = done.stderr.decode(errors="replace").strip()[-1000:]
        raise BackupFailed(f"{name} failed. Nothing was changed. It says: {text}")


def restore(source: Path, *, replace: bool = False) -> dict[str, Any]:
    """Restore a backup into this deployment, which must be stopped; returns its manifest, with what was done. With
    `replace` a database in use gives way; SQLite's is kept aside. Raises BackupFailed, Conflict."""
    with _opened(source) as tar:
        manifest = _manifest(tar)
        _refuse_other_kinds(manifest)
        if not replace and "accounts_user" in connection.introspection.table_names():
            raise Conflict("this deployment has a database already. Nothing was changed. To replace it: --replace")
        _refuse_others()
        with tempfile.TemporaryDirectory(dir=settings.DSTACKWEB_HOME, prefix=".restore-") as folder:
            staged = Path(folder)
            _unpack(tar, staged)
            _check_key(manifest, staged / KEY)
            aside = _load(staged / DATABASE)
            _put_keys_in_place(staged)
            root = _root()
            files = sum(_put_back(staged, root, name) for name in FOLDERS) if root else 0
    # The database of an older release has no table for it.
    asked = restored.begin() if RestoredHost._meta.db_table in connection.introspection.table_names() else None
    ended, alive = _end_unknown_jobs(but_for_known_runs=asked is not None)
    return manifest | {"files": files, "aside": aside, "ended": ended, "alive": alive, "asked": asked}


@contextlib.contextmanager
def _opened(source: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(source, "r:") as tar:
            yield tar
    except (OSError, tarfile.TarError, RecursionError) as error:
        raise BackupFailed(f"{source} can't be read: {error}") from error


def _manifest(tar: tarfile.TarFile) -> dict[str, Any]:
    try:
        file = tar.extractfile(MANIFEST)
        assert file is not None
        manifest: dict[str, Any] = json.load(file)
    except (KeyError, ValueError, AssertionError):
        raise BackupFailed("the file is not a backup of dstackweb. Nothing was changed.") from None
    return manifest


def _refuse_other_kinds(manifest: dict[str, Any]) -> None:
    if manifest["format"] != FORMAT:
        raise BackupFailed(f"the backup is of dstackweb {manifest['release']}: restore it with that release.")
    if manifest["database"] != connection.vendor:
        raise BackupFailed(
            f"the backup is of {manifest['database']}, and DATABASE_URL is of {connection.vendor}. Nothing was changed."
        )


def _refuse_others() -> None:
    """PostgreSQL knows who else uses the database: its processes must be stopped, on all machines."""
    if connection.vendor == "sqlite":
        return
    with connection.cursor() as cursor:
        others = "datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        cursor.execute(f"SELECT count(*) FROM pg_stat_activity WHERE {others}")
        number = cursor.fetchone()[0]
    if number:
        raise Conflict(
            f"the database has {number} other connections. Nothing was changed. Stop web, workers and hosts first."
        )


def _unpack(tar: tarfile.TarFile, staged: Path) -> None:
    """The files of the backup, and nothing else that a tar may have, such as sparse files, which may claim any size."""
    for member in tar:
        parts = Path(member.name).parts
        wanted = member.name in (DATABASE, *KEYS) or parts[:1] in [(folder,) for folder in FOLDERS]
        is_plain = member.isreg() and not member.issparse() and ".." not in parts
        file = tar.extractfile(member) if wanted and is_plain else None
        if file is None:
            continue
        place = staged.joinpath(*parts)
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
            shutil.copyfileobj(file, copy)


def _check_key(manifest: dict[str, Any], key: Path) -> None:
    """This deployment's secret key must be the backup's, or the backup must have it."""
    if manifest["key"] == fingerprint():
        return
    if not key.exists() or settings.DSTACKWEB_SECRET_KEY:
        where = "DSTACKWEB_SECRET_KEY" if settings.DSTACKWEB_SECRET_KEY else "DSTACKWEB_HOME/secret_key"
        raise BackupFailed(
            f"the backup was made with another secret key (fingerprint {manifest['key']}, here {fingerprint()}). "
            f"Nothing was changed. Put the key of that time into {where}: without it stored secrets can't be read, and "
            "running jobs can't report."
        )


def _put_keys_in_place(staged: Path) -> None:
    """Use the keys of the backup, if it has them; others here are kept aside: what they encrypted may be kept too."""
    for name in KEYS:
        key, place = staged / name, settings.DSTACKWEB_HOME / name
        if not key.exists() or (name == KEY and settings.DSTACKWEB_SECRET_KEY):
            continue
        if place.exists() and place.read_bytes() != key.read_bytes():
            os.replace(place, _aside(place))
        os.replace(key, place)


def _aside(place: Path) -> Path:
    return place.with_name(f"{place.name}.before-restore-{timezone.now():%Y%m%dT%H%M%S}")


def _load(dump: Path) -> str:
    """Put the database in place; returns where the one before is, if it was kept."""
    if connection.vendor != "sqlite":
        _load_into_postgres(dump)
        return ""
    connections.close_all()
    if not _is_whole(dump):
        raise BackupFailed("the backup's database is damaged. Nothing was changed.")
    place = Path(settings.DATABASES["default"]["NAME"])
    aside = _aside(place)
    kept = place.exists() and place.stat().st_size > 0
    for end in ("", "-wal", "-shm"):
        if (part := place.with_name(place.name + end)).exists():
            os.replace(part, aside.with_name(aside.name + end))
    dump.chmod(0o600)
    os.replace(dump, place)
    return str(aside) if kept else ""


def _is_whole(dump: Path) -> bool:
    with contextlib.closing(sqlite3.connect(dump)) as copy:
        try:
            return bool(copy.execute("PRAGMA integrity_check").fetchone() == ("ok",))
        except sqlite3.DatabaseError:
            return False


def _load_into_postgres(dump: Path) -> None:
    """In one transaction: drop all tables, also those that a newer release has added, and make those of the backup."""
    pg_restore, psql = _client_program("pg_restore"), _client_program("psql")
    quote = connection.ops.quote_name
    drops = [f"DROP TABLE {quote(name)} CASCADE;\n" for name in connection.introspection.table_names()]
    connections.close_all()
    script = dump.with_name("restore.sql")
    with open(script, "wb") as file:
        file.write("".join(drops).encode())
        file.flush()
        _postgres(pg_restore, "--no-owner", "--no-acl", "--file=-", str(dump), output=file)
    _postgres(
        psql, "--no-password", "--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1",
        f"--file={script}",
    )  # fmt: skip


def _put_back(staged: Path, root: Path, name: str) -> int:
    """Put files back that are missing, or shorter here: a log only grows, and an archive never changes."""
    number = 0
    for path in (staged / name).rglob("*"):
        place = root / path.relative_to(staged)
        if path.is_file() and not (place.exists() and place.stat().st_size >= path.stat().st_size):
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, place)
            number += 1
    return number


def _end_unknown_jobs(*, but_for_known_runs: bool) -> tuple[int, int]:
    """End jobs that run here and that the restored database does not know. Returns how many ended, and how many not.

    `but_for_known_runs`: those of its runs are taken back once the server is there (`scheduler.restored`).
    """
    running = [job_id for job_id in local.jobs_here() if local.runner_alive(job_id)]
    known = set(Job.objects.filter(pk__in=running).values_list("pk", flat=True))
    if but_for_known_runs:
        tickets = list(filter(None, (read_ticket(held["ticket"]) for held in local.here().tickets())))
        runs = set(Run.objects.filter(uid__in={one["run"] for one in tickets}).values_list("uid", flat=True))
        runs.update(uids_to_come())
        known |= {UUID(one["job"]) for one in tickets if UUID(one["run"]) in runs}
    ends = [local.kill_job(job_id) for job_id in running if job_id not in known]
    return sum(ends), len(ends) - sum(ends)
