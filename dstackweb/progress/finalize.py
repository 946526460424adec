"""After the end of an attempt: release its live tasks, and later delete its rows.

The transaction that ends the attempt marks its scope (`end`), which then accepts no more reports. Everything else is
done in small independent steps: after an interruption the next call continues, and concurrent calls do no harm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet, Sum

from dstackweb.lib import bulk
from dstackweb.progress.models import Reporter, ReporterCount, Scope, Task, TaskFailure, TaskGroup, TaskPrefix
from dstackweb.progress.states import CODES, GONE_CODES, LIVE, LIVE_CODES, TaskState

ROWS_AT_ONCE = 5_000
MOST_STEPS = 100
"""Steps of one call, so that it ends within the time limit of a background task."""
DAY_MS = 86_400_000
TASKS_KEPT_MS = settings.DSTACKWEB_TASKS_DAYS * DAY_MS
"""How long task rows are kept after the end of their attempt, and all counters of attempts that were retried."""
COUNTERS_KEPT_MS = settings.DSTACKWEB_PROGRESS_DAYS * DAY_MS
"""How long the counters of a run's last attempt are kept after its end."""

IS_LIVE = Q.create([Q(**{f"{state}__gt": 0}) for state in LIVE], connector=Q.OR)


def end(attempts: Collection[tuple[int, int]], now_ms: int) -> int:
    """Mark the scopes of ended attempts (run, attempt). Returns how many were newly marked.

    Lock the runs' rows first, and rows shared by runs afterwards: reports lock only a scope.
    """
    marked = 0
    for run_id, attempt in sorted(attempts):
        mine = Scope.objects.filter(run_id=run_id, attempt=attempt, ended_ms=None)
        marked += mine.update(ended_ms=now_ms, changed_ms=now_ms, version=F("version") + 1)
    return marked


def expire(run_ids: Collection[int]) -> None:
    """Have the progress of removed runs pruned, in the same small steps, as if their attempts had ended long ago."""
    for run_id in sorted(run_ids):
        Scope.objects.filter(run_id=run_id).update(ended_ms=0)


def due() -> list[int]:
    """Ids of scopes whose attempts have ended and that are not settled, oldest first."""
    unsettled = Scope.objects.filter(ended_ms__isnull=False, settled=False).order_by("ended_ms")
    return list(unsettled.values_list("pk", flat=True))


def settle(scope_id: int) -> bool:
    """Release the tasks that were live when the scope's attempt ended. Returns False when steps remain.

    Also deletes the rows that detect repeated reports, since no more reports are accepted.
    """
    scope = Scope.objects.filter(pk=scope_id, ended_ms__isnull=False, settled=False).first()
    if scope is None:
        return True
    return _ends_in(MOST_STEPS, _settle(scope))


def prune(now_ms: int) -> bool:
    """Delete old task rows and old scopes, in at most MOST_STEPS steps. Returns False when steps remain."""
    return _ends_in(MOST_STEPS, _prune(now_ms))


def waiting(now_ms: int, most: int) -> int:
    """How many attempts have rows to delete; at most `most`."""
    return min(most, _with_old_tasks(now_ms)[:most].count() + _gone(now_ms).filter(tasks=0)[:most].count())


def _ends_in(most: int, steps: Iterator[None]) -> bool:
    """Do at most `most` steps. Returns whether none remain."""
    for _step in islice(steps, most):
        pass
    return next(steps, False) is False


def _settle(scope: Scope) -> Iterator[None]:
    for prefix_id in TaskPrefix.objects.filter(IS_LIVE, scope=scope).order_by("pk").values_list("pk", flat=True):
        yield from _release(scope, prefix_id)
    yield from _delete_counted(scope.pk, "tasks", Task.objects.filter(scope=scope, state__in=GONE_CODES))
    of_counts = Reporter.objects.filter(Exists(ReporterCount.objects.filter(reporter=OuterRef("pk"))), scope=scope)
    for reporter_id in of_counts.values_list("pk", flat=True):
        yield from _delete_counted(scope.pk, "counted", ReporterCount.objects.filter(reporter=reporter_id))
    Scope.objects.filter(pk=scope.pk).update(settled=True, version=F("version") + 1)


def _release(scope: Scope, prefix_id: int) -> Iterator[None]:
    """Release the live tasks of many groups at a time: first their rows, then all counters in one transaction."""
    groups = TaskGroup.objects.filter(IS_LIVE, prefix=prefix_id)
    for chosen in _chunks(groups):
        for tasks in _chunks(Task.objects.filter(group__in=chosen, state__in=LIVE_CODES)):
            Task.objects.filter(pk__in=tasks).update(state=CODES[TaskState.RELEASED], since_ms=scope.ended_ms)
            yield
        with transaction.atomic():
            _release_counts(scope.pk, prefix_id, chosen)
        yield


def _release_counts(scope_id: int, prefix_id: int, groups: Sequence[int]) -> None:
    """Move the live tasks of these groups to released, in groups, prefix and scope."""
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
    for pk in _with_old_tasks(now_ms).values_list("pk", flat=True):
        yield from _delete_counted(pk, "tasks", Task.objects.filter(scope=pk))
    for pk in _gone(now_ms).values_list("pk", flat=True):
        yield from _delete_scope(pk)


def _with_old_tasks(now_ms: int) -> QuerySet[Scope]:
    return Scope.objects.filter(ended_ms__lt=now_ms - TASKS_KEPT_MS, settled=True, tasks__gt=0)


def _gone(now_ms: int) -> QuerySet[Scope]:
    """Old scopes without a use: of attempts that were retried, and of any attempt later."""
    old = Scope.objects.filter(ended_ms__lt=now_ms - TASKS_KEPT_MS, settled=True)
    later = Scope.objects.filter(run_id=OuterRef("run_id"), attempt__gt=OuterRef("attempt"))
    return old.filter(Q(Exists(later)) | Q(ended_ms__lt=now_ms - COUNTERS_KEPT_MS))


def _delete_scope(scope_id: int) -> Iterator[None]:
    """Delete all rows of a scope without tasks, children first: Django's cascade would search all task rows."""
    prefixes = TaskPrefix.objects.filter(scope=scope_id)
    yield from _delete(TaskFailure.objects.filter(scope=scope_id))
    for prefix_id in prefixes.values_list("pk", flat=True):
        yield from _delete(TaskGroup.objects.filter(prefix=prefix_id))
    yield from _delete(prefixes)
    yield from _delete(Reporter.objects.filter(scope=scope_id))
    yield from _delete(Scope.objects.filter(pk=scope_id))


def _delete_counted(scope_id: int, column: str, rows: QuerySet[Any]) -> Iterator[None]:
    """Delete rows whose number is stored in the scope."""
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
    """The ids of rows, read by one statement: an ended scope gets no new rows."""
    ids = list(rows.order_by().values_list("pk", flat=True))
    for first in range(0, len(ids), ROWS_AT_ONCE):
        yield ids[first : first + ROWS_AT_ONCE]
