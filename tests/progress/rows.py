"""Counters for tests that read: rows as writers leave them."""

from __future__ import annotations

from dstackweb.accounts.models import Project
from dstackweb.progress.models import RateCounters, Scope, StateCounters, TaskGroup, TaskPrefix
from dstackweb.progress.states import FINISHED, TaskState


def make_scope(project: Project, run_id: int = 0, attempt: int = 0, **fields: int) -> Scope:
    return Scope.objects.create(project=project, run_id=run_id, attempt=attempt, **fields)


def add_group(scope: Scope, prefix: str, group: str, now_ms: int = 0, **states: int) -> TaskGroup:
    """A group with so many tasks in each state, counted in its prefix and scope as well."""
    scope.version += 1
    of, made = TaskPrefix.objects.get_or_create(scope=scope, name=prefix, defaults={"first_ms": now_ms})
    found = TaskGroup(prefix=of, name=group)
    of.groups += 1
    scope.groups += 1
    scope.prefixes += made
    finished = sum(states.get(state, 0) for state in FINISHED)
    for row in (found, of, scope):
        _count(row, states, scope.version, now_ms)
        if isinstance(row, RateCounters):
            row.finished_1m += finished
            row.finished_10m += finished
            row.rated_ms = now_ms
        row.save()
    return found


def _count(row: StateCounters, states: dict[str, int], version: int, now_ms: int) -> None:
    for state, number in states.items():
        setattr(row, TaskState(state), getattr(row, state) + number)
    row.total += sum(states.values())
    row.version, row.changed_ms = version, now_ms
