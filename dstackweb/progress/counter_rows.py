"""How counters are stored: their columns, their rows in memory, and the queries that lock and read them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dstackweb.lib import bulk
from dstackweb.progress.models import Scope
from dstackweb.progress.states import LIVE, TaskState

GROUP_COLUMNS = {
    **{state.value: "bigint" for state in TaskState}, "total": "bigint", "duration_n": "bigint", "duration_s": "float8",
    "duration_ewma_s": "float8", "version": "bigint", "changed_ms": "bigint",
}  # fmt: skip
RATE_COLUMNS = {
    "first_ms": "bigint", "finished_1m": "float8", "finished_10m": "float8", "rated_ms": "bigint", "pace": "jsonb",
}  # fmt: skip
SUMMED_COLUMNS = {**GROUP_COLUMNS, **RATE_COLUMNS, "groups": "integer"}
PREFIX_COLUMNS = {**SUMMED_COLUMNS, "durations": "jsonb", "failing": "jsonb"}
SCOPE_COLUMNS = {
    **SUMMED_COLUMNS, "prefixes": "integer", "tasks": "integer", "counted": "integer", "quiet_ms": "bigint",
    "time_left": "jsonb",
}  # fmt: skip

GroupName = tuple[str, str]
"""Name of a prefix, and of a group in it."""


@dataclass(slots=True)
class GroupRow:
    """GROUP_COLUMNS of a row. `kept`: whether it stays."""

    id: int = 0
    memory: int = 0
    released_done: int = 0
    forgotten_done: int = 0
    erred: int = 0
    released_failed: int = 0
    forgotten_failed: int = 0
    released: int = 0
    processing: int = 0
    queued: int = 0
    no_worker: int = 0
    waiting: int = 0
    forgotten: int = 0
    total: int = 0
    duration_n: int = 0
    duration_s: float = 0.0
    duration_ewma_s: float | None = None
    version: int = 0
    changed_ms: int = 0
    kept: bool = field(default=True, kw_only=True)


@dataclass(slots=True)
class PrefixRow(GroupRow):
    """PREFIX_COLUMNS of a row. `pace`, `durations` and `failing` are JSON, and stay as read where nothing changes."""

    first_ms: int = 0
    finished_1m: float = 0.0
    finished_10m: float = 0.0
    rated_ms: int = 0
    pace: str = "[]"
    groups: int = 0
    durations: str = "{}"
    failing: str = "{}"


Prefixes = dict[str, PrefixRow]
Groups = dict[GroupName, GroupRow]
_LOCKED = ("id", "project_id", "run_id", "attempt", "ended_ms", "settled", *SCOPE_COLUMNS)
_OF_PROJECT = "project_id = %s AND run_id = 0 AND attempt = 0"
_SCOPE_OF_PROJECT = f"(SELECT id FROM progress_scope WHERE {_OF_PROJECT})"
_PREFIX_OF_PROJECT = (
    f"(SELECT id FROM progress_taskprefix WHERE scope_id = {_SCOPE_OF_PROJECT} AND name = given.prefix)"
)


def lock_scope(scope_id: int) -> Scope:
    """Lock a scope's row and return it with this transaction's version. Raises Scope.DoesNotExist."""
    scope = _scope(bulk.read(_locking("id = %s", scope_id))[0])
    if scope is None:
        raise Scope.DoesNotExist
    return scope


def lock_project(project_id: int, names: Collection[GroupName]) -> tuple[Scope | None, Prefixes, Groups]:
    """`lock_scope` for the scope of a project's runs, and these groups of it with their prefixes: by one message."""
    scopes, prefixes, groups = bulk.read(
        _locking(_OF_PROJECT, project_id),
        _prefixes({prefix for prefix, _ in names}, _SCOPE_OF_PROJECT, project_id),
        _groups([(None, name, prefix) for prefix, name in names], _PREFIX_OF_PROJECT, project_id),
    )
    return _scope(scopes), _prefix_rows(prefixes), _group_rows(groups)


def read_prefixes(scope_id: int, names: Collection[str]) -> Prefixes:
    """The rows of these prefixes that are there."""
    return _prefix_rows(bulk.read(_prefixes(names, "%s", scope_id))[0]) if names else {}


def read_active(scope_id: int, most: int) -> Prefixes:
    """The first prefixes of a scope: first those with unfinished tasks, then by their first report."""
    columns = ", ".join(("name", "id", *PREFIX_COLUMNS))
    is_over = f"CASE WHEN {' + '.join(LIVE)} > 0 THEN 0 ELSE 1 END"
    query = f"SELECT {columns} FROM progress_taskprefix WHERE scope_id = %s ORDER BY {is_over}, id LIMIT %s"
    return _prefix_rows(bulk.read((query, [scope_id, most]))[0])


def read_groups(names: Collection[tuple[int | None, str, str]]) -> Groups:
    """The rows of these groups that are there, by the id of their prefix, their name and that of their prefix."""
    return _group_rows(bulk.read(_groups(names, "given.prefix_id"))[0]) if names else {}


def read_keys(table: str, columns: Iterable[str], scope_id: int, keys: Iterable[str]) -> list[tuple[Any, ...]]:
    """The rows of a scope's tasks with these keys."""
    where = "t.key = given.key AND t.scope_id = %s"
    selected = ", ".join(f"t.{column}" for column in columns)
    return bulk.find(selected, table, where, {"key": "text"}, [(key,) for key in keys], scope_id)


def _locking(where: str, value: int) -> bulk.Query:
    names = ", ".join(_LOCKED)
    return f"UPDATE progress_scope SET version = version + 1 WHERE {where} RETURNING {names}", [value]


def _scope(found: Sequence[tuple[Any, ...]]) -> Scope | None:
    if not found:
        return None
    scope = Scope(**dict(zip(_LOCKED, found[0], strict=True)))
    scope.settled = bool(scope.settled)  # SQLite has numbers
    return scope


def _prefixes(names: Collection[str], scope: str, *more: int) -> bulk.Query:
    """`scope` is SQL for the id of their scope, with parameters `more`."""
    columns = ", ".join(f"t.{column}" for column in ("name", "id", *PREFIX_COLUMNS))
    where = f"t.name = given.name AND t.scope_id = {scope}"
    return bulk.lookup(columns, "progress_taskprefix", where, {"name": "text"}, [(name,) for name in names], *more)


def _prefix_rows(found: Iterable[tuple[Any, ...]]) -> Prefixes:
    return {name: PrefixRow(*row) for name, *row in found}


def _groups(names: Collection[tuple[int | None, str, str]], prefix: str, *more: int) -> bulk.Query:
    """`prefix` is SQL for the id of a `given` group's prefix, with parameters `more`."""
    columns = ", ".join(f"t.{column}" for column in ("id", *GROUP_COLUMNS))
    types = {"prefix_id": "bigint", "name": "text", "prefix": "text"}
    where = f"t.prefix_id = {prefix} AND t.name = given.name"
    return bulk.lookup(f"given.prefix, t.name, {columns}", "progress_taskgroup", where, types, names, *more)


def _group_rows(found: Iterable[tuple[Any, ...]]) -> Groups:
    return {(prefix, name): GroupRow(*row) for prefix, name, *row in found}
