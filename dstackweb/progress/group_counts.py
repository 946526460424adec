"""Absolute counts of groups: the difference to the reporter's previous count of the group is applied.

Each count has a sequence that increases, so repeated and overtaken counts change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from django.db import connection

from dstackweb.lib import bulk
from dstackweb.progress.counter_rows import GroupName
from dstackweb.progress.counters import TASKS_MAX, BatchUpdate, Delta
from dstackweb.progress.reports import Count
from dstackweb.progress.states import LIVE, TaskState

STATES = tuple(TaskState)
PLACES = {state: place for place, state in enumerate(STATES)}
COUNT_COLUMNS = {
    "seq": "bigint", **{state.value: "bigint" for state in STATES}, "duration_n": "bigint", "duration_s": "float8",
}  # fmt: skip
INSERT_COLUMNS = {"reporter_id": "bigint", "prefix_id": "bigint", "group": "text", **COUNT_COLUMNS}
COLUMNS = ", ".join(f"t.{column}" for column in ("id", *COUNT_COLUMNS))


class ReportedCount(NamedTuple):
    """The latest count of a group by a reporter: row id (0: not stored yet), and tasks in the order of STATES."""

    id: int = 0
    seq: int = -1
    states: tuple[int, ...] = (0,) * len(STATES)
    duration_n: int = 0
    duration_s: float = 0.0

    @classmethod
    def of(cls, pk: int, seq: int, *values: Any) -> ReportedCount:
        return cls(pk, seq, values[:-2], *values[-2:])


Counts = dict[GroupName, ReportedCount]


def release_live(update: BatchUpdate) -> None:
    """Release the live tasks in the counts of a reporter that has ended."""
    live = " OR ".join(f"t.{state} > 0" for state in LIVE)
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT p.name, t.{bulk.quoted('group')}, {COLUMNS}"
            " FROM progress_reportercount t JOIN progress_taskprefix p ON p.id = t.prefix_id"
            f" WHERE t.reporter_id = %s AND t.seq <= %s AND ({live})",
            [update.reporter.pk, update.reporter.ended_seq],
        )
        found = cursor.fetchall()
    rows = []
    for prefix, group, *values in found:
        old = ReportedCount.of(*values)
        new = old._replace(states=_released(old.states))
        update.deltas[prefix, group].add(_difference(old, new))
        rows.append(_row(new))
    bulk.update("progress_reportercount", COUNT_COLUMNS, rows)


def decide(update: BatchUpdate, counts: Sequence[Count]) -> Counts:
    """Find the counts that are newer than the stored ones, and their changes. Others are noted in the receipt."""
    if not counts:
        return {}
    group_names = {(count.prefix, count.group) for count in counts}
    update.counters.read(group_names)
    known = _load(update, group_names)
    newest: Counts = {}
    for index, count in sorted(enumerate(counts), key=lambda entry: entry[1].seq, reverse=True):
        group_name = (count.prefix, count.group)
        old = known.get(group_name, ReportedCount())
        if group_name in newest or count.seq <= old.seq:
            update.receipt.outdated += 1
            continue
        if not old.id:
            full = update.scope.counted >= TASKS_MAX
            if reason := "too_many_groups" if full else update.exceeded_limit(group_name):
                update.reject(index, count.prefix, reason, "counts")
                continue
            update.scope.counted += 1
        numbers = [0] * len(STATES)
        for state, number in count.states.items():
            numbers[PLACES[state]] = number
        states = tuple(numbers)
        if update.is_released(TaskState.WAITING, count.seq):
            states = _released(states)
        newest[group_name] = new = ReportedCount(old.id, count.seq, states, count.duration_n, count.duration_s)
        update.deltas[group_name].add(_difference(old, new))
        update.receipt.applied += 1
    return newest


def write(update: BatchUpdate, counts: Counts) -> None:
    """Store the counts, once the rows of their groups exist."""
    mine = update.reporter.pk
    fresh = [(group_name, count) for group_name, count in counts.items() if not count.id]
    bulk.insert(
        "progress_reportercount",
        INSERT_COLUMNS,
        [
            (mine, update.counters.ids(group_name).prefix, group_name[1], *_row(count)[:-1])
            for group_name, count in fresh
        ],
    )
    bulk.update("progress_reportercount", COUNT_COLUMNS, [_row(count) for count in counts.values() if count.id])


def _load(update: BatchUpdate, group_names: Iterable[GroupName]) -> Counts:
    found = bulk.find(
        f"given.prefix, given.name, {COLUMNS}",
        "progress_reportercount",
        f"t.prefix_id = given.prefix_id AND t.{bulk.quoted('group')} = given.name AND t.reporter_id = %s",
        {"prefix_id": "bigint", "name": "text", "prefix": "text"},
        [(update.counters.ids(group_name).prefix, group_name[1], group_name[0]) for group_name in group_names],
        update.reporter.pk,
    )
    return {(prefix, group): ReportedCount.of(*values) for prefix, group, *values in found}


def _row(count: ReportedCount) -> tuple[float, ...]:
    return (count.seq, *count.states, count.duration_n, count.duration_s, count.id)


def _released(states: Sequence[int]) -> tuple[int, ...]:
    """The same tasks after the end of their reporter."""
    tasks = dict(zip(STATES, states, strict=True))
    tasks[TaskState.RELEASED] += sum(tasks[state] for state in LIVE)
    return tuple(0 if state in LIVE else number for state, number in tasks.items())


def _difference(old: ReportedCount, new: ReportedCount) -> Delta:
    """What changed. Durations are never subtracted."""
    states = {
        state: after - before
        for state, before, after in zip(STATES, old.states, new.states, strict=True)
        if after != before
    }
    duration_n = max(0, new.duration_n - old.duration_n)
    return Delta(states, duration_n, max(0.0, new.duration_s - old.duration_s) if duration_n else 0.0)
