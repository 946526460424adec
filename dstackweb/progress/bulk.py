"""Reading and writing many rows by one statement, each database in its fastest way: arrays, or one row after the other.

Rows are tuples whose columns and PostgreSQL types the caller names once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from django.db import connection

Types = Mapping[str, str]
"""Columns, with what PostgreSQL calls their types."""


def find(statement: str, types: Types, rows: Collection[tuple[Any, ...]], *more: int) -> list[tuple[Any, ...]]:
    """What a SELECT finds that has `{given}` in its FROM: these rows, as a table. `more` are its other parameters.

    However many rows there are, the statement stays the same. Write the joins as CROSS JOIN with their conditions in
    the WHERE: SQLite, which knows nothing of how many rows are given, then reads them first, and the rest by index.
    """
    if connection.vendor == "sqlite":
        values = ", ".join(f"json_extract(value, '$[{at}]') AS {name}" for at, name in enumerate(_quoted(types)))
        table, parameters = f"(SELECT {values} FROM json_each(%s)) AS given", [json.dumps(list(rows))]
    else:
        table, parameters = f"{_unnest(types)} AS given({', '.join(_quoted(types))})", _arrays(types, rows)
    with connection.cursor() as cursor:
        cursor.execute(statement.format(given=table), [*parameters, *more])
        found: list[tuple[Any, ...]] = cursor.fetchall()
    return found


def insert(table: str, types: Types, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows whose values come in the order of `types`."""
    if not rows:
        return
    names = ", ".join(_quoted(types))
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.executemany(f"INSERT INTO {table} ({names}) VALUES ({_marks(types)})", rows)
        else:
            cursor.execute(f"INSERT INTO {table} ({names}) SELECT * FROM {_unnest(types)}", _arrays(types, rows))


def update(table: str, types: Types, rows: Sequence[tuple[Any, ...]]) -> None:
    """Write rows by their id, which is the last value of each; `types` are those of the others."""
    if not rows:
        return
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            values = ", ".join(f"{name} = %s" for name in _quoted(types))
            cursor.executemany(f"UPDATE {table} SET {values} WHERE id = %s", rows)
        else:
            all_types = {**types, "id": "bigint"}
            values = ", ".join(f"{name} = given.{name}" for name in _quoted(types))
            given = f"{_unnest(all_types)} AS given({', '.join(_quoted(all_types))})"
            cursor.execute(
                f"UPDATE {table} SET {values} FROM {given} WHERE {table}.id = given.id", _arrays(all_types, rows)
            )


def delete(table: str, ids: Collection[int]) -> None:
    """Delete rows by their ids."""
    if not ids:
        return
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.executemany(f"DELETE FROM {table} WHERE id = %s", [(pk,) for pk in ids])
        else:
            cursor.execute(f"DELETE FROM {table} WHERE id = ANY(%s)", [list(ids)])


def quoted(name: str) -> str:
    """A column's name as it stands in a statement: `group` is a word of SQL, too."""
    return connection.ops.quote_name(name)


def _quoted(types: Types) -> list[str]:
    return [quoted(name) for name in types]


def _marks(types: Types) -> str:
    return ", ".join(["%s"] * len(types))


def _unnest(types: Types) -> str:
    return f"unnest({', '.join(f'%s::{kind}[]' for kind in types.values())})"


def _arrays(types: Types, rows: Collection[tuple[Any, ...]]) -> list[str]:
    """The columns of rows as PostgreSQL reads them. psycopg's own lists take longer than all else here."""
    columns = zip(*rows, strict=True) if rows else [()] * len(types)
    return [_array(kind, values) for kind, values in zip(types.values(), columns, strict=True)]


def _array(kind: str, values: Collection[Any]) -> str:
    if kind == "text":
        quoted = [value.replace("\\", r"\\").replace('"', r"\"") for value in values]
        return '{"' + '","'.join(quoted) + '"}' if quoted else "{}"
    return "{" + ",".join(map(str, values)).replace("None", "NULL") + "}"
