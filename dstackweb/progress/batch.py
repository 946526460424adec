"""What one batch changes while it is taken: the counters that it touches, and how much room its scope has left."""

from __future__ import annotations

from dataclasses import dataclass, field

from dstackweb.progress.counters import Book, Delta, Place
from dstackweb.progress.events import Receipt, Refusal, Where
from dstackweb.progress.models import Reporter, Scope
from dstackweb.progress.states import LIVE, TaskState

TASKS_MAX = 1_000_000
"""Tasks of a scope that are told of one by one, and reporters' counts that are remembered: of each so many."""
GROUPS_MAX = 200_000
PREFIXES_MAX = 2_000


@dataclass(slots=True)
class Taking:
    """One batch of a reporter, behind the row of its scope."""

    scope: Scope
    reporter: Reporter
    now_ms: int
    book: Book
    receipt: Receipt = field(default_factory=Receipt)
    deltas: dict[Place, Delta] = field(default_factory=dict)
    new_prefixes: set[str] = field(default_factory=set)
    new_groups: set[Place] = field(default_factory=set)

    def delta(self, place: Place) -> Delta:
        """What changes in a group."""
        found = self.deltas.get(place)
        if found is None:
            found = self.deltas[place] = Delta()
        return found

    def over(self, state: TaskState, seq: int) -> bool:
        """Whether the reporter has ended since it said that a task is so, and therefore the task is released."""
        ended_seq = self.reporter.ended_seq
        return ended_seq is not None and seq <= ended_seq and state in LIVE

    def refuse(self, index: int, key: str, reason: str, where: Where) -> None:
        """Leave out one entry."""
        self.receipt.refused.append(Refusal(index, key, reason, where))

    def room_for(self, place: Place) -> str:
        """Why a group can't be counted (a code), or nothing where it can: then a new one has its place."""
        prefix, group = self.book.ids(place)
        new_prefix = not prefix and place[0] not in self.new_prefixes
        new_group = not group and place not in self.new_groups
        if new_prefix and self.scope.prefixes + len(self.new_prefixes) >= PREFIXES_MAX:
            return "too_many_prefixes"
        if new_group and self.scope.groups + len(self.new_groups) >= GROUPS_MAX:
            return "too_many_groups"
        if new_prefix:
            self.new_prefixes.add(place[0])
        if new_group:
            self.new_groups.add(place)
        return ""
