"""Absolute counts of a Dask scheduler's task groups, from the groups that changed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from dstackweb.tracking.entries import shorten_name

GROUPS_MAX = 100_000
"""Groups that are reported individually. Later ones are counted together, in one group of their prefix."""
PREFIXES_MAX = 1_900
OTHERS = "…"

STATES = {
    "memory": "memory", "erred": "erred", "released": "released", "processing": "processing", "queued": "queued",
    "no-worker": "no_worker", "waiting": "waiting", "forgotten": "forgotten",
}  # fmt: skip
"""Dask's states and the server's names for them. An unknown state counts as waiting, which keeps totals right."""

GroupName = tuple[str, str]
"""Prefix and group, as reported."""
CountArgs = tuple[str, str, dict[str, int], int, float]
"""Arguments of `Sender.count`: prefix, group, states, number of timed tasks, their total seconds."""


class DaskPrefix(Protocol):
    """The part of `distributed.scheduler.TaskPrefix` that is read."""

    @property
    def name(self) -> str: ...


class DaskGroup(Protocol):
    """Of `distributed.scheduler.TaskGroup`: one object lives until all of its tasks are forgotten, and a later group
    of the same name is another object."""

    @property
    def name(self) -> object:
        """The first item of a tuple key, whatever it is; else text."""

    @property
    def prefix(self) -> DaskPrefix: ...
    @property
    def states(self) -> Mapping[str, int]: ...
    @property
    def all_durations(self) -> Mapping[str, float]: ...


@dataclass(slots=True)
class Contribution:
    """What a live group object has added to the totals of its name so far."""

    name: GroupName
    states: dict[str, int]
    seconds: float


@dataclass(slots=True)
class Totals:
    """Totals of one name over all its group objects, including dropped ones."""

    states: dict[str, int]
    timed: int = 0
    seconds: float = 0.0

    def nonzero(self) -> dict[str, int]:
        """The states that have tasks."""
        return {state: n for state, n in self.states.items() if n}


class GroupCounter:
    """Turns changed groups into absolute counts per name, which keep what Dask has dropped.

    Not thread-safe: use it on the scheduler's event loop only.
    """

    def __init__(self, groups_max: int = GROUPS_MAX, prefixes_max: int = PREFIXES_MAX) -> None:
        self.dirty: dict[DaskGroup, int] = {}
        """Changed groups, longest waiting first, with the number of tasks timed since."""
        self._contributions: dict[DaskGroup, Contribution] = {}
        self._totals: dict[GroupName, Totals] = {}
        self._prefixes: set[str] = set()
        self._groups_max = groups_max
        self._prefixes_max = prefixes_max

    def attach(self, groups: Iterable[DaskGroup]) -> None:
        """Start with existing groups. Their number of timed tasks is unknown, so only later durations count."""
        for group in groups:
            self._add_contribution(group, _seconds(group))
            self.dirty.setdefault(group, 0)

    def mark_changed(self, groups: Iterable[DaskGroup]) -> None:
        """Mark groups that changed without a transition, such as scattered data. Some may have been dropped since."""
        for group in groups:
            contribution = self._contributions.get(group)
            if group not in self.dirty and (
                contribution.states != group.states if contribution else _has_live(group.states)
            ):
                self.dirty[group] = 0

    def collect(self, limit: int | None = None) -> list[CountArgs]:
        """Counts of at most `limit` dirty groups (None: all), which become clean."""
        changed: dict[GroupName, Totals] = {}
        for group in list(islice(self.dirty, limit)):
            timed = self.dirty.pop(group)
            contribution = self._contributions.get(group) or self._add_contribution(group, 0.0)
            changed[contribution.name] = self._add_changes(group, contribution, timed)
        return [(*name, total.nonzero(), total.timed, total.seconds) for name, total in changed.items()]

    def reported_name(self, group: DaskGroup) -> GroupName:
        """The prefix and group name under which a group is reported."""
        contribution = self._contributions.get(group)
        return contribution.name if contribution else self._name(group)

    def _add_contribution(self, group: DaskGroup, seconds: float) -> Contribution:
        name = self._name(group)
        self._prefixes.add(name[0])
        self._totals.setdefault(name, Totals({}))
        self._contributions[group] = contribution = Contribution(name, {}, seconds)
        return contribution

    def _add_changes(self, group: DaskGroup, contribution: Contribution, timed: int) -> Totals:
        total = self._totals[contribution.name]
        now, was = dict(group.states), contribution.states
        for state, n in now.items():
            if n != (before := was.get(state, 0)):
                reported = STATES.get(state, "waiting")
                total.states[reported] = total.states.get(reported, 0) + n - before
        if timed:
            seconds = _seconds(group)
            total.timed += timed
            total.seconds += max(0.0, seconds - contribution.seconds)
            contribution.seconds = seconds
        if _has_live(now):
            contribution.states = now
        else:  # the scheduler drops this object: it changes no more
            del self._contributions[group]
        return total

    def _name(self, group: DaskGroup) -> GroupName:
        prefix, name = shorten_name(group.prefix.name), shorten_name(group.name)
        if prefix not in self._prefixes and len(self._prefixes) >= self._prefixes_max:
            return OTHERS, OTHERS
        if (prefix, name) not in self._totals and len(self._totals) >= self._groups_max:
            return prefix, OTHERS
        return prefix, name


def _has_live(states: Mapping[str, int]) -> bool:
    return any(n for state, n in states.items() if state != "forgotten")


def _seconds(group: DaskGroup) -> float:
    return group.all_durations.get("compute", 0.0)
