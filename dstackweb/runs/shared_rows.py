"""What runs share: hosts, counters, and the versions that pages poll. Written last in a transaction, and once.

Other transactions wait for these rows until the one that writes them has committed. So code that moves runs only notes
what that changes, and `shared_rows_last`, the transaction around all of it, writes the sums by its last statements, in
the common order of locks.

What a job holds of a host (docs/design.md#execution): a GPU is an insert of a row that can exist only once; CPUs and
memory are sums on the host's own row, raised by a guarded UPDATE.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from django.db import IntegrityError, transaction
from django.db.models import F

from dstackweb.backends.hosts.fit import Fit
from dstackweb.backends.models import Gpu, Host
from dstackweb.lib import bulk, sql
from dstackweb.runs import history, learned_durations, prefix_counters, usage, wakeups
from dstackweb.runs.models import Allocation, Job, Run, Sweep
from dstackweb.runs.states import ENDED, JOB_ENDED, RunStatus


@dataclass
class _Changes:
    statuses: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By queue, how many more runs are in each status. A queue without any is touched."""
    of_sweeps: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """The same by sweep."""
    prefixes: prefix_counters.PrefixDeltas = field(default_factory=prefix_counters.PrefixDeltas)
    settled: dict[int, int] = field(default_factory=dict)
    """Runs whose ended jobs may hold something, with their queues."""
    placed: list[tuple[Sequence[Run], dt.datetime]] = field(default_factory=list)
    undone: list[tuple[Run, dt.datetime]] = field(default_factory=list)
    """Runs whose placement at this time does not count."""
    removed: list[history.Placed] = field(default_factory=list)
    durations: Counter[learned_durations.DurationKey] = field(default_factory=Counter)
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
        for run, at in self.undone:
            history.count_placed([run], at, -1)
        history.count_removed(self.removed)
        learned_durations.write(self.durations)
        self.usage.write()

    def add(self, run: Run, status: str, more: int) -> None:
        """So many more runs of the queue, and of the sweep, of this one are in a status."""
        self.statuses[run.queue_id][status] += more
        if run.sweep_id is not None:
            self.of_sweeps[run.sweep_id][status] += more

    def add_duration(self, run: Run, ended_at: dt.datetime | None, more: int) -> None:
        if (key := learned_durations.key_of(run, ended_at)) is not None:
            self.durations[key] += more

    def _release(self) -> None:
        if released := release(self.settled):
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
                changes.add_duration(run, now, 1)
                changes.usage.add_run(run, new, now)
        if new == RunStatus.PROVISIONING:
            changes.placed.append((runs, now))


def count_undone(run: Run, at: dt.datetime) -> None:
    """Take back the wait that was counted when a run, with its priority and queue, was placed. Call likewise."""
    with shared_rows_last(savepoint=False) as changes:
        changes.undone.append((run, at))


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
            changes.add_duration(run, run.ended_at, -1)
        changes.removed += placed


class ClaimFailed(Exception):
    """Another job holds what was to be claimed; nothing was claimed."""


def claim_all(claims: Sequence[tuple[Job, Fit]]) -> None:
    """Claim what each job gets of its host, for every job or for none.

    In host order, so that two claimers never wait for each other. Raises ClaimFailed. Call inside a transaction that
    the exception leaves.
    """
    by_host: dict[int, list[Fit]] = defaultdict(list)
    for _, claim in claims:
        by_host[claim.host_id].append(claim)
    for host_id, mine in sorted(by_host.items()):
        _take(host_id, sum(claim.cpus for claim in mine), sum(claim.memory_mib for claim in mine))
    gpus = _gpus([uuid for _, claim in claims for uuid in claim.gpu_uuids])
    rows = []
    for job, claim in claims:
        rows.append(Allocation(job=job, host_id=claim.host_id, cpus=claim.cpus, memory_mib=claim.memory_mib))
        for uuid in claim.gpu_uuids:
            if (claim.host_id, uuid) not in gpus:
                raise ClaimFailed("a GPU is no longer present")
            rows.append(Allocation(job=job, host_id=claim.host_id, gpu_id=gpus[claim.host_id, uuid]))
    try:
        Allocation.objects.bulk_create(rows)
    except IntegrityError as error:
        raise ClaimFailed("another job has a GPU") from error


def _take(host_id: int, cpus: int, memory_mib: int) -> None:
    won = Host.objects.filter(
        pk=host_id,
        draining=False,
        held_back_at=None,
        cpus__gte=F("cpus_used") + cpus,
        memory_mib__gte=F("memory_used_mib") + memory_mib,
    ).update(cpus_used=F("cpus_used") + cpus, memory_used_mib=F("memory_used_mib") + memory_mib)
    if not won:
        raise ClaimFailed(f"host {host_id} has not enough free")


def _gpus(uuids: Sequence[str]) -> dict[tuple[int, str], int]:
    """Row ids of these GPUs by host and UUID, for those present."""
    if not uuids:
        return {}
    rows = Gpu.objects.filter(uuid__in=uuids, present=True).values_list("host_id", "uuid", "pk")
    return {(host_id, uuid): pk for host_id, uuid, pk in rows}


def release(run_ids: Collection[int]) -> set[int]:
    """Release what ended jobs of these runs hold, in the order of claims. Returns the runs that held something.

    Their processes are confirmed gone, or never began. Call with the runs locked, last in the transaction.
    """
    if not run_ids:
        return set()
    ended = f"job.run_id IN ({sql.places(run_ids)}) AND job.status IN ({sql.places(JOB_ENDED)})"
    held = sql.rows(_HELD + f"WHERE {ended} ORDER BY held.host_id", [*run_ids, *JOB_ENDED])
    for host_id, rows in groupby(held, itemgetter(2)):
        cpus, memory_mib = (sum(column) for column in zip(*(row[3:] for row in rows), strict=True))
        Host.objects.filter(pk=host_id).update(
            cpus_used=F("cpus_used") - cpus, memory_used_mib=F("memory_used_mib") - memory_mib
        )
    bulk.delete("runs_allocation", [row[0] for row in held])
    return {row[1] for row in held}


_HELD = """
SELECT held.id, job.run_id, held.host_id, held.cpus, held.memory_mib
FROM runs_allocation held JOIN runs_job job ON job.id = held.job_id
"""
