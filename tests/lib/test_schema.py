"""One process at a time sets up a database, and programs that don't fit it refuse."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import pytest
from django.core.management import call_command
from django.db import connection
from django.utils import timezone

from dstackweb.lib import schema
from dstackweb.lib.models import SchemaVersion
from dstackweb.lib.process import REFUSED
from tests.support import REPO, eventually


@pytest.fixture(autouse=True)
def asks_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test has heard is forgotten, before and after."""
    monkeypatch.setattr(schema, "_checked_at", float("-inf"))
    monkeypatch.setattr(schema, "_refusal", "")


def row(version: int, compatible: int) -> SchemaVersion:
    values = {"version": version, "compatible": compatible, "release": "9.1.0", "at": timezone.now()}
    return SchemaVersion.objects.update_or_create(pk=1, defaults=values)[0]


def declares(monkeypatch: pytest.MonkeyPatch, version: int, compatible: int) -> None:
    monkeypatch.setattr(schema, "VERSION", version)
    monkeypatch.setattr(schema, "COMPATIBLE", compatible)


@pytest.mark.parametrize(
    ("program", "version", "compatible", "old", "new"),
    [(3, 3, 2, False, False), (2, 3, 2, False, False), (1, 3, 2, True, False), (4, 3, 2, False, True)],
)
def test_a_program_fits_from_the_oldest_compatible_schema_to_the_present_one(
    program: int, version: int, compatible: int, old: bool, new: bool
) -> None:
    stored = SchemaVersion(version=version, compatible=compatible, release="9.1.0")
    assert bool(schema.too_old(stored, program)) == old
    assert bool(schema.too_new(stored, program)) == new


def test_a_database_without_a_row_refuses_nothing() -> None:
    assert schema.too_old(None, 1) == schema.too_new(None, 1) == ""


@pytest.mark.django_db
def test_a_program_that_is_too_old_gets_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    declares(monkeypatch, 1, 1)
    row(3, 2)
    with pytest.raises(schema.Refused, match=r"schema 1\) is too old for the database: dstackweb 9\.1\.0 has upgraded"):
        schema.require()


@pytest.mark.django_db
def test_a_program_that_is_too_new_gets_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    declares(monkeypatch, 4, 2)
    row(3, 2)
    with pytest.raises(schema.Refused, match=r"needs schema 4\. Upgrade it first: `make run`"):
        schema.require()


@pytest.mark.django_db
def test_a_running_program_checks_the_schema_once_per_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(schema.time, "monotonic", lambda: now[0])
    declares(monkeypatch, 1, 1)
    row(1, 1)
    assert schema.refusal() == ""
    row(2, 2)
    assert schema.refusal() == ""
    now[0] += schema.CHECK_EVERY_S
    assert "too old" in schema.refusal()


@pytest.mark.django_db
def test_older_programs_have_time_to_notice_before_a_migration_that_they_do_not_work_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declares(monkeypatch, 3, 2)
    row(2, 1)
    then: list[tuple[int, int]] = []

    def wait(seconds: float) -> None:
        assert seconds > schema.CHECK_EVERY_S
        then.extend(SchemaVersion.objects.values_list("version", "compatible"))

    said: list[str] = []
    schema.fence(said.append, wait)
    assert then == [(2, 2)]
    assert said == ["programs older than schema 2 stop now; migrating in 10 s"]
    schema.record()
    assert SchemaVersion.objects.values_list("version", "compatible").get() == (3, 2)


@pytest.mark.django_db
def test_a_compatible_upgrade_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    declares(monkeypatch, 3, 1)
    row(2, 1)
    schema.fence(pytest.fail, pytest.fail)
    schema.record()
    assert SchemaVersion.objects.values_list("version", "compatible").get() == (3, 1)


@pytest.mark.django_db
def test_an_older_program_that_still_fits_leaves_the_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    declares(monkeypatch, 2, 1)
    row(3, 2)
    schema.fence(pytest.fail, pytest.fail)
    schema.record()
    assert SchemaVersion.objects.values_list("version", "compatible").get() == (3, 2)


@pytest.mark.django_db
def test_migrate_refuses_on_a_database_for_newer_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declares(monkeypatch, 1, 1)
    row(3, 2)
    with pytest.raises(SystemExit) as ended:
        call_command("migrate", verbosity=0)
    assert ended.value.code == REFUSED
    assert "too old for the database" in capsys.readouterr().err


@pytest.mark.django_db(transaction=True)
def test_only_one_process_sets_up_a_database_at_a_time_and_the_next_is_refused() -> None:
    order: list[str] = []
    said: list[str] = []

    def second() -> None:
        with schema.alone(said.append):
            order.append("second")
        connection.close()

    thread = threading.Thread(target=second)
    with schema.alone(pytest.fail), schema.alone(pytest.fail):
        thread.start()
        eventually(lambda: said)
        assert not order
    thread.join(10)
    assert order == ["second"]
    assert said == ["another process is setting up this database; waiting for it"]


@pytest.mark.nightly
@pytest.mark.parametrize("command", ["qcluster", "ticker"])
def test_a_worker_command_refuses_an_incompatible_schema_in_one_line(deployment: dict[str, str], command: str) -> None:
    older = (
        "from dstackweb.lib.models import SchemaVersion; from django.utils import timezone; "
        "SchemaVersion.objects.update_or_create(pk=1, "
        "defaults=dict(version=9, compatible=8, release='9.1.0', at=timezone.now()))"
    )
    subprocess.run([sys.executable, "manage.py", "shell", "-c", older], cwd=REPO, env=deployment, check=True)
    asked = subprocess.run(
        [sys.executable, "manage.py", command], cwd=REPO, env=deployment, capture_output=True, text=True, timeout=60
    )
    assert asked.returncode == REFUSED
    assert re.fullmatch(r"dstackweb: this program \(.*\) is too old for the database: .*\n", asked.stderr)
