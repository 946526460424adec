"""Sides, strictness and the few fixtures that all tests share."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from dstackweb.accounts.models import Project, User

# An example takes as long as a busy machine lets it: no test is about that.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

STRICT = os.environ.get("DSTACKWEB_TEST_STRICT") == "1"
ONE_SIDE = {"browser", "cli"}
"""Folders whose tests are of the browser or the command line: what these ask of SQL is tested in tests/web and api."""
DB_FIXTURES = {"db", "transactional_db", "django_db_reset_sequences", "admin_client", "live_server", "deployment"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever touches the database runs on both sides: `make test` selects it by this marker for the second."""
    here = Path(__file__).parent
    for item in items:
        if ONE_SIDE & set(item.path.relative_to(here).parts):
            continue
        if item.get_closest_marker("django_db") or DB_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("db_sides")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Caches, and what processes keep of them, outlive a rolled-back transaction."""
    if item.get_closest_marker("django_db") or {"db", "transactional_db"} & set(getattr(item, "fixturenames", ())):
        from django.core.cache import caches

        from dstackweb.offers import catalog, counts, sources, store

        for name in caches:
            caches[name].clear()
        for module in (catalog, counts, sources, store):
            module.forget()


def pytest_sessionfinish() -> None:
    """What tests counted belongs to databases that are gone."""
    if counts := sys.modules.get("dstackweb.offers.counts"):
        counts.forget()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under DSTACKWEB_TEST_STRICT=1 a skip is a failure: in CI everything a test needs is there."""
    report = yield
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
def project(db: None) -> Project:
    """The project `main` with its default queue."""
    from tests.factories import make_project

    return make_project("main")


@pytest.fixture
def member(project: Project) -> User:
    """ada, a member of `main`."""
    from tests.factories import join, make_user

    return join(project, make_user("ada"))
