"""When an attempt is over: what was still to come of its tasks is released, and in time all of it goes.

The end is marked in the transaction that ends the attempt (`end`); from then on nothing is taken for its scope. All
else is done in small steps, each worth doing alone: whoever is killed leaves the rest to the next turn, and of two at
once the slower finds nothing left to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any

from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet, Sum

from dstackweb.progress import bulk
from dstackweb.progress.models import Reporter, ReporterCount, Scope, Task, TaskFailure, TaskGroup, TaskPrefix
from dstackweb.progress.states import CODES, LIVE, TaskState

ROWS_AT_ONCE = 5_000
MOST_STEPS = 100
"""Steps of one turn, so that it ends within the time that a task has."""
DAY_MS = 86_400_000
TASKS_KEPT_MS = 7 * DAY_MS
"""How long single tasks are kept after the end of their attempt, and all that is counted of an attempt that was
repeated."""
COUNTERS_KEPT_MS = 90 * DAY_MS
"""How long the last attempt's counters are kept after its end."""

IS_LIVE = Q.create([Q(**{f"{state}__gt": 0}) for state in LIVE], connector=Q.OR)
LIVE_CODES = tuple(CODES[state] for state in LIVE)


def end(attempts: Collection[tuple[int, int]], now_ms: int) -> int:
    """Mark the scopes of ended attempts (run, attempt); returns how many there were that had not been marked.

    Call behind the runs' rows, before anything that runs share: who reports tasks waits for nothing but a scope.
    """
    marked = 0
    for run_id, attempt in sorted(attempts):
        mine = Scope.objects.filter(run_id=run_id, attempt=attempt, ended_ms=None)
        marked += mine.update(ended_ms=now_ms, changed_ms=now_ms, version=F("version") + 1)
    return marked


def due() -> list[int]:
    """The scopes whose attempts have ended and that are not settled, the longest ended first."""
    unsettled = Scope.objects.filter(ended_ms__isnull=False, settled=False).order_by("ended_ms")
    return list(unsettled.values_list("pk", flat=True))


def settle(scope_id: int) -> bool:
    """Release what was live when the scope's attempt ended; returns False where there is more than one turn's work.

    What repeated reports were recognized by goes, too: none is taken any more.
    """
    scope = Scope.objects.filter(pk=scope_id, ended_ms__isnull=False, settled=False).first()
    if scope is None:
        return True
    return _ends_in(MOST_STEPS, _settle(scope))


def prune(now_ms: int) -> None:
    """Remove what is old: single tasks first, and then whole scopes. A turn's work at most."""
    _ends_in(MOST_STEPS, _prune(now_ms))


def _ends_in(most: int, steps: Iterator[None]) -> bool:
    """Do so many steps at most; returns whether that was all."""
    for _step in islice(steps, most):
        pass
    return next(steps, False) is False


def _settle(scope: Scope) -> Iterator[None]:
    for prefix_id in TaskPrefix.objects.filter(IS_LIVE, scope=scope).order_by("pk").values_list("pk", flat=True):
        yield from _release(scope, prefix_id)
    yield from _delete_counted(scope.pk, "tasks", Task.objects.filter(scope=scope, state=CODES[TaskState.FORGOTTEN]))
    of_counts = Reporter.objects.filter(Exists(ReporterCount.objects.filter(reporter=OuterRef("pk"))), scope=scope)
    for reporter_id in of_counts.values_list("pk", flat=True):
        yield from _delete_counted(scope.pk, "counted", ReporterCount.objects.filter(reporter=reporter_id))
    Scope.objects.filter(pk=scope.pk).update(settled=True, version=F("version") + 1)


def _release(scope: Scope, prefix_id: int) -> Iterator[None]:
    """Release the live tasks of many groups at a time: first their rows, and then all counters in one transaction."""
    groups = TaskGroup.objects.filter(IS_LIVE, prefix=prefix_id)
    for chosen in _chunks(groups):
        for tasks in _chunks(Task.objects.filter(group__in=chosen, state__in=LIVE_CODES)):
            Task.objects.filter(pk__in=tasks).update(state=CODES[TaskState.RELEASED], since_ms=scope.ended_ms)
            yield
        with transaction.atomic():
            _release_counts(scope.pk, prefix_id, chosen)
        yield


def _release_counts(scope_id: int, prefix_id: int, groups: Sequence[int]) -> None:
    """What is live in these groups is released in them, in their prefix and in the scope."""
    mine = Scope.objects.filter(pk=scope_id)
    mine.update(version=F("version") + 1)
    version, ended_ms = mine.values_list("version", "ended_ms").get()
    changed: dict[str, Any] = {"version": version, "changed_ms": ended_ms}
    live = TaskGroup.objects.filter(IS_LIVE, pk__in=groups)
    sums = live.aggregate(**{state.value: Sum(state.value, default=0) for state in LIVE})
    released = F("released") + F("processing") + F("queued") + F("no_worker") + F("waiting")
    live.update(released=released, **{state.value: 0 for state in LIVE}, **changed)
    shifted = {name: F(name) - count for name, count in sums.items()}
    for rows in (TaskPrefix.objects.filter(pk=prefix_id), mine):
        rows.update(released=F("released") + sum(sums.values()), **shifted, **changed)


def _prune(now_ms: int) -> Iterator[None]:
    old = Scope.objects.filter(ended_ms__lt=now_ms - TASKS_KEPT_MS, settled=True)
    for pk in old.filter(tasks__gt=0).values_list("pk", flat=True):
        yield from _delete_counted(pk, "tasks", Task.objects.filter(scope=pk))
    later = Scope.objects.filter(run_id=OuterRef("run_id"), attempt__gt=OuterRef("attempt"))
    gone = old.filter(Q(Exists(later)) | Q(ended_ms__lt=now_ms - COUNTERS_KEPT_MS))
    for pk in gone.values_list("pk", flat=True):
        yield from _delete_scope(pk)


def _delete_scope(scope_id: int) -> Iterator[None]:
    """All rows of a scope that has no tasks any more, from below: Django would look for tasks among everybody's."""
    prefixes = TaskPrefix.objects.filter(scope=scope_id)
    yield from _delete(TaskFailure.objects.filter(scope=scope_id))
    for prefix_id in prefixes.values_list("pk", flat=True):
        yield from _delete(TaskGroup.objects.filter(prefix=prefix_id))
    yield from _delete(prefixes)
    yield from _delete(Reporter.objects.filter(scope=scope_id))
    yield from _delete(Scope.objects.filter(pk=scope_id))


def _delete_counted(scope_id: int, column: str, rows: QuerySet[Any]) -> Iterator[None]:
    """Delete rows whose number the scope keeps."""
    for chosen in _chunks(rows):
        with transaction.atomic():
            Scope.objects.filter(pk=scope_id).update(version=F("version") + 1)
            gone = rows.model._default_manager.filter(pk__in=chosen).delete()[0]
            Scope.objects.filter(pk=scope_id).update(**{column: F(column) - gone})
        yield


def _delete(rows: QuerySet[Any]) -> Iterator[None]:
    for chosen in _chunks(rows):
        bulk.delete(rows.model._meta.db_table, chosen)
        yield


def _chunks(rows: QuerySet[Any]) -> Iterator[list[int]]:
    """The ids of rows, found by one statement: nothing is added to a scope that has ended."""
    ids = list(rows.order_by().values_list("pk", flat=True))
    for first in range(0, len(ids), ROWS_AT_ONCE):
        yield ids[first : first + ROWS_AT_ONCE]
