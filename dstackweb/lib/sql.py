"""Helpers for raw SQL that works on both databases, and for work on many rows.

Raw SQL is for queries that programs make many times a second, where the ORM takes longer than the database.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from uuid import UUID

from django.db import DEFAULT_DB_ALIAS, DatabaseError, connection, connections, models, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

log = logging.getLogger(__name__)
T = TypeVar("T")
M = TypeVar("M", bound=models.Model)


@contextmanager
def snapshot() -> Iterator[None]:
    """A read-only transaction: all its reads see the same state, and it blocks no writer."""
    connection.ensure_connection()  # sets its transaction mode
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


def rows(statement: str, parameters: Sequence[int | str | UUID | dt.datetime]) -> list[Sequence[Any]]:
    """The rows of a SELECT. Times are in UTC; JSON columns are text, UUID columns are for `uid`."""
    here = connections[DEFAULT_DB_ALIAS]  # the thread's connection: `connection` looks it up again for each attribute
    stored = here.ops.adapt_datetimefield_value
    values = [stored(value) if isinstance(value, dt.datetime) else value for value in parameters]
    with here.cursor() as cursor:
        cursor.execute(statement, values)
        found: list[Sequence[Any]] = cursor.fetchall()
    if here.vendor == "sqlite":
        return [[utc(value) if type(value) is dt.datetime else value for value in row] for row in found]
    return found


class ModelColumns(Generic[M]):
    """All columns of a model's table, which a query calls `alias`: their SQL, and the instance that their values make.

    For statements with several models, which `raw()` does not read.
    """

    def __init__(self, model: type[M], alias: str) -> None:
        self._model = model
        fields = model._meta.concrete_fields
        self.sql = ", ".join(f"{alias}.{field.column}" for field in fields)
        self.number = len(fields)
        self._names = [field.attname for field in fields]
        here = connections[DEFAULT_DB_ALIAS]
        # The converters are of the thread's connection, but which columns have some depends on the database alone.
        self._converted = [(at, field) for at, field in enumerate(fields) if _converters(field, here)]

    def instance(self, values: Sequence[Any]) -> M | None:
        """The row as an instance; None where an outer join found no row."""
        found, here = list(values), connections[DEFAULT_DB_ALIAS]
        for at, field in self._converted:
            for convert in _converters(field, here):
                found[at] = convert(found[at], field.cached_col, here)
        instance = self._model.from_db(DEFAULT_DB_ALIAS, self._names, found)
        return None if instance.pk is None else instance


def _converters(field: models.Field[Any, Any], here: BaseDatabaseWrapper) -> list[Callable[[Any, Any, Any], Any]]:
    """What makes a value of Python of a field's stored one."""
    return [*here.ops.get_db_converters(field.cached_col), *field.get_db_converters(here)]


def shift(model: type[models.Model], key: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Change the row of this key, as in `update()`; where there is none yet, one with the model's defaults."""
    row = model._default_manager.filter(**key)
    if not row.update(**changes):
        # Another transaction may create it too: also with the defaults.
        model._default_manager.bulk_create([model(**key)], ignore_conflicts=True)
        row.update(**changes)


def write(rows: Iterable[models.Model], key: Sequence[str], fields: Sequence[str]) -> None:
    """Insert rows of one model; where there is one with the same `key`, replace its `fields` instead."""
    if found := list(rows):
        table = type(found[0])._default_manager
        table.bulk_create(found, update_conflicts=True, unique_fields=key, update_fields=fields)


def insert_from(model: type[models.Model], columns: Sequence[str], rows: models.QuerySet[Any]) -> None:
    """Insert what `rows`, a query of values in the order of `columns`, gives, by one statement."""
    statement, parameters = rows.query.sql_with_params()
    with connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO {model._meta.db_table} ({', '.join(columns)}) {statement}", parameters)


def places(values: Collection[object]) -> str:
    """Placeholders for the values, as in `IN (…)`."""
    return ", ".join(["%s"] * len(values))


def utc(time: dt.datetime) -> dt.datetime:
    """A stored time with its zone, UTC, which SQLite leaves out."""
    return time if time.tzinfo else time.replace(tzinfo=dt.UTC)


def uid(stored: UUID | str) -> str:
    """A stored UUID as text. SQLite stores its hexadecimal digits."""
    return str(stored if isinstance(stored, UUID) else UUID(stored))


def parsed_uid(text: str) -> UUID | None:
    """The UUID that the text writes; None for any other text."""
    try:
        return UUID(text)
    except ValueError:
        return None


def for_each(items: Iterable[T], act: Callable[[T], object]) -> None:
    """Act on every item even when one fails; the last error is raised at the end, one of the database at once."""
    failed: Exception | None = None
    for item in items:
        try:
            act(item)
        except DatabaseError:
            raise
        except Exception as error:
            log.exception("failed, continuing: %s", item)
            failed = error
    if failed is not None:
        raise failed
