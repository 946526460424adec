"""What benchmarks share: both databases, each in a process and a home of its own, and a table of what was measured."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests import servers

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("sqlite", "postgres")


def here() -> bool:
    """Whether this process is the one that measures, with a database of its own."""
    return "BENCH_SIDE" in os.environ


def on_each_side(arguments: list[str]) -> None:
    """Run this benchmark again on SQLite with the ORM broker, and on PostgreSQL (durable, as installed) with Redis.

    A first argument that names a side (`sqlite` or `postgres`) leaves the other out; `--help` prints what it measures.
    """
    program = sys.modules["__main__"]
    if {"-h", "--help"} & set(arguments):
        print(program.__doc__)
        return
    sides = (arguments.pop(0),) if arguments and arguments[0] in SIDES else SIDES
    print(f"{cpu()}, {os.cpu_count()} cores, Python {platform.python_version()}; load {os.getloadavg()[0]:.1f} at the "
          "start\n", flush=True)  # fmt: skip
    for side in sides:
        with tempfile.TemporaryDirectory(prefix="dw-bench-", dir="/tmp", ignore_cleanup_errors=True) as home:
            os.chmod(home, 0o755)  # noqa: S103  PostgreSQL runs as another user
            env = {name: value for name, value in os.environ.items() if not name.startswith("DSTACKWEB_")}
            env |= {"DSTACKWEB_HOME": f"{home}/home", "DJANGO_SETTINGS_MODULE": "dstackweb.settings",
                    "BENCH_SIDE": side}  # fmt: skip
            for name in ("DATABASE_URL", "REDIS_URL"):
                env.pop(name, None)
            if side == "postgres":
                env["DATABASE_URL"] = servers.postgres(Path(home, "postgres"), durable=True).url
                env["REDIS_URL"] = servers.redis(Path(home, "redis")).url
            assert program.__spec__ is not None, "start it as `python -m bench.NAME`"
            subprocess.run([sys.executable, "-m", program.__spec__.name, *arguments], cwd=ROOT, env=env, check=True)


def cpu() -> str:
    """The processor's name, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def database() -> str:
    """The database's name and version."""
    from django.db import connection

    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("SELECT 'SQLite ' || sqlite_version()")
        else:
            cursor.execute("SELECT 'PostgreSQL ' || current_setting('server_version')")
        return str(cursor.fetchone()[0])


def settle() -> None:
    """What autovacuum would have done by now."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE" if connection.vendor == "postgresql" else "PRAGMA wal_checkpoint(TRUNCATE)")


def timed(act: Callable[[], object]) -> float:
    """Milliseconds that `act` takes; those of this process's CPU time with BENCH_CPU=1, for a machine that is busy."""
    clock = time.process_time if os.environ.get("BENCH_CPU") else time.perf_counter
    began = clock()
    act()
    return (clock() - began) * 1000


def measured(prepare: Callable[[], Callable[[], object]], least: int) -> str:
    """A cell: what is prepared is timed `least` times, and on for 0.3 s or 50 times where it is short."""
    values: list[float] = []
    while len(values) < least or (sum(values) < 300 and len(values) < 50):
        values.append(timed(prepare()))
    return cell(values)


def cell(values: list[float]) -> str:
    """The median, and between the least and the most."""
    digits = 2 if max(values) < 1 else 1 if max(values) < 1000 else 0
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def table(heading: str, columns: list[str], rows: dict[str, list[str]]) -> None:
    """Print what was measured."""
    print(f"{heading:46}" + "".join(f"{column:>24}" for column in columns))
    for name, cells in rows.items():
        print(f"{name:46}" + "".join(f"{text:>24}" for text in cells))
    print(flush=True)


def must_be(found: object, wanted: object) -> None:
    """A benchmark of what does not work measures nothing."""
    assert found == wanted, f"{found} instead of {wanted}"
