"""Read counters for pages, API and command line: a few rows by index, independent of the number of tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from django.db import connection

from dstackweb.lib import sql
from dstackweb.progress import time_left
from dstackweb.progress.counters import PREFIXES_MAX
from dstackweb.progress.estimate import BINS, Rate, RateSample, rate
from dstackweb.progress.models import NAME_MAX, TaskPrefix
from dstackweb.progress.states import AS_ENDED, FAILED, FINISHED, LIVE, TaskState, folded
from dstackweb.progress.time_left import PARTS, Left, Part, Shown

Order = Literal["active", "failed", "name"]
GroupFilter = Literal["", "failed", "running"]


class Stuck(NamedTuple):
    """Unfinished tasks that cannot go on now: paused, and such that never can. Of a project: its waiting runs."""

    paused: int = 0
    impossible: int = 0


NO_STUCK = Stuck()


@dataclass(frozen=True)
class ProgressBar:
    """One row of counters. `states` has all states and sums to `total`; `finished` and `live` are sums of them.

    A group has no rate and no groups. `mean_s` is the average processing time of timed tasks, `recent_s` a moving
    average in which each report weighs as much as all before it.
    """

    id: int
    name: str
    states: dict[TaskState, int]
    total: int
    finished: int
    live: int
    groups: int
    rated: RateSample | None
    mean_s: float | None
    recent_s: float | None
    version: int
    changed_ms: int
    silent_since_ms: int = 0
    """Last report of a silent reporter that has unfinished tasks in this attempt; 0 without one."""
    stuck: Stuck = NO_STUCK
    pace: str = "[]"
    """The stored `pace.Pace`, at the time of the rates, or at `quiet_ms` if that is later."""
    quiet_ms: int = 0
    is_total: bool = False
    of_all_prefixes: Left | None = None
    """Time left of all prefixes, for totals."""

    @cached_property
    def counts(self) -> dict[TaskState, int]:
        """Tasks by how they ended or what they do: those that were released or forgotten later are done or failed."""
        return folded(self.states, AS_ENDED)

    @cached_property
    def rate(self) -> Rate | None:
        """The rate of finishing tasks. None when nothing has finished lately."""
        return rate(self.rated) if self.rated else None

    @cached_property
    def part(self) -> Part | None:
        """The unfinished tasks that can go on, of which the time left is estimated. None without a rate."""
        if self.rated is None:
            return None
        unfinished = self.live - self.counts[TaskState.NO_WORKER] - self.stuck.impossible
        running, since_ms = self.counts[TaskState.PROCESSING], max(self.rated.rated_ms, self.quiet_ms)
        return Part.of(self.pace, since_ms, self.rated.now_ms, self.total, max(0, unfinished), running)

    @cached_property
    def left(self) -> Left | None:
        """The time left, without tasks that never can go on.

        None when no task can finish, some are paused, or a reporter of unfinished tasks is silent. Tasks without a
        worker leave the upper end open.
        """
        if self.silent_since_ms or self.stuck.paused or self.part is None or not self.part.unfinished:
            return None
        estimate = self.of_all_prefixes if self.is_total else time_left.of_part(self.part)
        return estimate._replace(high=math.inf) if estimate and self.counts[TaskState.NO_WORKER] else estimate


StuckOf = Callable[[ProgressBar], Stuck]
"""Which tasks of a bar cannot go on."""


def no_stuck(bar: ProgressBar) -> Stuck:
    """Of a run: its tasks wait for each other only."""
    return NO_STUCK


class Silence(NamedTuple):
    """Reporters that have unfinished tasks and did not send what they promised, since the last report of the first."""

    reporters: int
    since_ms: int


@dataclass(frozen=True, slots=True)
class ScopeProgress:
    """The totals of a scope. `version` increases with every change."""

    scope_id: int
    run_id: int
    attempt: int
    version: int
    prefixes: int
    bar: ProgressBar
    ended: bool
    silence: Silence | None = None

    @property
    def is_full(self) -> bool:
        """Whether there are as many prefixes as are counted one by one; those of a project's runs have no limit."""
        return self.attempt > 0 and self.prefixes >= PREFIXES_MAX


TIMED_MIN = 5
"""Fewer timed tasks have no quantiles."""
_ALL = tuple(TaskState)
_STATES = ", ".join(_ALL)
_COUNTS = f"{_STATES}, total, duration_n, duration_s, duration_ewma_s, version, changed_ms"
_RATED = "first_ms, finished_1m, finished_10m, rated_ms, pace"
_PREFIX = f"SELECT id, name, groups, {_COUNTS}, {_RATED} FROM progress_taskprefix"
_GROUP = f"SELECT id, name, 0, {_COUNTS} FROM progress_taskgroup"
_SCOPE_COLUMNS = f"groups, {_COUNTS}, {_RATED}, run_id, attempt, prefixes, ended_ms, quiet_ms, time_left".split(", ")
_SCOPE_WIDTH = 4 + len(_SCOPE_COLUMNS)
_SILENT = (
    "FROM progress_reporter reporter WHERE reporter.scope_id = scope.id AND scope.ended_ms IS NULL"
    " AND reporter.unfinished > 0 AND reporter.due_ms < {now_ms}"
)


def _scope_sql(now_ms: int, more: str = "") -> str:
    """A statement for scopes. `more`: more columns, at the end."""
    columns = ", ".join(f"scope.{name}" for name in _SCOPE_COLUMNS)
    silent = _SILENT.format(now_ms=int(now_ms))
    return (
        f"SELECT scope.id, '', {columns}, (SELECT count(*) {silent}), (SELECT min(reporter.last_ms) {silent}){more}"
        " FROM progress_scope scope"
    )


_LIVE = " + ".join(LIVE)
_HAS_FAILED = f"({' OR '.join(f'{state} > 0' for state in FAILED)})"
_PLACE = {"active": f"CASE WHEN {_LIVE} > 0 THEN 0 ELSE 1 END", "failed": f"-({' + '.join(FAILED)})"}
"""What prefixes are sorted by."""
_ONLY = {"": "", "failed": f" AND {_HAS_FAILED}", "running": " AND processing > 0"}

_STATES_END = 3 + len(_ALL)
"""Index behind the states of a row."""
_LIVE_AT = [3 + _ALL.index(state) for state in LIVE]
_FINISHED_AT = [3 + _ALL.index(state) for state in FINISHED]


def of_project(project_id: int, now_ms: int) -> ScopeProgress | None:
    """Progress of a project's runs. None when it never had a run."""
    return _find_scope("project_id = %s AND run_id = 0 AND attempt = 0", [project_id], now_ms)


def of_run(run_id: int, now_ms: int, attempt: int | None = None) -> ScopeProgress | None:
    """Progress of the tasks of a run's attempt, by default the latest that reported any. None without reports."""
    if attempt is None:
        return _find_scope("run_id = %s ORDER BY attempt DESC LIMIT 1", [run_id], now_ms)
    return _find_scope("run_id = %s AND attempt = %s", [run_id, attempt], now_ms)


def running_runs(project_id: int, now_ms: int, limit: int) -> list[tuple[int, ScopeProgress]]:
    """Ids of a project's runs whose attempt has not ended, newest first, with the progress of their tasks."""
    open_ones = " WHERE project_id = %s AND run_id > 0 AND ended_ms IS NULL ORDER BY run_id DESC LIMIT %s"
    found = sql.rows(_scope_sql(now_ms, ", scope.run_id") + open_ones, [project_id, limit])
    return [(run_id, _scope_progress(row, now_ms)) for *row, run_id in found]


def prefixes(
    scope_id: int,
    now_ms: int,
    *,
    find: str = "",
    order: Order = "active",
    after: str | None = None,
    limit: int = 50,
    stuck: StuckOf = no_stuck,
) -> tuple[ScopeProgress | None, list[ProgressBar], str | None]:
    """The totals (None: the scope is gone), a page of prefixes, and the cursor of the next page (None after the last).

    Read by one statement, so that totals are the sums of all prefixes. `active` lists prefixes with unfinished tasks
    first, `failed` those with the most failed tasks. Ties keep the order of their first report, so that rows do not
    move while other counts change. `find` is a part of the name, case-insensitive. Raises ValueError for a bad `after`.

    `stuck` says which tasks of a bar cannot go on. The time left of a project's totals is estimated of the first
    active prefixes; that of a run is kept.
    """
    page, values = _prefix_page(scope_id, find, order, after)
    found = sql.rows(
        f"{_scope_sql(now_ms, ', page.*')} LEFT JOIN ({page} LIMIT %s) page ON TRUE WHERE scope.id = %s"
        " ORDER BY page.place",
        [*values, limit + 1, scope_id],
    )
    if not found:
        return None, [], None
    totals = _scope_progress(found[0][:_SCOPE_WIDTH], now_ms)
    listed = [row[_SCOPE_WIDTH:-1] for row in found if row[-1] is not None]
    bars = _bars(listed[:limit], now_ms, totals.bar, stuck)
    if totals.bar.live and not totals.run_id:
        if order == "active" and not find and after is None and min(len(bars), limit) >= min(totals.prefixes, PARTS):
            active = bars[:PARTS]
        else:
            page, values = _prefix_page(scope_id, "", "active", None)
            rows = sql.rows(f"{page} LIMIT %s", [*values, PARTS])
            active = _bars([row[:-1] for row in rows], now_ms, totals.bar, stuck)
        bar = replace(totals.bar, stuck=stuck(totals.bar))
        parts = [prefix.part for prefix in active if prefix.part]
        estimate = time_left.of_all(parts, bar.part, finds_more=False) if bar.part else None
        totals = replace(totals, bar=replace(bar, of_all_prefixes=estimate))
    following = next_cursor(listed, limit, lambda: (_place(bars[-1], order), bars[-1].id))
    return totals, bars, following


def _place(bar: ProgressBar, order: Order) -> int:
    if order == "active":
        return int(not bar.live)
    return -bar.counts[TaskState.ERRED] if order == "failed" else 0


def _prefix_page(scope_id: int, find: str, order: Order, after: str | None) -> tuple[str, list[int | str]]:
    """A statement for prefixes in their order, with their `place` as the last column, and its parameters."""
    where = " WHERE scope_id = %s"
    values: list[int | str] = [scope_id]
    if find:
        like, value = _like(find)
        where += like
        values.append(value)
    if order == "name":
        by = 'name COLLATE "C"' if connection.vendor == "postgresql" else "name"
        if after is not None:
            where += f" AND {by} > (SELECT {by} FROM progress_taskprefix WHERE id = %s)"
            values.append(parse_cursor(after)[1])
    else:
        by = f"{_PLACE[order]}, id"
        if after is not None:
            where += f" AND ({by}) > (%s, %s)"
            values += parse_cursor(after)
    columns = _PREFIX.replace(" FROM", f", row_number() OVER (ORDER BY {by}) AS place FROM")
    return f"{columns}{where} ORDER BY {by}", values


def prefix(totals: ScopeProgress, name: str, now_ms: int) -> ProgressBar | None:
    """The prefix of a scope with this name. None when there is none."""
    found = sql.rows(f"{_PREFIX} WHERE scope_id = %s AND name = %s", [totals.scope_id, name])
    return _bar(found[0], now_ms, totals.bar) if found else None


def group(prefix_id: int, name: str) -> ProgressBar | None:
    found = sql.rows(f"{_GROUP} WHERE prefix_id = %s AND name = %s", [prefix_id, name])
    return _bar(found[0], None) if found else None


def groups(
    prefix_id: int, *, only: GroupFilter = "", find: str = "", after: str | None = None, limit: int = 50
) -> tuple[list[ProgressBar], str | None]:
    """A page of a prefix's groups in the order of their first report, and the cursor of the next page.

    `only` selects groups with failed or running tasks. Raises ValueError for a bad `after`.
    """
    where, values = after_id("prefix_id", prefix_id, after)
    if find:
        like, value = _like(find)
        where += like
        values.append(value)
    found = sql.rows(f"{_GROUP}{where}{_ONLY[only]} ORDER BY prefix_id, id LIMIT %s", [*values, limit + 1])
    bars = [_bar(row, None) for row in found[:limit]]
    return bars, next_cursor(found, limit, lambda: (0, bars[-1].id))


def _find_scope(where: str, values: Sequence[int], now_ms: int) -> ScopeProgress | None:
    found = sql.rows(f"{_scope_sql(now_ms)} WHERE {where}", values)
    return _scope_progress(found[0], now_ms) if found else None


def _scope_progress(columns: Sequence[Any], now_ms: int) -> ScopeProgress:
    *row, run_id, attempt, count, ended_ms, quiet_ms, stored, silent, since_ms = columns
    bar = replace(_bar(row, now_ms), silent_since_ms=since_ms or 0, quiet_ms=quiet_ms, is_total=True)
    if estimate := Shown.of(stored):
        bar = replace(bar, of_all_prefixes=estimate.at(now_ms, bar.counts[TaskState.PROCESSING]))
    silence = Silence(silent, since_ms) if silent else None
    return ScopeProgress(bar.id, run_id, attempt, bar.version, count, bar, ended_ms is not None, silence)


def _bars(rows: Sequence[Sequence[Any]], now_ms: int, totals: ProgressBar, stuck: StuckOf) -> list[ProgressBar]:
    bars = [_bar(row, now_ms, totals) for row in rows]
    return bars if stuck is no_stuck else [replace(bar, stuck=stuck(bar)) for bar in bars]


def _bar(row: Sequence[Any], now_ms: int | None, totals: ProgressBar | None = None) -> ProgressBar:
    """A row of `_PREFIX`, with its scope's totals, or of `_GROUP`, which has no rate."""
    pk, name, number_of_groups = row[:3]
    total, duration_n, duration_s, recent_s, version, changed_ms = row[_STATES_END : _STATES_END + 6]
    return ProgressBar(
        id=pk,
        name=name,
        states=dict(zip(_ALL, row[3:_STATES_END], strict=True)),
        total=total,
        finished=sum([row[at] for at in _FINISHED_AT]),
        live=sum([row[at] for at in _LIVE_AT]),
        groups=number_of_groups,
        rated=RateSample._make((*row[_STATES_END + 6 : _STATES_END + 10], now_ms)) if now_ms is not None else None,
        mean_s=duration_s / duration_n if duration_n else None,
        recent_s=recent_s,
        version=version,
        changed_ms=changed_ms,
        silent_since_ms=totals.silent_since_ms if totals else 0,
        pace=row[_STATES_END + 10] if now_ms is not None else "[]",
        quiet_ms=totals.quiet_ms if totals else 0,
    )


def _like(find: str) -> tuple[str, str]:
    """A condition for names that contain `find`, and its parameter. SQLite refuses very long ones."""
    like = "ILIKE" if connection.vendor == "postgresql" else "LIKE"
    plain = find[: NAME_MAX + 1].replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f" AND name {like} %s ESCAPE '\\'", f"%{plain}%"


def after_id(column: str, value: int, after: str | None) -> tuple[str, list[int | str]]:
    """A condition for rows with this value that follow the cursor in the order of their ids.

    Written as a range of both columns: for an equality and an order by id, PostgreSQL may scan all ids.
    """
    return (
        f" WHERE ({column}, id) > (%s, %s) AND {column} <= %s",
        [value, 0 if after is None else parse_cursor(after)[1], value],
    )


def parse_cursor(after: str) -> list[int]:
    """The two 64-bit numbers of a cursor made by `next_cursor`. Raises ValueError."""
    numbers = [int(number) for number in after.split(".")]
    if len(numbers) != 2 or any(abs(number) >= 2**63 for number in numbers):
        raise ValueError(f"{after!r} is not a cursor")
    return numbers


def next_cursor(found: Sequence[object], limit: int, last: Callable[[], tuple[int, int]]) -> str | None:
    return "{}.{}".format(*last()) if len(found) > limit else None


def duration_quantiles(prefixes: Collection[int], shares: Sequence[float]) -> dict[int, list[float]]:
    """Seconds that these shares of a prefix's tasks took at most, by its id.

    Only of prefixes with TIMED_MIN, all of whose timed tasks were reported one by one: of the others sums are known.
    """
    found = {}
    rows = TaskPrefix.objects.filter(pk__in=prefixes, duration_n__gte=TIMED_MIN)
    for pk, timed, histogram in rows.values_list("pk", "duration_n", "durations"):
        counts = {int(number): count for number, count in histogram.items()}
        if sum(counts.values()) == timed:
            found[pk] = [BINS.quantile(counts, share) or 0.0 for share in shares]
    return found
