"""Read and write many rows by one statement, in the fastest way of each database.

Rows are tuples; the caller names their columns and PostgreSQL types. Values of jsonb columns are JSON texts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.db import connection

from dstackweb.lib import sql

Types = Mapping[str, str]
"""Columns and their PostgreSQL types."""

Query = tuple[str, list[Any]]
"""A statement and its parameters."""

_unsent: ContextVar[list[Query] | None] = ContextVar("unsent", default=None)


@contextmanager
def together() -> Iterator[None]:
    """Send what this block writes to PostgreSQL with its next `read`, or at the end of the block, as one message.

    While locks are held that others wait for, most of the time goes by between statements.
    """
    if _unsent.get() is not None:  # a part of the block around it
        yield
        return
    unsent: list[Query] = []
    token = _unsent.set(unsent)
    try:
        yield
    finally:
        _unsent.reset(token)
    if unsent:
        _send(unsent)


def write(statement: str, parameters: list[Any]) -> None:
    unsent = _unsent.get()
    if unsent is None or connection.vendor == "sqlite":
        _send([(statement, parameters)])
    else:
        unsent.append((statement, parameters))


def read(*queries: Query) -> list[list[tuple[Any, ...]]]:
    """The rows that each of these gives. PostgreSQL gets all of them as one message.

    Each sees what was committed before it began: one behind an UPDATE of a locked row also sees what the lock's last
    holder has written.
    """
    if connection.vendor == "sqlite":
        return [_send([query])[0] for query in queries]
    before = _unsent.get() or []
    sent = [*before, *queries]
    before.clear()
    return _send(sent)[-len(queries) :]


def _send(queries: Sequence[Query]) -> list[list[tuple[Any, ...]]]:
    found = []
    with connection.cursor() as cursor:
        cursor.execute("; ".join(text for text, _ in queries), [value for _, values in queries for value in values])
        for _query in queries:
            found.append(cursor.fetchall() if cursor.description else [])
            if len(queries) > 1:
                cursor.nextset()
    return found


def find(
    columns: str, table: str, where: str, types: Types, rows: Collection[tuple[Any, ...]], *more: int
) -> list[tuple[Any, ...]]:
    """Columns of `table` (alias t) for each of these rows (alias `given`) that match `where`, with parameters `more`.

    The statement does not depend on the number of rows. Each row is looked up by an index, whatever the table's
    statistics: the planner would scan a table that has grown since it was last analyzed.
    """
    return read(lookup(columns, table, where, types, rows, *more))[0] if rows else []


def lookup(columns: str, table: str, where: str, types: Types, rows: Collection[tuple[Any, ...]], *more: int) -> Query:
    """The query of `find`, for `read`; `rows` may not be empty."""
    if connection.vendor == "sqlite":
        values = ", ".join(f"json_extract(value, '$[{at}]') AS {name}" for at, name in enumerate(_quoted(types)))
        source = f"(SELECT {values} FROM json_each(%s)) AS given CROSS JOIN {table} t WHERE {where}"
        parameters = [json.dumps(list(rows))]
    else:
        source = f"{_given(types)} CROSS JOIN LATERAL (SELECT * FROM {table} t WHERE {where} OFFSET 0) t"
        parameters = _arrays(types, rows)
    return f"SELECT {columns} FROM {source}", [*parameters, *more]


def insert(table: str, types: Types, rows: Sequence[tuple[Any, ...]], *, ignore_conflicts: bool = False) -> None:
    """Insert rows with values in the order of `types`. With `ignore_conflicts`, rows that exist already stay."""
    if not rows:
        return
    names = ", ".join(_quoted(types))
    end = " ON CONFLICT DO NOTHING" if ignore_conflicts else ""
    if connection.vendor == "sqlite":
        _execute_each(f"INSERT INTO {table} ({names}) VALUES ({sql.places(types)}){end}", rows)
    else:
        write(f"INSERT INTO {table} ({names}) SELECT * FROM {_unnest(types)}{end}", _arrays(types, rows))


def update(table: str, types: Types, rows: Sequence[tuple[Any, ...]]) -> None:
    """Update rows by their id, which is the last value of each; `types` are the other columns.

    The condition that seems to select few ids makes PostgreSQL look up each row by its id. Otherwise it scans a table
    of tens of thousands of rows to update a thousand.
    """
    if not rows:
        return
    if connection.vendor == "sqlite":
        values = ", ".join(f"{name} = %s" for name in _quoted(types))
        _execute_each(f"UPDATE {table} SET {values} WHERE id = %s", rows)
    else:
        all_types = {**types, "id": "bigint"}
        values = ", ".join(f"{name} = given.{name}" for name in _quoted(types))
        source = f"{_given(all_types)} WHERE {table}.id = given.id AND given.id %% 1 = 0"
        write(f"UPDATE {table} SET {values} FROM {source}", _arrays(all_types, rows))


def delete(table: str, ids: Collection[int]) -> None:
    if not ids:
        return
    if connection.vendor == "sqlite":
        _execute_each(f"DELETE FROM {table} WHERE id = %s", [(pk,) for pk in ids])
    else:
        write(f"DELETE FROM {table} WHERE id = ANY(%s)", [list(ids)])


def _execute_each(statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
    with connection.cursor() as cursor:
        cursor.executemany(statement, rows)


def quoted(name: str) -> str:
    """A column name, quoted, as both databases take it: `group` is an SQL keyword."""
    return f'"{name}"'


def _quoted(types: Types) -> list[str]:
    return [quoted(name) for name in types]


def _given(types: Types) -> str:
    return f"{_unnest(types)} AS given({', '.join(_quoted(types))})"


def _unnest(types: Types) -> str:
    return f"unnest({', '.join(f'%s::{kind}[]' for kind in types.values())})"


def _arrays(types: Types, rows: Collection[tuple[Any, ...]]) -> list[str]:
    """The columns of rows as array literals. psycopg's list adaptation would take most of the time."""
    return [_array(kind, values) for kind, values in zip(types.values(), zip(*rows, strict=True), strict=True)]


def _array(kind: str, values: Collection[Any]) -> str:
    if kind in ("text", "jsonb"):
        return "{" + ",".join("NULL" if value is None else _text(value) for value in values) + "}"
    return "{" + ",".join(map(str, values)).replace("None", "NULL") + "}"


def _text(value: str) -> str:
    return '"' + value.replace("\\", r"\\").replace('"', r"\"") + '"'
