"""A server starts while PostgreSQL restarts: it waits, whatever it was doing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.core.management.commands import migrate
from django.db import OperationalError, connection
from django.utils import timezone

from dstackweb.lib import schema
from dstackweb.lib.process import REFUSED
from dstackweb.scheduler.management.commands import up
from tests.factories import make_host
from tests.servers import free_port

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]


def end_connections() -> None:
    """As a PostgreSQL does that stops."""
    at = {key: connection.settings_dict[key.upper()] for key in ("host", "port", "user", "password")}
    with psycopg.connect(dbname=connection.settings_dict["NAME"], **at) as admin:
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        admin.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}".encode())


def before_first(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Lose all connections at the first call of this function."""
    plain, faults = getattr(owner, name), iter([end_connections])

    def faulty(*args: Any, **kwargs: Any) -> Any:
        next(faults, lambda: None)()
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, faulty)


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing listens where the database is, until this is undone."""
    with monkeypatch.context() as away:
        away.setitem(connection.settings_dict, "PORT", str(free_port()))
        connection.close()
        yield away
        away.undo()
        connection.close()


@pytest.mark.parametrize(("owner", "name"), [(schema, "fence"), (migrate.Command, "handle"), (up, "bootstrap")])
def test_connections_that_are_lost_during_the_set_up_are_made_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], owner: Any, name: str
) -> None:
    before_first(monkeypatch, owner, name)
    waits: list[float] = []
    assert up.prepare(wait=waits.append).username == "admin"
    assert waits == [up.RETRY_S]
    said = capsys.readouterr().err
    assert said.startswith("dstackweb: the database is away, will retry: ")
    assert said.count("\n") == 1


def test_migrate_by_itself_does_not_advise_a_restore_where_a_connection_was_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before_first(monkeypatch, migrate.Command, "handle")
    with pytest.raises(OperationalError) as lost:
        call_command("migrate", verbosity=0)
    connection.close()
    assert schema.is_lost(lost.value)
    assert capsys.readouterr().err == ""


def test_a_migration_that_fails_by_itself_refuses_as_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_args: Any, **_options: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT * FROM no_such_table")

    monkeypatch.setattr(migrate.Command, "handle", fails)
    with pytest.raises(SystemExit) as refused:
        up.prepare(wait=pytest.fail)
    assert refused.value.code == REFUSED
    assert "the database could not be upgraded" in capsys.readouterr().err


def test_a_database_that_can_not_be_reached_at_a_start_is_named_at_once(unreachable: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="dstackweb: cannot use the database: "):
        up.prepare(wait=pytest.fail)


def test_a_server_that_is_reloaded_waits_for_the_database(
    unreachable: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries: list[float] = []

    def wait(seconds: float) -> None:
        tries.append(seconds)
        if len(tries) == 3:
            unreachable.undo()

    assert up.prepare(has_served=True, wait=wait).username == "admin"
    assert len(tries) == 3
    assert capsys.readouterr().err.count("will retry") == 1


def test_a_process_whose_readiness_can_not_be_read_is_not_ready_yet(tmp_path: Path) -> None:
    ready = {spec.name: spec.ready for spec in up.server_processes(tmp_path, 0)}["host"]
    assert ready is not None
    make_host(up.settings.DSTACKWEB_HOST_NAME, seen_at=timezone.now())
    end_connections()
    assert not ready(1)
    assert ready(1)
