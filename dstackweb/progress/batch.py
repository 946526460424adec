"""The changes of one batch while it is applied, and the limits of its scope."""

from __future__ import annotations

from dataclasses import dataclass, field

from dstackweb.progress.counters import CounterRows, Delta, GroupName
from dstackweb.progress.events import EntryList, Receipt, Rejection
from dstackweb.progress.models import Reporter, Scope
from dstackweb.progress.states import LIVE, TaskState

TASKS_MAX = 1_000_000
"""Task rows of a scope, and stored counts of reporters: at most so many of each."""
GROUPS_MAX = 200_000
PREFIXES_MAX = 2_000


@dataclass(slots=True)
class BatchUpdate:
    """Collects the changes of one batch, while the row of its scope is locked."""

    scope: Scope
    reporter: Reporter
    now_ms: int
    counters: CounterRows
    receipt: Receipt = field(default_factory=Receipt)
    deltas: dict[GroupName, Delta] = field(default_factory=dict)
    new_prefixes: set[str] = field(default_factory=set)
    new_groups: set[GroupName] = field(default_factory=set)

    def delta(self, group_name: GroupName) -> Delta:
        """The changes of a group, to be added to."""
        found = self.deltas.get(group_name)
        if found is None:
            found = self.deltas[group_name] = Delta()
        return found

    def is_released(self, state: TaskState, seq: int) -> bool:
        """Whether a live state is outdated because the reporter has ended since: the task is released."""
        ended_seq = self.reporter.ended_seq
        return ended_seq is not None and seq <= ended_seq and state in LIVE

    def reject(self, index: int, key: str, reason: str, entry_list: EntryList) -> None:
        """Note a rejected entry in the receipt."""
        self.receipt.rejected.append(Rejection(entry_list, index, key, reason))

    def exceeded_limit(self, group_name: GroupName) -> str:
        """The code of the limit that a new group would exceed. Empty if there is none; the group is then added."""
        prefix, group = self.counters.ids(group_name)
        new_prefix = not prefix and group_name[0] not in self.new_prefixes
        new_group = not group and group_name not in self.new_groups
        if new_prefix and self.scope.prefixes + len(self.new_prefixes) >= PREFIXES_MAX:
            return "too_many_prefixes"
        if new_group and self.scope.groups + len(self.new_groups) >= GROUPS_MAX:
            return "too_many_groups"
        if new_prefix:
            self.new_prefixes.add(group_name[0])
        if new_group:
            self.new_groups.add(group_name)
        return ""
