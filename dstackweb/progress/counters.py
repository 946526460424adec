"""The counters of a scope, shifted by what has changed, in the transaction that records what changed.

A writer takes the scope's row first (`locked`), which all writers of that scope queue for; what it then reads of the
scope's prefixes, groups, reporters and tasks is the latest, and nobody else changes it before the commit.

A prefix and a scope keep counting what is forgotten, so that their bars never shrink. A group is deleted once all its
tasks are forgotten; should it come back, its own forgotten ones and durations begin anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from dstackweb.progress import bulk
from dstackweb.progress.estimate import MINUTE_S, TEN_MINUTES_S, decayed
from dstackweb.progress.models import Scope
from dstackweb.progress.states import FINISHED, SHOWN, TaskState

COUNTS = {
    **{state.value: "bigint" for state in TaskState}, "total": "bigint", "duration_n": "bigint", "duration_s": "float8",
    "duration_ewma_s": "float8", "version": "bigint", "changed_ms": "bigint",
}  # fmt: skip
RATED = {"first_ms": "bigint", "finished_1m": "float8", "finished_10m": "float8", "rated_ms": "bigint"}
OF_GROUP = dict(COUNTS)
OF_PREFIX = {**COUNTS, **RATED, "groups": "integer"}
OF_SCOPE = {**OF_PREFIX, "prefixes": "integer", "tasks": "integer", "counted": "integer"}

Place = tuple[str, str]
"""The names of a prefix and of a group of it."""


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

    def move(self, old: TaskState | None, new: TaskState, count: int = 1) -> None:
        """Tasks went from `old` (None: they are new) to `new`."""
        if old is not None:
            self.states[old] = self.states.get(old, 0) - count
        self.states[new] = self.states.get(new, 0) + count

    def __bool__(self) -> bool:
        return self.duration_n != 0 or any(self.states.values())

    def columns(self) -> dict[str, str]:
        """What of a group's row it changes, or may."""
        timed = ("duration_n", "duration_s", "duration_ewma_s") if self.duration_n else ()
        changed = {*self.states, "total", *timed, "version", "changed_ms"}
        return {name: kind for name, kind in OF_GROUP.items() if name in changed}


class Ids(NamedTuple):
    """The rows that count a group; 0 where there is none."""

    prefix: int
    group: int


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
    return _locked("id = %s", scope_id)


def locked_of_project(project_id: int) -> Scope:
    """Likewise the scope that counts a project's runs, made when missing."""
    try:
        return _locked("project_id = %s AND run_id = 0 AND attempt = 0", project_id)
    except Scope.DoesNotExist:
        return locked(scope_of(project_id))


def _locked(where: str, value: int) -> Scope:
    names = ", ".join(("id", "project_id", "run_id", "attempt", "ended_ms", "settled", *OF_SCOPE))
    statement = f"UPDATE progress_scope SET version = version + 1 WHERE {where} RETURNING {names}"
    for scope in Scope.objects.raw(statement, [value]):
        return scope
    raise Scope.DoesNotExist


def shift(scope: Scope, deltas: Mapping[Place, Delta], now_ms: int) -> None:
    """Change the counters of a locked scope by `{(prefix, group): Delta}`, and write its row."""
    book = Book(scope)
    book.read(deltas)
    book.shift(deltas, now_ms, ids=False)


class Book:
    """The counters of some prefixes and groups of a locked scope: read, changed and written, many at once."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.prefixes: dict[str, _Prefix] = {}
        self.groups: dict[Place, _Group] = {}

    def read(self, places: Collection[Place]) -> None:
        """Look up rows of prefixes and groups; what is missing is known to be so."""
        more = [place for place in places if place not in self.groups]
        names = {prefix for prefix, _ in more} - self.prefixes.keys()
        self.prefixes.update({name: _Prefix(id=0) for name in names} | self._found_prefixes(names))
        self.groups.update({place: _Group(id=0) for place in more} | self._found_groups(more))

    def ids(self, place: Place) -> Ids:
        """The rows of a group that was read."""
        return Ids(self.prefixes[place[0]].id, self.groups[place].id)

    def shift(self, deltas: Mapping[Place, Delta], now_ms: int, *, ids: bool = True) -> None:
        """Change what was read by `deltas`, and write it with the scope's row. To be done once.

        Prefixes and groups that are missing are made, and groups that lost their last task are deleted. `ids`: whether
        the groups that were made are wanted by their rows afterwards.
        """
        scope = self.scope
        whole = Delta()
        of_prefix: dict[str, Delta] = {}
        for place, delta in deltas.items():
            if (sums := of_prefix.get(place[0])) is None:
                sums = of_prefix[place[0]] = Delta()
            sums.add(delta)
            group = self.groups[place]
            _count(group, delta, scope.version, now_ms)
            if group.forgotten < 0:  # some are taken back that were forgotten before its last making
                group.total, group.forgotten = group.total - group.forgotten, 0
            more = _peopled(group) - bool(group.id)
            self.prefixes[place[0]].groups += more
            scope.groups += more
        finished = 0
        for name, delta in of_prefix.items():
            whole.add(delta)
            prefix = self.prefixes[name]
            more = _finished(prefix, delta)
            finished += more
            _count(prefix, delta, scope.version, now_ms)
            _rate(prefix, more, now_ms)
            if not prefix.id:
                scope.prefixes += 1
                prefix.version, prefix.changed_ms = scope.version, now_ms
        _count(scope, whole, scope.version, now_ms)
        _rate(scope, finished, now_ms)
        self._write_prefixes(sorted(of_prefix))
        self._write_groups(sorted(deltas), whole.columns(), ids)
        bulk.update("progress_scope", OF_SCOPE, [attrgetter(*OF_SCOPE, "id")(scope)])

    def _found_prefixes(self, names: Collection[str]) -> dict[str, _Prefix]:
        found = bulk.find(
            ", ".join(f"t.{column}" for column in ("name", "id", *OF_PREFIX)),
            "progress_taskprefix",
            "t.name = given.name AND t.scope_id = %s",
            {"name": "text"},
            [(name,) for name in names],
            self.scope.pk,
        )
        return {name: _Prefix(*row) for name, *row in found}

    def _found_groups(self, places: Collection[Place]) -> dict[Place, _Group]:
        known = [(self.prefixes[prefix].id, name, prefix) for prefix, name in places if self.prefixes[prefix].id]
        columns = ", ".join(f"t.{column}" for column in ("id", *OF_GROUP))
        found = bulk.find(
            f"given.prefix, t.name, {columns}",
            "progress_taskgroup",
            "t.prefix_id = given.prefix_id AND t.name = given.name",
            {"prefix_id": "bigint", "name": "text", "prefix": "text"},
            known,
        )
        return {(prefix, name): _Group(*row) for prefix, name, *row in found}

    def _write_prefixes(self, names: Collection[str]) -> None:
        values = attrgetter(*OF_PREFIX)
        fresh = [name for name in names if not self.prefixes[name].id]
        known = [prefix for name in names if (prefix := self.prefixes[name]).id and self._changed(prefix)]
        bulk.insert(
            "progress_taskprefix",
            {"name": "text", "scope_id": "bigint", **OF_PREFIX},
            [(name, self.scope.pk, *values(self.prefixes[name])) for name in fresh],
        )
        bulk.update("progress_taskprefix", OF_PREFIX, [(*values(prefix), prefix.id) for prefix in known])
        for name, made in self._found_prefixes(fresh).items():
            self.prefixes[name].id = made.id

    def _write_groups(self, places: Collection[Place], columns: Mapping[str, str], ids: bool) -> None:
        fresh: list[Place] = []
        known: list[_Group] = []
        empty: list[_Group] = []
        for place in places:
            group = self.groups[place]
            peopled = _peopled(group)
            if not group.id:
                if peopled:
                    fresh.append(place)
            elif self._changed(group):
                (known if peopled else empty).append(group)
        values = attrgetter(*OF_GROUP)
        bulk.insert(
            "progress_taskgroup",
            {"name": "text", "prefix_id": "bigint", **OF_GROUP},
            [(place[1], self.prefixes[place[0]].id, *values(self.groups[place])) for place in fresh],
        )
        bulk.update("progress_taskgroup", columns, list(map(attrgetter(*columns, "id"), known)))
        bulk.delete("progress_taskgroup", [group.id for group in empty])
        for group in empty:
            group.id = 0
        for place, made in self._found_groups(fresh if ids else ()).items():
            self.groups[place].id = made.id

    def _changed(self, row: _Group) -> bool:
        return row.version == self.scope.version


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


def _count(row: _Group | Scope, delta: Delta, version: int, now_ms: int) -> None:
    """What changed in a row's counters."""
    if not delta:
        return
    for state, more in delta.states.items():
        setattr(row, state, getattr(row, state) + more)
        row.total += more
    if delta.duration_n:
        mean_s = delta.duration_s / delta.duration_n
        row.duration_n += delta.duration_n
        row.duration_s += delta.duration_s
        row.duration_ewma_s = mean_s if row.duration_ewma_s is None else (row.duration_ewma_s + mean_s) / 2
    row.version = version
    row.changed_ms = now_ms


def _finished(prefix: _Prefix, delta: Delta) -> int:
    """How many tasks finished since the prefix was last told of. What had when it was first counted says nothing."""
    return max(0, sum(delta.states.get(state, 0) for state in FINISHED)) if prefix.total else 0


def _rate(row: _Prefix | Scope, finished: int, now_ms: int) -> None:
    """How fast its tasks finish: what it knew has faded since, and what finished now is added."""
    row.first_ms = row.first_ms or now_ms
    age_ms = now_ms - row.rated_ms
    row.finished_1m = decayed(row.finished_1m, age_ms, MINUTE_S) + finished
    row.finished_10m = decayed(row.finished_10m, age_ms, TEN_MINUTES_S) + finished
    row.rated_ms = now_ms


def _peopled(group: _Group) -> bool:
    """Whether any of its tasks is there still."""
    return any(_shown(group))


_shown = attrgetter(*SHOWN)
