"""What a Dask scheduler's task groups were told to be, and what changed since. Pure: it only reads plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from dstackweb.tracking.entries import fitting

GROUPS_MAX = 100_000
"""Names of groups that are told by themselves; what comes later counts together, in one group of its prefix."""
PREFIXES_MAX = 1_900
FURTHER = "…"

STATES = {
    "memory": "memory", "erred": "erred", "released": "released", "processing": "processing", "queued": "queued",
    "no-worker": "no_worker", "waiting": "waiting", "forgotten": "forgotten",
}  # fmt: skip
"""Dask's states, as the server names them. One that is not here counts as waiting, so that totals stay right."""

Name = tuple[str, str]
"""A prefix and a group, as they are told."""
Label = tuple[str, str, dict[str, int], int, float]
"""Prefix, group, states, how many were timed and their seconds in all, as `Sender.count` takes them."""


class Prefix(Protocol):
    """Of `distributed.scheduler.TaskPrefix`."""

    @property
    def name(self) -> str: ...


class Group(Protocol):
    """Of `distributed.scheduler.TaskGroup`: one object lives until all of its tasks are forgotten, and a later group
    of the same name is another object."""

    @property
    def name(self) -> object:
        """The first item of a tuple key, whatever it is; else text."""

    @property
    def prefix(self) -> Prefix: ...
    @property
    def states(self) -> Mapping[str, int]: ...
    @property
    def all_durations(self) -> Mapping[str, float]: ...


@dataclass(slots=True)
class Standing:
    """What a live group object has added to its name's sum so far."""

    name: Name
    states: dict[str, int]
    seconds: float


@dataclass(slots=True)
class Sum:
    """All that was ever under one name: its group objects, those that are gone included."""

    states: dict[str, int]
    timed: int = 0
    seconds: float = 0.0

    def shown(self) -> dict[str, int]:
        """The states that it has tasks in."""
        return {state: n for state, n in self.states.items() if n}


class Ledger:
    """Turns the groups that moved into absolute counts per name, which never lose what Dask has let go of.

    Not thread-safe: it lives where the groups do, on the scheduler's loop.
    """

    def __init__(self, groups_max: int = GROUPS_MAX, prefixes_max: int = PREFIXES_MAX) -> None:
        self.dirty: dict[Group, int] = {}
        """Groups that moved, the longest waiting first, with how many of their tasks were timed meanwhile."""
        self._standing: dict[Group, Standing] = {}
        self._sums: dict[Name, Sum] = {}
        self._prefixes: set[str] = set()
        self._groups_max = groups_max
        self._prefixes_max = prefixes_max

    def attach(self, groups: Iterable[Group]) -> None:
        """Begin with groups that are there already: how often they were timed is unknown, so only later times count."""
        for group in groups:
            self._stand(group, _seconds(group))
            self.dirty.setdefault(group, 0)

    def look_over(self, groups: Iterable[Group]) -> None:
        """Find what no transition told of, such as scattered data. Some of `groups` may be gone meanwhile."""
        for group in groups:
            standing = self._standing.get(group)
            if group not in self.dirty and (standing.states != group.states if standing else _alive(group.states)):
                self.dirty[group] = 0

    def collect(self, limit: int | None = None) -> list[Label]:
        """The counts of at most `limit` dirty groups, or of all; they are clean then."""
        changed: dict[Name, Sum] = {}
        for group in list(islice(self.dirty, limit)):
            timed = self.dirty.pop(group)
            standing = self._standing.get(group) or self._stand(group, 0.0)
            changed[standing.name] = self._add(group, standing, timed)
        return [(*name, total.shown(), total.timed, total.seconds) for name, total in changed.items()]

    def name_of(self, group: Group) -> Name:
        """The prefix and group under which it is told."""
        standing = self._standing.get(group)
        return standing.name if standing else self._name(group)

    def _stand(self, group: Group, seconds: float) -> Standing:
        name = self._name(group)
        self._prefixes.add(name[0])
        self._sums.setdefault(name, Sum({}))
        self._standing[group] = standing = Standing(name, {}, seconds)
        return standing

    def _add(self, group: Group, standing: Standing, timed: int) -> Sum:
        total = self._sums[standing.name]
        now, was = dict(group.states), standing.states
        for state, n in now.items():
            if n != (before := was.get(state, 0)):
                told = STATES.get(state, "waiting")
                total.states[told] = total.states.get(told, 0) + n - before
        if timed:
            seconds = _seconds(group)
            total.timed += timed
            total.seconds += max(0.0, seconds - standing.seconds)
            standing.seconds = seconds
        if _alive(now):
            standing.states = now
        else:  # the scheduler has dropped it, or is about to: nothing more happens to this object
            del self._standing[group]
        return total

    def _name(self, group: Group) -> Name:
        prefix, name = fitting(group.prefix.name), fitting(group.name)
        if prefix not in self._prefixes and len(self._prefixes) >= self._prefixes_max:
            return FURTHER, FURTHER
        if (prefix, name) not in self._sums and len(self._sums) >= self._groups_max:
            return prefix, FURTHER
        return prefix, name


def _alive(states: Mapping[str, int]) -> bool:
    return any(n for state, n in states.items() if state != "forgotten")


def _seconds(group: Group) -> float:
    return group.all_durations.get("compute", 0.0)
