"""Counters for tests that read: rows as writers leave them."""

from __future__ import annotations

import json
from operator import attrgetter

from dstackweb.accounts.models import Project
from dstackweb.progress.counter_rows import PREFIX_COLUMNS, PrefixRow
from dstackweb.progress.counters import CounterRows
from dstackweb.progress.models import RateCounters, Scope, StateCounters, TaskGroup, TaskPrefix
from dstackweb.progress.pace import Pace, Step
from dstackweb.progress.states import FINISHED, TaskState

SEEN_S = 60
"""How long the finished tasks of a prefix took, for its pace."""


def make_scope(project: Project, run_id: int = 0, attempt: int = 0, **fields: int) -> Scope:
    return Scope.objects.create(project=project, run_id=run_id, attempt=attempt, **fields)


def add_group(scope: Scope, prefix: str, group: str, now_ms: int = 0, **states: int) -> TaskGroup:
    """A group with so many tasks in each state, counted in its prefix and scope as well, and the time left of a run."""
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
            if all_finished := sum(getattr(row, state) for state in FINISHED):
                row.pace = json.loads(str(Pace().after(Step(SEEN_S, all_finished, row.processing))))
        row.save()
    if scope.run_id:
        _estimate(scope, now_ms)
    return found


def _estimate(scope: Scope, now_ms: int) -> None:
    """Note the time left, as the writer of the last report does."""
    rows = {}
    for prefix in TaskPrefix.objects.filter(scope=scope):
        values = dict(zip(PREFIX_COLUMNS, attrgetter(*PREFIX_COLUMNS)(prefix), strict=True))
        texts = {name: json.dumps(values[name]) for name in ("pace", "durations", "failing")}
        rows[prefix.name] = PrefixRow(prefix.pk, **{**values, **texts})
    counted = Scope(run_id=scope.run_id, pace=json.dumps(scope.pace), time_left="[]")
    for name in (*TaskState, "total"):
        setattr(counted, name, getattr(scope, name))
    CounterRows(counted).estimate(now_ms, rows)
    scope.time_left = json.loads(counted.time_left)
    scope.save()


def _count(row: StateCounters, states: dict[str, int], version: int, now_ms: int) -> None:
    for state, number in states.items():
        setattr(row, TaskState(state), getattr(row, state) + number)
    row.total += sum(states.values())
    row.version, row.changed_ms = version, now_ms
