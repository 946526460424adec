"""Which programs may use a database at the same time, while a deployment is upgraded (docs/operations.md#upgrade).

One process at a time migrates. The database's row `SchemaVersion` names its schema, and the oldest program that works
with it: an older one refuses to start, and one that is running takes no more work. Without a row nothing is refused.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from django.db import DatabaseError, Error, InterfaceError, OperationalError, connection
from django.utils import timezone

import dstackweb
from dstackweb.lib.commands import server_command
from dstackweb.lib.models import SchemaVersion
from dstackweb.lib.process import try_lock, wait_for_lock

log = logging.getLogger(__name__)

VERSION = 1
"""The schema of this program's migrations. A release with a new migration raises it by one."""
COMPATIBLE = 1
"""The oldest VERSION whose programs work with that schema. A release that removes something raises it, to the first
VERSION whose programs do without."""

CHECK_EVERY_S = 5.0
NOTICE_S = 10.0
"""How long older programs have to notice that they must stop, before a migration that they don't work with."""
LOCK = int.from_bytes(b"dstackwb", "big")
"""The number of PostgreSQL's advisory lock."""

_thread = threading.local()
_checked_at = float("-inf")
_refusal = ""


class Refused(Exception):
    """This program and the database don't fit each other; the message says what to do."""


def too_old(row: SchemaVersion | None, version: int) -> str:
    """Why a program of schema `version` must not use the database; empty if it may."""
    if row is None or version >= row.compatible:
        return ""
    upgrade = f"has upgraded it to schema {row.version}, for programs of schema {row.compatible} and newer"
    if row.version < row.compatible:
        upgrade = f"began to upgrade it to schema {row.compatible}, and has not finished"
    return (
        f"this program (dstackweb {dstackweb.__version__}, schema {version}) is too old for the database: dstackweb "
        f"{row.release} {upgrade}. Upgrade this program to {row.release} and start it again"
    )


def too_new(row: SchemaVersion | None, version: int) -> str:
    """Why a program of schema `version` must wait for migrations; empty if it need not."""
    if row is None or version <= row.version:
        return ""
    return (
        f"the database has schema {row.version}, and this program (dstackweb {dstackweb.__version__}) needs schema "
        f"{version}. Upgrade it first: `{server_command('up')}` does that, or `{server_command('migrate')}`"
    )


def require() -> None:
    """Raise Refused unless this program may start. A database that can't be read refuses nothing."""
    try:
        row = _row()
    except (DatabaseError, InterfaceError):
        return
    finally:
        if not connection.in_atomic_block:
            connection.close()  # the program may fork
    if why := too_old(row, VERSION) or too_new(row, VERSION):
        raise Refused(why)


def refusal() -> str:
    """Why this process must take no more work; empty while it may. Asks the database every CHECK_EVERY_S.

    While the database doesn't answer, the last answer counts.
    """
    global _checked_at, _refusal
    now = time.monotonic()
    if now - _checked_at < CHECK_EVERY_S:
        return _refusal
    _checked_at = now
    try:
        if not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()
        why = too_old(_row(), VERSION)
    except (DatabaseError, InterfaceError):
        if not connection.in_atomic_block:
            connection.close()
        return _refusal
    if why and not _refusal:
        log.error("%s", why)
    _refusal = why
    return why


def watch(stop: Callable[[], object]) -> None:
    """Call `stop` once when this process must take no more work. For processes that don't fork."""

    def check() -> None:
        while not refusal():
            time.sleep(CHECK_EVERY_S)
        stop()

    threading.Thread(target=check, name="schema", daemon=True).start()


def _row() -> SchemaVersion | None:
    return SchemaVersion.objects.filter(pk=1).first()


def fence(say: Callable[[str], object], wait: Callable[[float], object] = time.sleep) -> None:
    """Before migrating: have programs stop that don't work with this one's schema, and wait until they have noticed.

    Raises Refused if this program is too old itself. Call with `alone` held.
    """
    if SchemaVersion._meta.db_table not in connection.introspection.table_names():
        return
    row = _row()
    if why := too_old(row, VERSION):
        raise Refused(why)
    if row is not None and row.compatible < COMPATIBLE:
        _write(row.version, COMPATIBLE)
        say(f"programs older than schema {COMPATIBLE} stop now; migrating in {NOTICE_S:.0f} s")
        wait(NOTICE_S)


def is_lost(error: Error) -> bool:
    """Whether a connection failed, and not a statement: PostgreSQL has stopped, restarts or can't be reached."""
    if connection.vendor != "postgresql" or not isinstance(error, OperationalError | InterfaceError):
        return False
    state = getattr(error.__cause__, "sqlstate", None)  # None: the connection broke before the server said anything
    return state is None or state.startswith(("08", "57P"))


def unfinished(error: DatabaseError) -> str:
    """What to do after a migration that failed."""
    first = str(error).strip().partition("\n")[0]
    return (
        f"the database could not be upgraded: {first}. Each migration was made completely or not at all, and no run is "
        "lost. Programs that don't work with the new schema stay stopped. Fix the cause and start again, or restore "
        "the backup that was made before the upgrade, with the release of that time"
    )


def record() -> None:
    """After migrating: store what the database works with. Call with `alone` held."""
    row = _row()
    if row is None or row.version < VERSION or row.compatible < COMPATIBLE:
        _write(VERSION, COMPATIBLE)


def _write(version: int, compatible: int) -> None:
    values = {"version": version, "compatible": compatible, "release": dstackweb.__version__, "at": timezone.now()}
    SchemaVersion.objects.update_or_create(pk=1, defaults=values)


def say_on_stderr(line: str) -> None:
    sys.stderr.write(f"dstackweb: {line}\n")
    sys.stderr.flush()


@contextmanager
def alone(say: Callable[[str], object]) -> Iterator[None]:
    """Only one process at a time sets up or migrates a database: others wait, and `say` that once.

    May be nested.
    """
    if getattr(_thread, "is_alone", False):
        yield
        return
    with (_postgres_lock if connection.vendor == "postgresql" else _file_lock)(
        lambda: say("another process is setting up this database; waiting for it")
    ):
        _thread.is_alone = True
        try:
            yield
        finally:
            _thread.is_alone = False


@contextmanager
def _postgres_lock(waiting: Callable[[], object]) -> Iterator[None]:
    """A lock of a transaction on a connection of its own, which also works through PgBouncer."""
    other = connection.copy()
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
            cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [LOCK])
            if not cursor.fetchone()[0]:
                waiting()
                cursor.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
        yield
    finally:
        other.close()


@contextmanager
def _file_lock(waiting: Callable[[], object]) -> Iterator[None]:
    path = Path(f"{connection.settings_dict['NAME']}.setup-lock")
    if (lock := try_lock(path)) is None:
        waiting()
        lock = wait_for_lock(path)
    with lock:
        yield
