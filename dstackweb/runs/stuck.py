"""The waiting runs that no end of another run brings forward, for forecasts of their project's progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from django.db.models import QuerySet

from dstackweb.accounts.models import Project
from dstackweb.progress.selectors import ProgressBar, Stuck
from dstackweb.progress.states import TaskState
from dstackweb.runs import selectors
from dstackweb.runs.codes import WaitReason, is_permanent
from dstackweb.runs.models import Queue, QueueCount, Run, Verdict
from dstackweb.runs.notification_codes import QueueStuck
from dstackweb.runs.prefix_counters import prefix_and_group
from dstackweb.runs.states import RunStatus

MOST = 1000
"""Stuck runs whose prefixes are read."""


@dataclass(frozen=True)
class StuckRuns:
    """Of a project: in all, and by prefix, as far as these were read."""

    total: Stuck
    by_prefix: Mapping[str, Stuck]
    is_complete: bool

    def of(self, bar: ProgressBar) -> Stuck:
        """Those in a bar of the project's runs; the totals' bar has no name."""
        if not bar.name:
            return self.total
        known = self.by_prefix.get(bar.name, Stuck())
        queued = bar.counts[TaskState.QUEUED]
        if self.is_complete or not queued:
            return known
        impossible = min(known.impossible, queued)
        # Which are paused was not read: all, where nothing else waits, else as many as there may be.
        return Stuck(min(queued - impossible, self.total.paused), impossible)


@dataclass(frozen=True)
class StuckQueue:
    """A queue whose waiting runs can't start before someone does something, and how many these are."""

    queue: Queue
    code: QueueStuck
    waiting: int


def stuck_queues() -> list[StuckQueue]:
    """Of all projects."""
    shapes = _permanent_shapes(Verdict.objects.all())
    found = []
    for count in QueueCount.objects.filter(submitted__gt=0).select_related("queue"):
        of_queue = shapes.get(count.queue_id, set())
        if count.queue.paused:
            found.append(StuckQueue(count.queue, QueueStuck.PAUSED, count.submitted))
        elif of_queue:
            runs = Run.objects.filter(queue=count.queue_id, status=RunStatus.SUBMITTED)
            if "" in of_queue or not runs.exclude(shape__in=of_queue).exists():
                found.append(StuckQueue(count.queue, QueueStuck.IMPOSSIBLE, count.submitted))
    return found


_cached: dict[int, tuple[str, StuckRuns]] = {}


def stuck_runs(project: Project) -> StuckRuns:
    """Read again only after the project's lists have changed."""
    version = selectors.list_version(project)
    known = _cached.get(project.pk)
    if known is None or known[0] != version:
        known = _cached[project.pk] = version, _read(project)
    return known[1]


def forget() -> None:
    """For tests: each has a database of its own."""
    _cached.clear()


def _read(project: Project) -> StuckRuns:
    shapes = _permanent_shapes(Verdict.objects.filter(queue__project=project))
    paused = impossible = 0
    names: Counter[tuple[str, bool]] = Counter()
    counts = QueueCount.objects.filter(queue__project=project, submitted__gt=0)
    for queue_id, is_paused, submitted in counts.values_list("queue_id", "queue__paused", "submitted"):
        runs = Run.objects.filter(queue=queue_id, status=RunStatus.SUBMITTED).order_by()
        of_queue = shapes.get(queue_id, set())
        never = runs if "" in of_queue else runs.filter(shape__in=of_queue)
        number = never.count() if of_queue else 0
        impossible += number
        names.update((name, True) for name in never.values_list("name", flat=True)[: MOST if number else 0])
        if is_paused:
            paused += submitted - number
            others = runs.exclude(shape__in=of_queue).values_list("name", flat=True)
            names.update((name, False) for name in others[:MOST])
    found: Counter[tuple[str, bool]] = Counter()
    for (name, is_impossible), number in names.items():
        found[prefix_and_group(name)[0], is_impossible] += number
    by_prefix = {prefix: Stuck(found[prefix, False], found[prefix, True]) for prefix, _never in found}
    return StuckRuns(Stuck(paused, impossible), by_prefix, names.total() == paused + impossible)


def _permanent_shapes(verdicts: QuerySet[Verdict]) -> dict[int, set[str]]:
    """By queue, the shapes that nothing which ends makes startable; "" stands for all of a queue."""
    reasons = (WaitReason.IMPOSSIBLE, WaitReason.USER_LIMIT, WaitReason.QUEUE_LIMIT)
    found: dict[int, set[str]] = {}
    rows = verdicts.filter(reason__in=reasons)
    for queue_id, shape, reason, data in rows.values_list("queue_id", "shape", "reason", "data"):
        if is_permanent(reason, data):
            found.setdefault(queue_id, set()).add(shape)
    return found
