"""Sides, strictness and the few fixtures that all tests share.

There are two sides: SQLite with the cache and the broker in its tables, and PostgreSQL with Redis. All tests run on
SQLite; those marked `both_sides` on PostgreSQL too. These are whatever may differ there: each test of a room that
writes SQL of its own, locks rows, races or keeps something in the cache (`BOTH_SIDES`, where it touches the database),
and elsewhere the tests that carry the mark: races of accounts, processes that are killed, and one walk past every page
and every list of the API (`test_every_address.py`). Pages, API, command line and browser ask through these rooms, so
their own tests run once.

There are three suites: quick (`make test`), slow (`make test-slow`; CI runs both) and nightly (`make test-nightly`), by
the marks `slow` and `nightly`. Those in slow.txt were measured and found slow. The nightly one also takes more made-up
examples. On PostgreSQL, those of `LONG_STORIES` and slow ones are nightly.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from standins import programs

if TYPE_CHECKING:
    from dstackweb.accounts.models import Project, User

# An example takes as long as a busy machine lets it: no test is about that. The nightly suite looks at more of them.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=10, stateful_step_count=25)
hypothesis.settings.register_profile("full", deadline=None, max_examples=150)

os.environ["DSTACKWEB_LANGUAGE"] = "en"  # what tests read, whatever language the developer speaks

POSTGRES = os.environ.get("DSTACKWEB_TEST_SIDE") == "postgres"
STRICT = os.environ.get("DSTACKWEB_TEST_STRICT") == "1"
BOTH_SIDES = {"gpus", "lib", "offers", "progress", "runs", "scheduler"}
"""Rooms whose tests run on both sides where they touch the database: there SQL, locks, caches and queries are."""
OF_ALL = re.compile(r"^pytestmark = (\[\n(.*\n)*?\]|.*)", re.MULTILINE)
"""The marks of all tests of a file."""
QUICK = "not slow and not nightly and not gpu"
"""The suite that runs where neither a suite nor a path is asked for."""
SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().split())
"""Tests that took too long for the quick suite (`python -m tools.slow_tests`)."""
LONG_STORIES = ("gpus/policy", "scheduler/cloud", "scheduler/monitoring")
"""Rooms whose tests follow a run for hours, by statements that other rooms' tests run on both sides too."""


def pytest_configure(config: pytest.Config) -> None:
    """Examples by the suite, a database to copy, and a Ctrl-C that ends what tests start.

    The shell has it ignored for a process in its background.
    """
    from tests import databases
    from tests.support import is_nightly

    if not config.option.markexpr and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.option.markexpr = QUICK
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        config.add_cleanup(databases.begin().wait)
    hypothesis.settings.load_profile("full" if is_nightly() else "quick")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # While tests are collected: nothing of it is garbage, and looking takes a third of the time.


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests of a group stay together, and what was collected stays: no later search for garbage looks at it."""
    if getattr(session.config.option, "loadgroup", False):
        apart = [one.nodeid for one in session.items if one.get_closest_marker("xdist_group") and "@" not in one.nodeid]
        assert not apart, f"pytest-xdist does not group {apart[0]}"
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # hardly anything of a test is in a cycle
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether a file has nothing for the side and the suite that are asked for; None if it may have."""
    if not config.option.markexpr or not collection_path.name.startswith("test_"):
        return None
    room, text = collection_path.relative_to(Path(__file__).parent).parts[0], collection_path.read_text()
    other_side = "both_sides" in config.option.markexpr and room not in BOTH_SIDES and "both_sides" not in text
    marks = OF_ALL.search(text)
    unwanted = [mark for mark in ("slow", "nightly") if f"not {mark}" in config.option.markexpr]
    other_suite = marks is not None and any(f"pytest.mark.{mark}" in marks[0] for mark in unwanted)
    return True if other_side or other_suite else None


def _touches_database(item: pytest.Item, *more: str) -> bool:
    fixtures = {"db", "transactional_db", "live_server", *more}
    return bool(item.get_closest_marker("django_db") or fixtures & set(getattr(item, "fixturenames", ())))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is slow, what runs on both sides, and what the nightly suite runs again with more examples."""
    if not POSTGRES and (elsewhere := [item for item in items if item.get_closest_marker("postgres")]):
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item not in elsewhere]
    for item in items:
        path = item.path.relative_to(Path(__file__).parent)
        if not item.get_closest_marker("slow") and item.nodeid.partition("[")[0].partition("@")[0] in SLOW:
            item.add_marker("slow")
            item.add_marker("listed")
        if POSTGRES and (item.get_closest_marker("slow") or path.as_posix().startswith(LONG_STORIES)):
            item.add_marker("nightly")
        if path.parts[0] in BOTH_SIDES and _touches_database(item, "deployment"):
            item.add_marker("both_sides")
        if hasattr(getattr(item, "obj", None), "hypothesis"):
            item.add_marker("deeper")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """What failed has its own name, without the group that pytest-xdist adds: `--last-failed` looks for it."""
    name, at, group = report.nodeid.rpartition("@")
    if hasattr(report, "node") and at and "]" not in group:
        report.nodeid = name


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Caches, and what processes keep of them, outlive a rolled-back transaction."""
    if _touches_database(item):
        from django.core.cache import caches

        from dstackweb.backends import api_calls
        from dstackweb.offers import catalog, counts, refusals, sources, store
        from dstackweb.runs import stuck
        from dstackweb.web.gpus import alerts
        from dstackweb.web.queue import snapshot

        for name in caches:
            caches[name].clear()
        for module in (alerts, api_calls, catalog, counts, refusals, sources, store, snapshot, stuck):
            module.forget()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """What a test counted belongs to its database: a later test's request would write it, some seconds later."""
    for name in ("dstackweb.offers.counts", "dstackweb.backends.api_calls"):
        if counts := sys.modules.get(name):
            counts.forget()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `needs(…)` where a program that it names is missing."""
    for mark in item.iter_markers("needs"):
        programs.require(*mark.args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test whose programs are missing is skipped.

    Under DSTACKWEB_TEST_STRICT=1 a skip is a failure: in CI everything a test needs is there.
    """
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, programs.Missing):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, str(call.excinfo.value))
    if STRICT and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which DSTACKWEB_TEST_STRICT=1 forbids: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if STRICT and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, which DSTACKWEB_TEST_STRICT=1 forbids: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say once for each reason what could not run on this machine, and what would let it run."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if isinstance(report.longrepr, tuple)]
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"skipped {count}: {reason}", yellow=True)


@pytest.fixture(scope="session", autouse=True)
def _files_at_once() -> None:
    """As many as tests leave open: Django's test client closes a file once it is read."""
    from threading import BoundedSemaphore

    from dstackweb.lib import exports

    exports._places = BoundedSemaphore(10_000)


@pytest.fixture(scope="session")
def django_db_setup(django_test_environment: None, django_db_blocker: Any) -> Iterator[None]:
    """Each process of the tests has its copy of one migrated database, instead of migrating its own."""
    from django.db import connection
    from django.test import TransactionTestCase

    from tests import databases

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(TransactionTestCase, "_fixture_teardown", lambda _self: databases.empty())
    with django_db_blocker.unblock():
        connection.close()
        connection.settings_dict["NAME"] = databases.copy_to(connection.settings_dict["TEST"]["NAME"])
    yield
    monkeypatch.undo()
    with django_db_blocker.unblock():
        connection.close()


@pytest.fixture
def open_home() -> Iterator[Path]:
    """A folder for a deployment, which other users may enter (pytest's own `tmp_path` is closed to them)."""
    with tempfile.TemporaryDirectory(prefix="deployment-", dir=os.environ["DSTACKWEB_TEST_HOME"]) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def deployment(open_home: Path) -> dict[str, str]:
    """The environment of a deployment of its own on the side under test; see `support.deployment_env`."""
    from tests.support import deployment_env

    return deployment_env(open_home)


@pytest.fixture
def new_deployment(open_home: Path) -> dict[str, str]:
    """The same before its first start, with an empty database."""
    from tests.support import deployment_env

    return deployment_env(open_home, migrated=False)


@pytest.fixture
def project(db: None) -> Project:
    """The project `main` with its default queue."""
    from tests.factories import make_project

    return make_project("main")


@pytest.fixture
def member(project: Project) -> User:
    """ada, a member of `main`."""
    from tests.factories import join, make_user

    return join(project, make_user("ada"))


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The URL of an S3 server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """An empty bucket's URL, as of DSTACKWEB_STORAGE."""
    import boto3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    name = f"bucket-{abs(hash(request.node.nodeid))}"
    boto3.client("s3", endpoint_url=s3, region_name="us-east-1").create_bucket(Bucket=name)
    return f"s3://{name}/team?endpoint_url={s3}&region_name=us-east-1"
