"""Reading by SQL of one's own, alike on both databases.

For what programs ask many times a second: the ORM takes longer to write such a statement than a database to answer it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Sequence
from typing import Any
from uuid import UUID

from django.db import connection


def rows(statement: str, parameters: Sequence[int | str]) -> list[Sequence[Any]]:
    """What a SELECT finds. Times are in UTC; of JSON it is the text, and of a UUID what `uid` reads."""
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        found: list[Sequence[Any]] = cursor.fetchall()
    if connection.vendor == "sqlite":
        return [[utc(value) if type(value) is dt.datetime else value for value in row] for row in found]
    return found


def places(values: Collection[object]) -> str:
    """What stands for so many values, as in `IN (…)`."""
    return ", ".join(["%s"] * len(values))


def utc(time: dt.datetime) -> dt.datetime:
    """A stored time. SQLite leaves out the zone, which is UTC."""
    return time if time.tzinfo else time.replace(tzinfo=dt.UTC)


def uid(stored: UUID | str) -> str:
    """A stored UUID as it is told. SQLite keeps its hexadecimal digits."""
    return str(stored if isinstance(stored, UUID) else UUID(stored))
