"""What pages, the API and the command line read of counters: a few rows by index, however many tasks they count."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from django.db import connection

from dstackweb.lib import sql
from dstackweb.progress.estimate import Left, Rate, left, rate
from dstackweb.progress.states import FINISHED, LIVE, STATE_OF, TaskState

Order = Literal["active", "failed", "name"]
Only = Literal["", "failed", "running"]


class Rated(NamedTuple):
    """How fast a row's tasks finished, as it is kept (models.Rated), and when it was read."""

    first_ms: int
    finished_1m: float
    finished_10m: float
    rated_ms: int
    now_ms: int


@dataclass(frozen=True)
class Bar:
    """One row of counters. `finished` and `live` are sums of `counts`, which has all eight states and sums to `total`.

    A group has no rate and no groups of its own. `mean_s` is what a task took on average, where any was timed,
    and `recent_s` what the latest did: each report weighs as much as all before it.
    """

    id: int
    name: str
    counts: dict[TaskState, int]
    total: int
    finished: int
    live: int
    groups: int
    rated: Rated | None
    mean_s: float | None
    recent_s: float | None
    version: int
    changed_ms: int

    @cached_property
    def rate(self) -> Rate | None:
        """How fast its tasks finish. None when nothing has finished lately."""
        return rate(self.rated, self.rated.now_ms) if self.rated else None

    @cached_property
    def left(self) -> Left | None:
        """How long the rest takes. None when nothing moves on."""
        return left(self.live, self.rate, self.counts[TaskState.NO_WORKER])


@dataclass(frozen=True, slots=True)
class Overview:
    """What one scope comes to; `bar` has its totals. `version` rises with every change."""

    scope_id: int
    attempt: int
    version: int
    prefixes: int
    bar: Bar
    ended: bool


class Failed(NamedTuple):
    """A task that has failed, and what it said."""

    id: int
    key: str
    prefix: str
    group: str
    message: str
    at_ms: int


class TaskRow(NamedTuple):
    """A task that was reported by itself."""

    id: int
    key: str
    state: TaskState
    since_ms: int


_ALL = tuple(TaskState)
_STATES = ", ".join(_ALL)
_COUNTS = f"{_STATES}, total, duration_n, duration_s, duration_ewma_s, version, changed_ms"
_RATED = "first_ms, finished_1m, finished_10m, rated_ms"
_PREFIX = f"SELECT id, name, groups, {_COUNTS}, {_RATED} FROM progress_taskprefix"
_GROUP = f"SELECT id, name, 0, {_COUNTS} FROM progress_taskgroup"
_SCOPE = f"SELECT id, '', groups, {_COUNTS}, {_RATED}, attempt, prefixes, ended_ms FROM progress_scope"
_LIVE = " + ".join(LIVE)
_LAST = {"active": f"CASE WHEN {_LIVE} > 0 THEN 0 ELSE 1 END", "failed": "CASE WHEN erred > 0 THEN 0 ELSE 1 END"}
"""1 for the prefixes that stand behind the others."""
_ONLY = {"": "", "failed": " AND erred > 0", "running": " AND processing > 0"}

_AT = 3 + len(_ALL)
"""Where a row's states end."""
_OF_LIVE = [3 + _ALL.index(state) for state in LIVE]
_OF_FINISHED = [3 + _ALL.index(state) for state in FINISHED]


def of_project(project_id: int, now_ms: int) -> Overview | None:
    """How far the runs of a project are. None when it never had one."""
    return _overview(f"{_SCOPE} WHERE project_id = %s AND run_id = 0 AND attempt = 0", [project_id], now_ms)


def of_run(run_id: int, now_ms: int, attempt: int | None = None) -> Overview | None:
    """How far the tasks of a run's attempt are, by default the last that told of any. None when none did."""
    if attempt is None:
        return _overview(f"{_SCOPE} WHERE run_id = %s ORDER BY attempt DESC LIMIT 1", [run_id], now_ms)
    return _overview(f"{_SCOPE} WHERE run_id = %s AND attempt = %s", [run_id, attempt], now_ms)


def inside(project_id: int, now_ms: int, limit: int) -> list[tuple[int, Overview]]:
    """The tasks inside a project's runs that go on, the youngest runs first: each run's id and how far it is."""
    open_ones = " WHERE project_id = %s AND run_id > 0 AND ended_ms IS NULL ORDER BY run_id DESC LIMIT %s"
    found = sql.rows(_SCOPE.replace("SELECT ", "SELECT run_id, ", 1) + open_ones, [project_id, limit])
    return [(run_id, _told(row, now_ms)) for run_id, *row in found]


def prefixes(
    scope_id: int, now_ms: int, *, find: str = "", order: Order = "active", after: str | None = None, limit: int = 50
) -> tuple[list[Bar], str | None]:
    """A page of prefixes, and where the next one starts (None after the last). Raises ValueError for a bad `after`.

    `active` has those first to which something is still to come, `failed` those with failed tasks, each then in the
    order in which they were first heard of, so that rows keep their places while counts move. `find` is a part of the
    name in whatever case.
    """
    where = " WHERE scope_id = %s"
    values: list[int | str] = [scope_id]
    if find:
        like, value = _like(find)
        where += like
        values.append(value)
    if order == "name":
        by, name = "id", 'name COLLATE "C"' if connection.vendor == "postgresql" else "name"
        if after is not None:
            where += f" AND {name} > (SELECT {name} FROM progress_taskprefix WHERE id = %s)"
            values.append(_cursor(after)[1])
        by = name
    else:
        last = _LAST[order]
        by = f"{last}, id"
        if after is not None:
            where += f" AND ({last}, id) > (%s, %s)"
            values += _cursor(after)
    found = sql.rows(f"{_PREFIX}{where} ORDER BY {by} LIMIT %s", [*values, limit + 1])
    bars = [_bar(row, now_ms) for row in found[:limit]]
    place = {"active": lambda bar: not bar.live, "failed": lambda bar: not bar.counts[TaskState.ERRED]}.get(order)
    return bars, _next(found, limit, lambda: (int(place(bars[-1])) if place else 0, bars[-1].id))


def prefix(scope_id: int, name: str, now_ms: int) -> Bar | None:
    """The prefix of this name, if there is one."""
    found = sql.rows(f"{_PREFIX} WHERE scope_id = %s AND name = %s", [scope_id, name])
    return _bar(found[0], now_ms) if found else None


def group(prefix_id: int, name: str) -> Bar | None:
    """The group of this name, if there is one."""
    found = sql.rows(f"{_GROUP} WHERE prefix_id = %s AND name = %s", [prefix_id, name])
    return _bar(found[0], None) if found else None


def groups(
    prefix_id: int, *, only: Only = "", find: str = "", after: str | None = None, limit: int = 50
) -> tuple[list[Bar], str | None]:
    """A page of a prefix's groups in the order in which they were first heard of, and where the next one starts.

    `only` leaves those with failed tasks, or with running ones. Raises ValueError for a bad `after`.
    """
    where, values = _behind("prefix_id", prefix_id, after)
    if find:
        like, value = _like(find)
        where += like
        values.append(value)
    found = sql.rows(f"{_GROUP}{where}{_ONLY[only]} ORDER BY prefix_id, id LIMIT %s", [*values, limit + 1])
    bars = [_bar(row, None) for row in found[:limit]]
    return bars, _next(found, limit, lambda: (0, bars[-1].id))


def failures(
    scope_id: int, prefix_id: int | None = None, after: str | None = None, limit: int = 50
) -> tuple[list[Failed], str | None]:
    """A page of the tasks that have failed, of all prefixes or of one, newest first, and where the next one starts.

    Raises ValueError for a bad `after`.
    """
    column, value = ("scope_id", scope_id) if prefix_id is None else ("prefix_id", prefix_id)
    values = [value]
    behind = ""
    if after is not None:
        behind = " AND (failure.at_ms, failure.id) < (%s, %s)"
        values += _cursor(after)
    found = sql.rows(
        'SELECT failure.id, failure.key, prefix.name, failure."group", failure.message, failure.at_ms '
        "FROM progress_taskfailure failure JOIN progress_taskprefix prefix ON prefix.id = failure.prefix_id "
        f"WHERE failure.{column} = %s{behind} ORDER BY failure.at_ms DESC, failure.id DESC LIMIT %s",
        [*values, limit + 1],
    )
    rows = [Failed(*row) for row in found[:limit]]
    return rows, _next(found, limit, lambda: (rows[-1].at_ms, rows[-1].id))


def with_failures(prefixes: Collection[int]) -> set[int]:
    """Which of these prefixes, by id, have tasks that failed and are remembered, though they may be forgotten."""
    if not prefixes:
        return set()
    found = sql.rows(
        f"SELECT prefix.id FROM progress_taskprefix prefix WHERE prefix.id IN ({sql.places(prefixes)})"
        " AND EXISTS (SELECT 1 FROM progress_taskfailure failure WHERE failure.prefix_id = prefix.id)",
        list(prefixes),
    )
    return {pk for (pk,) in found}


def tasks(group_id: int, after: str | None = None, limit: int = 50) -> tuple[list[TaskRow], str | None]:
    """A page of a group's tasks in the order in which they were first heard of, and where the next one starts.

    None where they were told as counts. Raises ValueError for a bad `after`.
    """
    where, values = _behind("group_id", group_id, after)
    found = sql.rows(
        f"SELECT id, key, state, since_ms FROM progress_task{where} ORDER BY group_id, id LIMIT %s",
        [*values, limit + 1],
    )
    rows = [TaskRow(pk, key, STATE_OF[state], since_ms) for pk, key, state, since_ms in found[:limit]]
    return rows, _next(found, limit, lambda: (0, rows[-1].id))


def _overview(statement: str, values: Sequence[int], now_ms: int) -> Overview | None:
    found = sql.rows(statement, values)
    return _told(found[0], now_ms) if found else None


def _told(columns: Sequence[Any], now_ms: int) -> Overview:
    *row, attempt, count, ended_ms = columns
    bar = _bar(row, now_ms)
    return Overview(bar.id, attempt, bar.version, count, bar, ended_ms is not None)


def _bar(row: Sequence[Any], now_ms: int | None) -> Bar:
    """A row as `_PREFIX` has it, or `_GROUP`, which is not rated."""
    pk, name, number_of_groups = row[:3]
    total, duration_n, duration_s, recent_s, version, changed_ms = row[_AT : _AT + 6]
    return Bar(
        id=pk,
        name=name,
        counts=dict(zip(_ALL, row[3:_AT], strict=True)),
        total=total,
        finished=sum([row[place] for place in _OF_FINISHED]),
        live=sum([row[place] for place in _OF_LIVE]),
        groups=number_of_groups,
        rated=Rated._make((*row[_AT + 6 : _AT + 10], now_ms)) if now_ms is not None else None,
        mean_s=duration_s / duration_n if duration_n else None,
        recent_s=recent_s,
        version=version,
        changed_ms=changed_ms,
    )


def _behind(column: str, value: int, after: str | None) -> tuple[str, list[int | str]]:
    """Which rows have this value, from a place in their order by id on.

    Said as a range of both: of an equality and an order by id alone PostgreSQL may make a walk through all ids.
    """
    return (
        f" WHERE ({column}, id) > (%s, %s) AND {column} <= %s",
        [value, 0 if after is None else _cursor(after)[1], value],
    )


def _like(find: str) -> tuple[str, str]:
    """A condition for names with this in them, and its value."""
    like = "ILIKE" if connection.vendor == "postgresql" else "LIKE"
    plain = find.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f" AND name {like} %s ESCAPE '\\'", f"%{plain}%"


def _cursor(after: str) -> list[int]:
    """What `_next` wrote: two numbers that a 64-bit column can hold."""
    numbers = [int(number) for number in after.split(".")]
    if len(numbers) != 2 or any(abs(number) >= 2**63 for number in numbers):
        raise ValueError(f"{after!r} is no place in a list")
    return numbers


def _next(found: Sequence[object], limit: int, last: Callable[[], tuple[int, int]]) -> str | None:
    return "{}.{}".format(*last()) if len(found) > limit else None
