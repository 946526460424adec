"""Reading and writing by SQL of one's own, alike on both databases.

For what programs ask many times a second: the ORM takes longer to write such a statement than a database to answer it.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from django.db import connection, transaction


@contextmanager
def snapshot() -> Iterator[None]:
    """A transaction that only reads: all of one moment, however long it takes, and nobody waits for it."""
    connection.ensure_connection()  # from then on it knows its mode
    of_sqlite: Any = connection if connection.vendor == "sqlite" else None
    mode = of_sqlite and of_sqlite.transaction_mode
    outermost = not connection.in_atomic_block
    if of_sqlite:
        of_sqlite.transaction_mode = "DEFERRED"
    try:
        with transaction.atomic():
            if outermost and not of_sqlite:
                with connection.cursor() as cursor:
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            yield
    finally:
        if of_sqlite:
            of_sqlite.transaction_mode = mode


def rows(statement: str, parameters: Sequence[int | str | UUID]) -> list[Sequence[Any]]:
    """What a SELECT finds. Times are in UTC; of JSON it is the text, and of a UUID what `uid` reads."""
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        found: list[Sequence[Any]] = cursor.fetchall()
    if connection.vendor == "sqlite":
        return [[utc(value) if type(value) is dt.datetime else value for value in row] for row in found]
    return found


def write(statement: str, given: Sequence[Mapping[str, Any]]) -> None:
    """Execute a statement about rows that `rows_of` names: one parameter, however many they are."""
    with connection.cursor() as cursor:
        cursor.execute(statement, [json.dumps(given)])


def rows_of(columns: Mapping[str, str]) -> str:
    """What stands in a FROM for rows given as JSON, called `given`: columns with PostgreSQL's types."""
    quoted = {name: connection.ops.quote_name(name) for name in columns}
    if connection.vendor == "sqlite":
        values = ", ".join(f"json_extract(value, '$.{name}') AS {quoted[name]}" for name in columns)
        return f"(SELECT {values} FROM json_each(%s)) AS given"
    typed = ", ".join(f"{quoted[name]} {kind}" for name, kind in columns.items())
    return f"jsonb_to_recordset(CAST(%s AS jsonb)) AS given({typed})"


def places(values: Collection[object]) -> str:
    """What stands for so many values, as in `IN (…)`."""
    return ", ".join(["%s"] * len(values))


def utc(time: dt.datetime) -> dt.datetime:
    """A stored time. SQLite leaves out the zone, which is UTC."""
    return time if time.tzinfo else time.replace(tzinfo=dt.UTC)


def uid(stored: UUID | str) -> str:
    """A stored UUID as it is told. SQLite keeps its hexadecimal digits."""
    return str(stored if isinstance(stored, UUID) else UUID(stored))
