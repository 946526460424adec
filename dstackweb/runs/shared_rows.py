"""What runs share: hosts, counters, and the versions that pages poll. Written last in a transaction, and once.

Other transactions wait for these rows until the one that writes them has committed. So code that moves runs only notes
what that changes, and `shared_rows_last`, the transaction around all of it, writes the sums by its last statements, in
the common order of locks.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from django.db import transaction

from dstackweb.lib import bulk
from dstackweb.runs import allocations, history, learned_durations, prefix_counters, usage, wakeups
from dstackweb.runs.models import Job, Run, Sweep
from dstackweb.runs.states import ENDED, RunStatus


@dataclass
class _Changes:
    """What a transaction has changed so far."""

    statuses: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By queue, how many more runs are in each status. A queue without any is touched."""
    of_sweeps: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """The same by sweep."""
    prefixes: prefix_counters.PrefixDeltas = field(default_factory=prefix_counters.PrefixDeltas)
    settled: dict[int, int] = field(default_factory=dict)
    """Runs whose ended jobs may hold something, with their queues."""
    placed: list[tuple[Sequence[Run], dt.datetime]] = field(default_factory=list)
    removed: list[history.Placed] = field(default_factory=list)
    durations: learned_durations.DurationDeltas = field(default_factory=learned_durations.DurationDeltas)
    usage: usage.UsageDeltas = field(default_factory=usage.UsageDeltas)

    def write(self) -> None:
        """In the common order of locks."""
        self._release()
        with bulk.together():
            for sweep_id, statuses in sorted(self.of_sweeps.items()):
                _shift("runs_sweepcount", "sweep_id", sweep_id, statuses)
            for queue_id, statuses in sorted(self.statuses.items()):
                _shift("runs_queuecount", "queue_id", queue_id, statuses)
            self.prefixes.write()
        for runs, now in self.placed:
            history.count_placed(runs, now)
        history.count_removed(self.removed)
        self.durations.write()
        self.usage.write()

    def add(self, run: Run, status: str, more: int) -> None:
        """So many more runs of the queue, and of the sweep, of this one are in a status."""
        self.statuses[run.queue_id][status] += more
        if run.sweep_id is not None:
            self.of_sweeps[run.sweep_id][status] += more

    def _release(self) -> None:
        if released := allocations.release(self.settled):
            for run_id in released:
                self.statuses[self.settled[run_id]].update()
            wakeups.request_pass()


def _shift(table: str, key: str, pk: int, statuses: Counter[str]) -> None:
    """Shift the counters of a queue or a sweep, and raise the version."""
    changed = {status: more for status, more in statuses.items() if more}
    values = ", ".join(f"{status} = {status} + %s" for status in changed)
    bulk.write(
        f"UPDATE {table} SET version = version + 1{values and ', '}{values} WHERE {key} = %s", [*changed.values(), pk]
    )


_changes: ContextVar[_Changes | None] = ContextVar("changes", default=None)


@contextmanager
def shared_rows_last(*, savepoint: bool = True) -> Iterator[_Changes]:
    """A transaction that moves runs. Inside another such block it is a part of it, and can't fail alone."""
    outer = _changes.get()
    with transaction.atomic(savepoint=savepoint and outer is None):
        if outer is not None:
            yield outer
            return
        changes = _Changes()
        token = _changes.set(changes)
        try:
            yield changes
        finally:
            _changes.reset(token)
        changes.write()


def touch(queue_id: int) -> None:
    """Raise the version of a queue's lists, where no run changed its status."""
    with shared_rows_last(savepoint=False) as changes:
        changes.statuses[queue_id].update()


def touch_sweep(sweep: Sweep) -> None:
    """Raise the versions of a sweep and of its queue's lists."""
    with shared_rows_last(savepoint=False) as changes:
        changes.of_sweeps[sweep.pk].update()
        changes.statuses[sweep.queue_id].update()


def count_left_sweep(runs: Sequence[Run]) -> None:
    """Count ended runs that leave their sweep. Call in the transaction in which they do, while they still name it."""
    with shared_rows_last(savepoint=False) as changes:
        for run in runs:
            if run.sweep_id is not None:
                changes.of_sweeps[run.sweep_id][run.status] -= 1


def release_ended(run: Run) -> None:
    """Free what ended jobs of the run hold of hosts. Call after `lock_run`."""
    with shared_rows_last(savepoint=False) as changes:
        changes.settled[run.pk] = run.queue_id


def count_new(run: Run) -> None:
    """Count a new run. Call in the transaction that created it."""
    with shared_rows_last(savepoint=False) as changes:
        changes.add(run, run.status, 1)
        changes.prefixes.add_new(run)


def count_moved(runs: Sequence[Run], new: RunStatus, now: dt.datetime) -> None:
    """Count a move of `runs`, which still hold the status that they leave. Call in the transaction that moved them."""
    with shared_rows_last(savepoint=False) as changes:
        for run in runs:
            changes.add(run, run.status, -1)
            changes.add(run, new.value, 1)
            changes.prefixes.add_move(run, new, now)
            if new in ENDED:
                changes.durations.add(run, now)
                changes.usage.add_run(run, new, now)
        if new == RunStatus.PROVISIONING:
            changes.placed.append((runs, now))


def count_job_end(job: Job, now: dt.datetime) -> None:
    """Count what a job, with its run, has used. Call in the transaction that ends it."""
    with shared_rows_last(savepoint=False) as changes:
        changes.usage.add_job(job, now)


def count_queue_change(run: Run, old_id: int, new_id: int) -> None:
    """Count a run that leaves a queue for another. Call likewise."""
    with shared_rows_last(savepoint=False) as changes:
        changes.statuses[old_id][run.status] -= 1
        changes.statuses[new_id][run.status] += 1


def count_removed(runs: Sequence[Run], placed: Sequence[history.Placed], now: dt.datetime) -> None:
    """Take ended runs out of the counters, and note their placements. Call likewise, before they are removed."""
    with shared_rows_last(savepoint=False) as changes:
        changes.usage.add_removed(runs)
        for run in runs:
            changes.add(run, run.status, -1)
            changes.prefixes.add_removed(run, now)
            changes.durations.add(run, run.ended_at, -1)
        changes.removed += placed
