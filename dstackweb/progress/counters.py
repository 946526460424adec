"""The counters of a scope, shifted by what has changed, in the transaction that records what changed.

A writer takes the scope's row first (`locked`), which all writers of that scope queue for; what it then reads of the
scope's prefixes, groups, reporters and tasks is the latest, and nobody else changes it before the commit.

A prefix and a scope keep counting what is forgotten, so that their bars never shrink. A group is deleted once all its
tasks are forgotten; should it come back, its own forgotten ones and durations begin anew.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from dstackweb.progress import bulk
from dstackweb.progress.models import Scope
from dstackweb.progress.states import FINISHED, SHOWN, TaskState

MINUTE_MS = 60_000.0

COUNTS = {
    **{state.value: "bigint" for state in TaskState}, "total": "bigint", "duration_n": "bigint", "duration_s": "float8",
    "duration_ewma_s": "float8", "version": "bigint", "changed_ms": "bigint",
}  # fmt: skip
RATED = {"first_ms": "bigint", "finished_1m": "float8", "finished_10m": "float8", "rated_ms": "bigint"}
OF_GROUP = dict(COUNTS)
OF_PREFIX = {**COUNTS, **RATED, "groups": "integer"}
OF_SCOPE = {**OF_PREFIX, "prefixes": "integer", "tasks": "integer", "counted": "integer"}


@dataclass(slots=True)
class Delta:
    """What changed in one group: tasks per state (less where they left it), and processing that was timed, seconds."""

    states: dict[TaskState, int] = field(default_factory=dict)
    duration_n: int = 0
    duration_s: float = 0.0

    def add(self, other: Delta) -> None:
        """Change it by another one, too."""
        for state, count in other.states.items():
            self.states[state] = self.states.get(state, 0) + count
        self.duration_n += other.duration_n
        self.duration_s += other.duration_s

    def move(self, old: TaskState | None, new: TaskState) -> None:
        """One task went from `old` (None: it is new) to `new`."""
        if old is not None:
            self.states[old] = self.states.get(old, 0) - 1
        self.states[new] = self.states.get(new, 0) + 1

    def __bool__(self) -> bool:
        return self.duration_n != 0 or any(self.states.values())


class Ids(NamedTuple):
    """The rows that count a group. No `group`: none of its tasks is there any more."""

    prefix: int
    group: int | None


def scope_of(project_id: int, run_id: int = 0, attempt: int = 0) -> int:
    """The id of the scope that counts a project's runs, or the tasks inside one attempt of a run; made when missing."""
    wanted = {"project_id": project_id, "run_id": run_id, "attempt": attempt}
    found = Scope.objects.filter(**wanted).values_list("pk", flat=True)
    pk = found.first()
    if pk is None:
        Scope.objects.bulk_create([Scope(**wanted)], ignore_conflicts=True)
        pk = found.get()
    return pk


def locked(scope_id: int) -> Scope:
    """The scope behind its row, with the version that this transaction makes. Raises Scope.DoesNotExist."""
    names = ", ".join(("id", "project_id", "run_id", "attempt", "ended_ms", "settled", *OF_SCOPE))
    statement = f"UPDATE progress_scope SET version = version + 1 WHERE id = %s RETURNING {names}"
    for scope in Scope.objects.raw(statement, [scope_id]):
        return scope
    raise Scope.DoesNotExist


def shift(scope: Scope, deltas: Mapping[tuple[str, str], Delta], now_ms: int) -> dict[tuple[str, str], Ids]:
    """Change the counters of a locked scope by `{(prefix, group): Delta}` and write its row; answers the groups' rows.

    Prefixes and groups that are missing are made, and groups that lost their last task are deleted.
    """
    prefixes = _prefixes(scope, {prefix for prefix, _ in deltas})
    groups = _groups(prefixes, deltas)
    whole, of_prefix = Delta(), {name: Delta() for name in prefixes}
    for place, delta in deltas.items():
        whole.add(delta)
        of_prefix[place[0]].add(delta)
        _count(groups[place], delta, scope.version, now_ms)
    for name, delta in of_prefix.items():
        _count(prefixes[name], delta, scope.version, now_ms)
        _rate(prefixes[name], delta, now_ms)
    _count(scope, whole, scope.version, now_ms)
    _rate(scope, whole, now_ms)
    scope.prefixes += sum(not prefix.id for prefix in prefixes.values())
    for (name, _), group in groups.items():
        more = _peopled(group) - bool(group.id)
        prefixes[name].groups += more
        scope.groups += more
    _write(scope, prefixes, groups)
    return {place: Ids(prefixes[place[0]].id, groups[place].id or None) for place in deltas}


@dataclass(slots=True)
class _Group:
    """A row as it is counted: the columns of OF_GROUP."""

    id: int
    memory: int = 0
    erred: int = 0
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


@dataclass(slots=True)
class _Prefix(_Group):
    """Likewise, the columns of OF_PREFIX."""

    first_ms: int = 0
    finished_1m: float = 0.0
    finished_10m: float = 0.0
    rated_ms: int = 0
    groups: int = 0


def _prefixes(scope: Scope, names: Collection[str]) -> dict[str, _Prefix]:
    """The rows of these prefixes; without an id those that are missing."""
    columns = ", ".join(f"p.{column}" for column in ("name", "id", *OF_PREFIX))
    found = bulk.find(
        f"SELECT {columns} FROM {{given}} JOIN progress_taskprefix p ON p.name = given.name WHERE p.scope_id = %s",
        {"name": "text"},
        [(name,) for name in names],
        scope.pk,
    )
    rows = {name: _Prefix(*row) for name, *row in found}
    return {name: rows.get(name) or _Prefix(id=0) for name in sorted(names)}


def _groups(prefixes: Mapping[str, _Prefix], places: Collection[tuple[str, str]]) -> dict[tuple[str, str], _Group]:
    """The rows of these groups; without an id those that are missing."""
    known = [(prefixes[prefix].id, name, prefix) for prefix, name in places if prefixes[prefix].id]
    columns = ", ".join(f"g.{column}" for column in ("id", *OF_GROUP))
    found = bulk.find(
        f"SELECT given.prefix, g.name, {columns} FROM {{given}}"
        " JOIN progress_taskgroup g ON g.prefix_id = given.prefix_id AND g.name = given.name",
        {"prefix_id": "bigint", "name": "text", "prefix": "text"},
        known,
    )
    rows = {(prefix, name): _Group(*row) for prefix, name, *row in found}
    return {place: rows.get(place) or _Group(id=0) for place in sorted(places)}


def _count(row: _Group | Scope, delta: Delta, version: int, now_ms: int) -> None:
    """What changed in a row's counters."""
    if not delta:
        return
    for state, more in delta.states.items():
        setattr(row, state, getattr(row, state) + more)
    row.total += sum(delta.states.values())
    if delta.duration_n:
        mean_s = delta.duration_s / delta.duration_n
        row.duration_n += delta.duration_n
        row.duration_s += delta.duration_s
        row.duration_ewma_s = mean_s if row.duration_ewma_s is None else (row.duration_ewma_s + mean_s) / 2
    row.version = version
    row.changed_ms = now_ms


def _rate(row: _Prefix | Scope, delta: Delta, now_ms: int) -> None:
    """How fast its tasks finish: what it knew has faded since, and what finished now is added."""
    row.first_ms = row.first_ms or now_ms
    if not delta:
        return
    age = max(0, now_ms - row.rated_ms) / MINUTE_MS
    finished = max(0, sum(delta.states.get(state, 0) for state in FINISHED))
    row.finished_1m = row.finished_1m * math.exp(-age) + finished
    row.finished_10m = row.finished_10m * math.exp(-age / 10) + finished
    row.rated_ms = now_ms


def _peopled(group: _Group) -> bool:
    """Whether any of its tasks is there still."""
    return any(getattr(group, state) for state in SHOWN)


def _write(scope: Scope, prefixes: Mapping[str, _Prefix], groups: Mapping[tuple[str, str], _Group]) -> None:
    """Write rows that changed, make those that are missing (which gives them their ids), delete empty groups."""
    version = scope.version
    values = attrgetter(*OF_PREFIX)
    fresh = [(name, scope.pk, *values(prefix)) for name, prefix in prefixes.items() if not prefix.id]
    changed = [prefix for prefix in prefixes.values() if prefix.id and prefix.version == version]
    bulk.insert("progress_taskprefix", {"name": "text", "scope_id": "bigint", **OF_PREFIX}, fresh)
    bulk.update("progress_taskprefix", OF_PREFIX, [(*values(prefix), prefix.id) for prefix in changed])
    if fresh:
        for name, made in _prefixes(scope, [row[0] for row in fresh]).items():
            prefixes[name].id = made.id

    values = attrgetter(*OF_GROUP)
    rows = [
        (name, prefixes[prefix].id, *values(group))
        for (prefix, name), group in groups.items()
        if not group.id and _peopled(group)
    ]
    known = [group for group in groups.values() if group.id and group.version == version]
    empty = [group for group in known if not _peopled(group)]
    bulk.insert("progress_taskgroup", {"name": "text", "prefix_id": "bigint", **OF_GROUP}, rows)
    bulk.update("progress_taskgroup", OF_GROUP, [(*values(group), group.id) for group in known if _peopled(group)])
    bulk.delete("progress_taskgroup", [group.id for group in empty])
    for group in empty:
        group.id = 0
    if rows:
        missing = [place for place, group in groups.items() if not group.id and _peopled(group)]
        for place, stored in _groups(prefixes, missing).items():
            groups[place].id = stored.id
    bulk.update("progress_scope", OF_SCOPE, [attrgetter(*OF_SCOPE, "id")(scope)])
