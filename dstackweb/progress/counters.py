"""The counters of a scope, changed in the transaction that writes the rows they count.

A writer first locks the scope's row (`counter_rows.lock_scope`). The scope's prefixes, groups, reporters and tasks that
it reads afterwards are current, and no other writer changes them before the commit.

Forgotten tasks stay counted, so that bars never shrink. While a scope has more than GROUPS_KEPT groups, those whose
tasks are all forgotten are deleted; if such a group is created again, its own count of forgotten tasks and its
durations start at zero.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, Self

from dstackweb.lib import bulk
from dstackweb.progress import counter_rows, time_left
from dstackweb.progress.counter_rows import GROUP_COLUMNS, PREFIX_COLUMNS, SCOPE_COLUMNS, GroupName, GroupRow, PrefixRow
from dstackweb.progress.estimate import BINS, MINUTE_S, TEN_MINUTES_S, added, decayed
from dstackweb.progress.models import Reporter, Scope
from dstackweb.progress.pace import Pace, Step
from dstackweb.progress.reports import EntryList, Receipt, Rejection
from dstackweb.progress.states import FINISHED, GONE, LIVE, SHOWN, TaskState
from dstackweb.progress.time_left import PARTS, Part, Shown


@dataclass(slots=True)
class Delta:
    """Change of one group: tasks per state (negative where they left), and timed tasks with their total seconds.

    `bins` counts the tasks that were timed one by one, by `estimate.BINS`.
    """

    states: dict[TaskState, int] = field(default_factory=dict)
    duration_n: int = 0
    duration_s: float = 0.0
    bins: dict[int, int] = field(default_factory=dict)

    def add(self, other: Delta) -> None:
        for state, count in other.states.items():
            self.states[state] = self.states.get(state, 0) + count
        self.duration_n += other.duration_n
        self.duration_s += other.duration_s
        for number, count in other.bins.items():
            self.bins[number] = self.bins.get(number, 0) + count

    def time(self, seconds: float) -> None:
        self.duration_n += 1
        self.duration_s += seconds
        number = BINS.bin_of(seconds)
        self.bins[number] = self.bins.get(number, 0) + 1

    def move(self, old: TaskState | None, new: TaskState, count: int = 1) -> None:
        """Move tasks from `old` (None: new tasks) to `new`."""
        if old is not None:
            self.states[old] = self.states.get(old, 0) - count
        self.states[new] = self.states.get(new, 0) + count

    def __bool__(self) -> bool:
        return self.duration_n != 0 or any(self.states.values())

    def columns(self) -> dict[str, str]:
        """The columns of a group's row that it can change."""
        timed = ("duration_n", "duration_s", "duration_ewma_s") if self.duration_n else ()
        changed = {*self.states, "total", *timed, "version", "changed_ms"}
        return {name: kind for name, kind in GROUP_COLUMNS.items() if name in changed}


class Heard(NamedTuple):
    """Contact with the reporters before a report, which says whether its finished tasks are work of now.

    `before_ms`: time of the reporter's report before this one; 0 for a new reporter. `all_the_time`: False after a
    silence of all reporters, which is no time of work. `believed_s`: most seconds of timed work that count as done
    now; more was done earlier, unheard. If it is finite, only tasks that were timed one by one count.
    """

    before_ms: int = 0
    all_the_time: bool = True
    believed_s: float = math.inf


HEARD = Heard()
ESTIMATE_MS = 1000


class GroupIds(NamedTuple):
    """Ids of the rows of a prefix and a group; 0 without a row."""

    prefix: int
    group: int


def ensure_scope(project_id: int, run_id: int = 0, attempt: int = 0) -> int:
    """Return the id of the scope of a project's runs, or of the tasks of a run's attempt. Create it when missing."""
    key = {"project_id": project_id, "run_id": run_id, "attempt": attempt}
    found = Scope.objects.filter(**key).values_list("pk", flat=True)
    pk = found.first()
    if pk is None:
        Scope.objects.bulk_create([Scope(**key)], ignore_conflicts=True)
        pk = found.get()
    return pk


def shift(scope: Scope, deltas: Mapping[GroupName, Delta], now_ms: int) -> None:
    """Change the counters of a locked scope by `{(prefix, group): Delta}`, and write its row."""
    rows = CounterRows(scope)
    rows.read(deltas)
    rows.shift(deltas, now_ms, ids=False)


def shift_project(project_id: int, deltas: Mapping[GroupName, Delta], now_ms: int) -> None:
    """Lock the scope of a project's runs, created when missing, and change its counters as `shift` does.

    One message locks and reads, another writes: every change of a run's status waits for this lock.
    """
    scope, prefixes, groups = counter_rows.lock_project(project_id, deltas.keys())
    if scope is None:
        shift(counter_rows.lock_scope(ensure_scope(project_id)), deltas, now_ms)
        return
    rows = CounterRows(scope)
    rows.prefixes |= prefixes
    rows.groups |= groups
    rows.shift(deltas, now_ms, ids=False)


class CounterRows:
    """Counters of prefixes and groups of a locked scope, read, changed and written in bulk."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.prefixes = defaultdict[str, PrefixRow](PrefixRow)
        self.groups = defaultdict[GroupName, GroupRow](GroupRow)

    def read(self, group_names: Collection[GroupName]) -> None:
        """Read rows of prefixes and groups; those that are missing have the id 0."""
        more = [group_name for group_name in group_names if group_name not in self.groups]
        new = {prefix for prefix, _ in more} - self.prefixes.keys()
        self.prefixes |= counter_rows.read_prefixes(self.scope.pk, new)
        self.groups |= self._load_groups(more)

    def ids(self, group_name: GroupName) -> GroupIds:
        return GroupIds(self.prefixes[group_name[0]].id, self.groups[group_name].id)

    def shift(self, deltas: Mapping[GroupName, Delta], now_ms: int, *, ids: bool = True, heard: Heard = HEARD) -> Delta:
        """Change the rows that were read by `deltas`, and write them with the scope's row. Call once.

        Missing prefixes and groups are created, and groups that lost their last task are deleted. `ids`: whether `ids`
        knows the created groups afterwards. Returns the sum of all deltas.
        """
        scope, names = self.scope, {prefix for prefix, _ in deltas}
        whole = self.count(deltas, now_ms, heard)
        if scope.run_id and self.is_estimate_due(now_ms):
            self.estimate(now_ms, counter_rows.read_active(scope.pk, PARTS))
        # Only runs can be removed: tasks are forgotten, and stay in the count.
        gone = [] if scope.run_id else [name for name in names if not self.prefixes[name].total]
        scope.prefixes -= len(gone)
        new = self._insert_prefixes(names)
        with bulk.together():
            self._update_prefixes(sorted(names - new))
            fresh = self._write_groups(sorted(deltas), whole.columns())
            bulk.delete("progress_taskprefix", [self.prefixes[name].id for name in gone])
            bulk.update("progress_scope", SCOPE_COLUMNS, [attrgetter(*SCOPE_COLUMNS, "id")(scope)])
        for group_name, made in self._load_groups(fresh if ids else ()).items():
            self.groups[group_name].id = made.id
        return whole

    def count(self, deltas: Mapping[GroupName, Delta], now_ms: int, heard: Heard = HEARD) -> Delta:
        """Change the rows in memory, and return the sum of all deltas."""
        scope, before = self.scope, Before.of(self.scope)
        if not heard.all_the_time:
            scope.quiet_ms = now_ms
        of_prefix: defaultdict[str, Delta] = defaultdict(Delta)
        for group_name, delta in deltas.items():
            of_prefix[group_name[0]].add(delta)
            group = self.groups[group_name]
            _count(group, delta, scope.version, now_ms)
            for state in GONE:  # tasks return that were forgotten before it was created again
                if (missing := -getattr(group, state)) > 0:
                    group.total += missing
                    setattr(group, state, 0)
            group.kept = any(_shown(group)) or (group.total > 0 and scope.groups + (not group.id) <= GROUPS_KEPT)
            more, prefix = group.kept - bool(group.id), self.prefixes[group_name[0]]
            prefix.groups += more
            scope.groups += more
            if more:  # the prefix's other counters may stay as they are
                prefix.version, prefix.changed_ms = scope.version, now_ms
        whole, all_finished = Delta(), 0
        for name, delta in of_prefix.items():
            whole.add(delta)
            prefix = self.prefixes[name]
            finished, prefix_before = _finished(prefix, delta, heard), Before.of(prefix)
            all_finished += finished
            _count(prefix, delta, scope.version, now_ms)
            _rate(prefix, finished, now_ms)
            _pace(prefix, prefix_before, delta, finished, scope.quiet_ms, before.rated_ms)
            if delta.bins:
                prefix.durations = added(prefix.durations, delta.bins)
            if not prefix.id:
                scope.prefixes += 1
                prefix.version, prefix.changed_ms = scope.version, now_ms
        _count(scope, whole, scope.version, now_ms)
        _rate(scope, all_finished, now_ms)
        _pace(scope, before, whole, all_finished, scope.quiet_ms, before.rated_ms)
        return whole

    def is_estimate_due(self, now_ms: int) -> bool:
        """Whether the time left is to be estimated: once a second, and less often with many prefixes, which cost."""
        shown = Shown.of(self.scope.time_left)
        return shown is None or now_ms - shown.at_ms >= ESTIMATE_MS + self.scope.prefixes

    def estimate(self, now_ms: int, prefixes: counter_rows.Prefixes) -> None:
        """Estimate the time left of a run's tasks, from these prefixes as stored and those that have changed."""
        scope, pace = self.scope, Pace.of(self.scope.pace)
        parts = [
            Part.of(row.pace, max(row.rated_ms, scope.quiet_ms), now_ms, row.total, unfinished(row), row.processing)
            for row in (prefixes | self.prefixes).values()
        ]
        left = time_left.of_all(parts, Part(pace, scope.total, unfinished(scope), scope.processing))
        scope.time_left = str(Shown(now_ms, pace.seconds, left).after(Shown.of(scope.time_left)))

    def _load_groups(self, group_names: Collection[GroupName]) -> counter_rows.Groups:
        known = [(self.prefixes[prefix].id, name, prefix) for prefix, name in group_names if self.prefixes[prefix].id]
        return counter_rows.read_groups(known)

    def _insert_prefixes(self, names: Iterable[str]) -> set[str]:
        """Returns those without a row before."""
        fresh = sorted(name for name in names if not self.prefixes[name].id)
        values = attrgetter(*PREFIX_COLUMNS)
        bulk.insert(
            "progress_taskprefix",
            {"name": "text", "scope_id": "bigint", **PREFIX_COLUMNS},
            [(name, self.scope.pk, *values(self.prefixes[name])) for name in fresh],
        )
        for name, made in counter_rows.read_prefixes(self.scope.pk, fresh).items():
            self.prefixes[name].id = made.id
        return set(fresh)

    def _update_prefixes(self, names: Iterable[str]) -> None:
        values = attrgetter(*PREFIX_COLUMNS, "id")
        changed = [prefix for name in names if (prefix := self.prefixes[name]).version == self.scope.version]
        bulk.update("progress_taskprefix", PREFIX_COLUMNS, [values(prefix) for prefix in changed])

    def _write_groups(self, group_names: Collection[GroupName], columns: Mapping[str, str]) -> list[GroupName]:
        """Returns those without a row before, of which the ids are not known."""
        fresh: list[GroupName] = []
        known: list[GroupRow] = []
        empty: list[GroupRow] = []
        for group_name in group_names:
            group = self.groups[group_name]
            if not group.id:
                if group.kept:
                    fresh.append(group_name)
            elif group.version == self.scope.version:
                (known if group.kept else empty).append(group)
        values = attrgetter(*GROUP_COLUMNS)
        bulk.insert(
            "progress_taskgroup",
            {"name": "text", "prefix_id": "bigint", **GROUP_COLUMNS},
            [
                (group_name[1], self.prefixes[group_name[0]].id, *values(self.groups[group_name]))
                for group_name in fresh
            ],
        )
        bulk.update("progress_taskgroup", columns, list(map(attrgetter(*columns, "id"), known)))
        bulk.delete("progress_taskgroup", [group.id for group in empty])
        for group in empty:
            group.id = 0
        return fresh


def _count(row: GroupRow | Scope, delta: Delta, version: int, now_ms: int) -> None:
    """Apply a delta to a row's counters."""
    if not delta:
        return
    for state, more in delta.states.items():
        setattr(row, state, getattr(row, state) + more)
        row.total += more
    row.duration_n += delta.duration_n
    row.duration_s += delta.duration_s
    if delta.duration_n > 0:  # the average of what was removed can't be taken out of a moving average
        mean_s = delta.duration_s / delta.duration_n
        row.duration_ewma_s = mean_s if row.duration_ewma_s is None else (row.duration_ewma_s + mean_s) / 2
    row.version = version
    row.changed_ms = now_ms


def unfinished(row: PrefixRow | Scope) -> int:
    """Live tasks that a worker can run."""
    return row.waiting + row.queued + row.processing


def _finished(prefix: PrefixRow, delta: Delta, heard: Heard) -> int:
    """Number of tasks that finished since the last report. Tasks already finished at the first report do not count."""
    finished = max(0, sum(delta.states.get(state, 0) for state in FINISHED)) if prefix.total else 0
    if math.isinf(heard.believed_s):
        return finished
    return min(finished, sum(delta.bins.values())) if delta.duration_s <= heard.believed_s else 0


def _rate(row: PrefixRow | Scope, finished: int, now_ms: int) -> None:
    """Update the rate windows: decay them, and add the finished tasks."""
    row.first_ms = row.first_ms or now_ms
    age_ms = now_ms - row.rated_ms
    row.finished_1m = decayed(row.finished_1m, age_ms, MINUTE_S) + finished
    row.finished_10m = decayed(row.finished_10m, age_ms, TEN_MINUTES_S) + finished
    row.rated_ms = now_ms


class Before(NamedTuple):
    """Columns of a row before a report."""

    running: int
    total: int
    rated_ms: int

    @classmethod
    def of(cls, row: PrefixRow | Scope) -> Self:
        return cls(row.processing, row.total, row.rated_ms)


def _pace(row: PrefixRow | Scope, before: Before, delta: Delta, finished: int, quiet_ms: int, reported_ms: int) -> None:
    """Update a row's pace, at the time of its rates.

    No work was done up to `quiet_ms`. `reported_ms`: time of the scope's report before this one, in which all numbers
    were as they were before now.
    """
    since_ms = max(before.rated_ms, quiet_ms)
    if not before.running:
        # Tasks that are shorter than the time between two reports finish without having been seen running.
        since_ms = max(since_ms, reported_ms) if finished else row.rated_ms
    seconds = max(0, row.rated_ms - since_ms) / 1000 if since_ms else 0.0
    added = max(0, row.total - before.total) if before.total else 0
    if not seconds and not finished:
        return
    changing_s = min(seconds, max(0, row.rated_ms - reported_ms) / 1000)
    running = before.running + (row.processing - before.running) / 2 * (changing_s / seconds if seconds else 1)
    timed, timed_s = (delta.duration_n, delta.duration_s) if finished else (0, 0.0)
    row.pace = str(Pace.of(row.pace).after(Step(seconds, finished, running, timed, timed_s, added)))


_shown = attrgetter(*SHOWN)


TASKS_MAX = 1_000_000
"""Task rows of a scope, and stored counts of reporters: at most so many of each."""
GROUPS_MAX = 200_000
GROUPS_KEPT = 20_000
"""Groups of a scope that stay when all their tasks are forgotten."""
PREFIXES_MAX = 10_000
"""Prefixes of a run's attempt that are counted one by one. `tracking.dask`, in users' programs, has the same number."""
OTHERS = "…"
"""The prefix in which such a program counts its further ones, for which there is always room."""


@dataclass(slots=True)
class BatchUpdate:
    """Collects the changes of one batch, while the row of its scope is locked."""

    scope: Scope
    reporter: Reporter
    now_ms: int
    counters: CounterRows
    receipt: Receipt = field(default_factory=Receipt)
    deltas: defaultdict[GroupName, Delta] = field(default_factory=lambda: defaultdict(Delta))
    new_prefixes: set[str] = field(default_factory=set)
    new_groups: set[GroupName] = field(default_factory=set)
    taken_over: Counter[int] = field(default_factory=Counter)
    """Live tasks that other reporters had reported before, by the reporter's id."""

    def is_released(self, state: TaskState, seq: int) -> bool:
        """Whether a live state is outdated because the reporter has ended since: the task is released."""
        ended_seq = self.reporter.ended_seq
        return ended_seq is not None and seq <= ended_seq and state in LIVE

    def reject(self, index: int, key: str, reason: str, entry_list: EntryList) -> None:
        self.receipt.rejected.append(Rejection(entry_list, index, key, reason))

    def exceeded_limit(self, group_name: GroupName) -> str:
        """The code of the limit that a new group would exceed. Empty if there is none; the group is then added."""
        prefix, group = self.counters.ids(group_name)
        new_prefix = not prefix and group_name[0] not in self.new_prefixes
        new_group = not group and group_name not in self.new_groups
        is_full = self.scope.prefixes + len(self.new_prefixes) >= PREFIXES_MAX
        if new_prefix and is_full and group_name[0] != OTHERS:
            return "too_many_prefixes"
        if new_group and self.scope.groups + len(self.new_groups) >= GROUPS_MAX:
            return "too_many_groups"
        if new_prefix:
            self.new_prefixes.add(group_name[0])
        if new_group:
            self.new_groups.add(group_name)
        return ""
