"""Kept connections to PostgreSQL."""

from __future__ import annotations

import os

import psycopg
import pytest
from django.db import OperationalError, connection

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgres]


def _begin_request() -> None:
    """As Django does before a request's first statement."""
    connection.close_if_unusable_or_obsolete()


def _asks_another(statement: str, pid: int) -> object:
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as other:
        return other.execute(statement.encode(), [pid]).fetchone()


def _pid() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        found: int = cursor.fetchone()[0]
    return found


def test_a_connection_that_the_server_has_closed_is_replaced_before_the_next_request() -> None:
    gone = _pid()
    _asks_another("SELECT pg_terminate_backend(%s, 5000)", gone)
    with pytest.raises(OperationalError):  # within a request it is an error
        _pid()
    connection.close()
    gone = _pid()
    _asks_another("SELECT pg_terminate_backend(%s, 5000)", gone)
    _begin_request()
    assert _pid() != gone


def test_a_check_of_a_connection_sends_nothing() -> None:
    pid = _pid()
    _begin_request()
    assert connection.is_usable()
    assert _asks_another("SELECT query FROM pg_stat_activity WHERE pid = %s", pid) == ("SELECT pg_backend_pid()",)
    assert _pid() == pid
