"""What tests of real processes share: waiting, ports, and the environment of a deployment of their own."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import hypothesis

from tests import databases
from tests.servers import free_port

__all__ = ["REPO", "deployment_env", "eventually", "examples", "free_port", "make"]

T = TypeVar("T")
REPO = Path(__file__).resolve().parent.parent
_redis_numbers = itertools.count()


def eventually(fn: Callable[[], T | None], deadline: float = 60, every: float = 0.05) -> T:
    """What `fn` returns, as soon as that is true; asked again `every` seconds, for `deadline` seconds.

    An exception counts as not yet. After the deadline the last one is raised, or AssertionError with the last value.
    """
    ends = time.monotonic() + deadline
    while True:
        error: Exception | None = None
        value: T | None = None
        try:
            value = fn()
            if value:
                return value
        except Exception as raised:
            error = raised
        if time.monotonic() >= ends:
            if error is not None:
                raise error
            raise AssertionError(f"still {value!r} after {deadline} s")
        time.sleep(every)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """In a thread of its own: in that of the tests there is a loop already once a browser was used."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def is_nightly() -> bool:
    """Whether this is the nightly suite, which has time to look at more."""
    return os.environ.get("DSTACKWEB_TEST_NIGHTLY") == "1"


def examples(most: int, quick: int = 25) -> hypothesis.settings:
    """`@examples(300)`: so many examples in the nightly suite; others take 25 at most, new ones in each run."""
    return hypothesis.settings(max_examples=most if is_nightly() else min(most, quick))


def make(*words: str) -> list[str]:
    """The command, with the environment of these tests, in which it installs nothing anew."""
    venv = os.path.relpath(sys.prefix, REPO)  # the way to the repository may have blanks, which make can't take
    stamps = [f"--old-file={venv}/.{name}" for name in ("server", "dev", "ray")]
    return ["make", "--no-print-directory", f"VENV={venv}", *stamps, *words]


def deployment_env(home: Path, *, migrated: bool = True, **more: str) -> dict[str, str]:
    """The environment of a deployment apart from the test's own database, on the side under test.

    Its database has all tables, and no rows; without `migrated` it is as before a first start. `home` must be a folder
    that other users may enter, when jobs run.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DSTACKWEB_", "PYTEST_"))}
    env |= {
        "DJANGO_SETTINGS_MODULE": "dstackweb.settings",
        "DSTACKWEB_HOME": str(home),
        "DSTACKWEB_PORT": str(free_port()),
        "DSTACKWEB_GATEWAY_PORT": "0",  # tests of dev environments set it
        "PYTHONPATH": str(REPO),
        "DSTACKWEB_JOB_WRITABLE": tempfile.gettempdir(),  # where tests look for what jobs write
    }
    in_tests = "DSTACKWEB_TEST_HOME" in os.environ  # benchmarks run without the tests' settings
    if in_tests:
        env["DSTACKWEB_STATIC_ROOT"] = f"{os.environ['DSTACKWEB_HOME']}/static"  # collected once
    if "DATABASE_URL" in os.environ:
        name = databases.fresh_name()
        env["DATABASE_URL"] = databases.url_of(
            databases.copy_to(name) if migrated and in_tests else databases.create(name)
        )
        # 512 numbers: tests' own caches have the first 64, deployments of one test process 32 of the others in turn.
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
        number = 64 + worker % 14 * 32 + next(_redis_numbers) % 32
        env["REDIS_URL"] = os.environ["REDIS_URL"].rsplit("/", 1)[0] + f"/{number}"
        _empty_redis(env["REDIS_URL"])
    elif migrated and in_tests and not (home / "db.sqlite3").exists():
        databases.copy_to(str(home / "db.sqlite3"))
    return env | more


def _empty_redis(url: str) -> None:
    import redis

    with redis.from_url(url) as client:
        client.flushdb()
