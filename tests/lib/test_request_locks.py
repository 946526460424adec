"""The longest wait of requests for locks: in each session, or where a PgBouncer drops it, in each transaction."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from django.db import connections

from dstackweb.lib import request_locks
from dstackweb.lib.postgresql.base import DatabaseWrapper


def limited(**options: Any) -> dict[str, Any]:
    """The tests' database as requests have it; an option that is None is left out."""
    database = copy.deepcopy(connections["default"].settings_dict)
    database["OPTIONS"] = {name: value for name, value in (database["OPTIONS"] | options).items() if value is not None}
    request_locks.limit(database)
    return database


@pytest.mark.postgres
@pytest.mark.both_sides
@pytest.mark.django_db
@pytest.mark.parametrize("is_pooled", [False, True])
def test_a_transaction_of_a_request_waits_five_seconds_for_a_lock(is_pooled: bool) -> None:
    database = limited(options=None if is_pooled else "-c statement_timeout=60000")
    connection = DatabaseWrapper(database, "of-requests")
    try:
        connection.set_autocommit(False)
        with connection.cursor() as cursor:
            cursor.execute("SHOW lock_timeout")
            assert cursor.fetchone() == ("5s",)
        connection.rollback()
        connection.set_autocommit(True)
        with connection.cursor() as cursor:
            cursor.execute("SHOW lock_timeout")
            assert cursor.fetchone() == ("0" if is_pooled else "5s",), "a PgBouncer's session is not changed"
    finally:
        connection.close()


def test_sqlite_waits_five_seconds_too() -> None:
    database: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "OPTIONS": {"timeout": 30}}
    request_locks.limit(database)
    assert database["OPTIONS"] == {"timeout": request_locks.WAIT_S}
