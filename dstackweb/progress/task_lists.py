"""Lists of single tasks: those that failed, and a group's."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from dstackweb.lib import sql
from dstackweb.progress.selectors import after_id, next_cursor, parse_cursor
from dstackweb.progress.states import STATE_OF, TaskState


class FailedTask(NamedTuple):
    id: int
    key: str
    prefix: str
    group: str
    message: str
    at_ms: int


class TaskRow(NamedTuple):
    id: int
    key: str
    state: TaskState
    since_ms: int
    message: str


def failures(
    scope_id: int, prefix_id: int | None = None, after: str | None = None, limit: int = 50
) -> tuple[list[FailedTask], str | None]:
    """A page of failed tasks of all prefixes or of one, newest first, and the cursor of the next page.

    Raises ValueError for a bad `after`.
    """
    column, value = ("scope_id", scope_id) if prefix_id is None else ("prefix_id", prefix_id)
    values = [value]
    behind = ""
    if after is not None:
        behind = " AND (failure.at_ms, failure.id) < (%s, %s)"
        values += parse_cursor(after)
    found = sql.rows(
        'SELECT failure.id, failure.key, prefix.name, failure."group", failure.message, failure.at_ms '
        "FROM progress_taskfailure failure JOIN progress_taskprefix prefix ON prefix.id = failure.prefix_id "
        f"WHERE failure.{column} = %s{behind} ORDER BY failure.at_ms DESC, failure.id DESC LIMIT %s",
        [*values, limit + 1],
    )
    rows = [FailedTask(*row) for row in found[:limit]]
    return rows, next_cursor(found, limit, lambda: (rows[-1].at_ms, rows[-1].id))


def with_failures(prefixes: Collection[int]) -> set[int]:
    """The ids of those prefixes that have stored failures, whose tasks may be forgotten."""
    if not prefixes:
        return set()
    found = sql.rows(
        f"SELECT prefix.id FROM progress_taskprefix prefix WHERE prefix.id IN ({sql.places(prefixes)})"
        " AND EXISTS (SELECT 1 FROM progress_taskfailure failure WHERE failure.prefix_id = prefix.id)",
        list(prefixes),
    )
    return {pk for (pk,) in found}


def tasks(group_id: int, after: str | None = None, limit: int = 50) -> tuple[list[TaskRow], str | None]:
    """A page of a group's tasks in the order of their first report, and the cursor of the next page.

    Empty when they were reported as counts. Raises ValueError for a bad `after`.
    """
    where, values = after_id("group_id", group_id, after)
    found = sql.rows(
        f"SELECT id, key, state, since_ms, message FROM progress_task{where} ORDER BY group_id, id LIMIT %s",
        [*values, limit + 1],
    )
    rows = [TaskRow(pk, key, STATE_OF[state], since_ms, text) for pk, key, state, since_ms, text in found[:limit]]
    return rows, next_cursor(found, limit, lambda: (0, rows[-1].id))
