"""Apply a reporter's batches to the counters: task events, absolute group counts, and messages of failed tasks.

Each batch is one transaction that locks the row of its scope. The result is the same however often and in which order
batches arrive.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from django.db import transaction
from django.db.models import F
from django.dispatch import Signal
from django.utils.translation import gettext as _

from dstackweb.lib import bulk
from dstackweb.lib.errors import Conflict, TooLarge
from dstackweb.progress import group_counts, task_events
from dstackweb.progress.counter_rows import lock_scope, read_keys
from dstackweb.progress.counters import BatchUpdate, CounterRows, Heard
from dstackweb.progress.failing import WINDOW_MS, Counts, Rise, Watch, advance
from dstackweb.progress.models import Reporter, Scope, TaskFailure
from dstackweb.progress.reports import Batch, Failure, Receipt
from dstackweb.progress.states import ENDED, FAILED, LIVE, NoReports, TaskState

REPORTERS_MAX = 10_000
"""Reporters of an attempt: a sweep may start a process for each task."""
SILENT_AFTER = 3
"""A reporter is silent after so many times the interval of its heartbeat."""
NEW_WORK_S = 60.0
"""More timed work in a reporter's first report was done earlier, not now."""
FAILURES_KEPT = 1_000
"""Failed tasks kept per prefix, the newest ones."""

failures_rose = Signal()
"""Sent in a batch's transaction with its `scope`, which is locked, `rises` (failing.Rise by prefix) and `now_ms`."""

FAILURE_COLUMNS = {
    "scope_id": "bigint", "prefix_id": "bigint", "key": "text", "group": "text", "message": "text", "seq": "bigint",
    "at_ms": "bigint",
}  # fmt: skip


def ingest_batch(scope_id: int, batch: Batch, now_ms: int) -> Receipt:
    """Apply a batch, and return what was done with its entries.

    Raises Scope.DoesNotExist; Conflict when the attempt has ended; TooLarge when the scope has too many reporters.
    """
    if batch.is_empty and _note_heartbeat(scope_id, batch, now_ms):
        return Receipt()
    (receipt,) = ingest_batches(scope_id, [batch], now_ms)
    if isinstance(receipt, TooLarge):
        raise receipt
    return receipt


def ingest_batches(scope_id: int, batches: Sequence[Batch], now_ms: int) -> list[Receipt | TooLarge]:
    """Apply several batches, one after the other, in one transaction. Those of too many reporters are left out.

    Raises Scope.DoesNotExist, and Conflict when the attempt has ended.
    """
    with transaction.atomic():
        scope = lock_scope(scope_id)
        if scope.ended_ms is not None:
            raise Conflict(_("this attempt has ended and accepts no more reports"), reason=NoReports.ATTEMPT_OVER)
        return [_apply(scope, batch, now_ms) for batch in batches]


def _apply(scope: Scope, batch: Batch, now_ms: int) -> Receipt | TooLarge:
    """Apply a batch to a locked scope."""
    try:
        reporter, heard = _reporter(scope, batch, now_ms)
    except TooLarge as error:  # nothing was written yet
        return error
    update = BatchUpdate(scope, reporter, now_ms, CounterRows(scope))
    if batch.ended_seq is not None:
        task_events.release_live(update)
        group_counts.release_live(update)
    tasks = task_events.decide(update, batch.events)
    counts = group_counts.decide(update, batch.counts)
    failed = _new_failures(update, batch.failures)
    update.counters.read(update.deltas)
    # Counts say what has happened since this reporter's last ones. A new reporter tells of single tasks as they end.
    is_recent = now_ms - heard.before_ms <= WINDOW_MS if heard.before_ms else not batch.counts
    rises = _watch_failures(update, is_recent)
    whole = update.counters.shift(update.deltas, now_ms, heard=heard)
    task_events.write(update, tasks)
    group_counts.write(update, counts)
    _write_failures(update, [*failed, *tasks.failed], tasks.done)
    _write_reporters(update, sum(whole.states.get(state, 0) for state in LIVE))
    if rises:
        failures_rose.send(sender=None, scope=scope, rises=rises, now_ms=now_ms)
    return update.receipt


def _watch_failures(update: BatchUpdate, is_recent: bool) -> dict[str, Rise]:
    """Note in each prefix how its failures are about to change. Returns those whose share of failures has risen."""
    changes: defaultdict[str, Counter[TaskState]] = defaultdict(Counter)
    for (name, _group), delta in update.deltas.items():
        changes[name].update(delta.states)
    rises = {}
    for name, change in changes.items():
        if not any(change[state] for state in ENDED):
            continue
        prefix = update.counters.prefixes[name]
        before = Counts(*(sum(getattr(prefix, state) for state in states) for states in (ENDED, FAILED)))
        more = Counts(*(sum(change[state] for state in states) for states in (ENDED, FAILED)))
        after = Counts(before.ended + more.ended, before.failed + more.failed)
        watch, rise = advance(Watch.parse(prefix.failing), before, after, update.now_ms, is_recent=is_recent)
        prefix.failing = watch.text
        if rise is not None:
            rises[name] = rise
    return rises


def _due_ms(batch: Batch, now_ms: int) -> int | None:
    """When its reporter counts as silent."""
    if batch.heartbeat_s is None or batch.ended_seq is not None:
        return None
    return now_ms + SILENT_AFTER * 1000 * batch.heartbeat_s


def _note_heartbeat(scope_id: int, batch: Batch, now_ms: int) -> bool:
    """Note that a known reporter goes on, which changes no counter. False if it is unknown or the attempt has ended."""
    mine = Reporter.objects.filter(scope=scope_id, scope__ended_ms=None, name=batch.reporter)
    return mine.update(last_ms=now_ms, due_ms=_due_ms(batch, now_ms)) > 0


def _reporter(scope: Scope, batch: Batch, now_ms: int) -> tuple[Reporter, Heard]:
    """The reporter's row, created if missing, with its new values, which `_write_reporters` saves.

    Also whether it was heard all the time. Of one that was silent nobody knows when it did what it reports now. Of a
    new one neither, but it may be a process that has done its only task.
    """
    reporter = Reporter.objects.filter(scope=scope, name=batch.reporter).first()
    if reporter is not None:
        was_silent = reporter.due_ms is not None and reporter.due_ms < now_ms
        heard = Heard(reporter.last_ms, not was_silent, 0 if was_silent else math.inf)
    else:
        others = Reporter.objects.filter(scope=scope)
        heard = Heard(0, others.filter(due_ms__gte=now_ms).exists(), NEW_WORK_S)
        if others.count() >= REPORTERS_MAX:
            raise TooLarge(
                _("This attempt already has %(reporters_max)s reporters.") % {"reporters_max": f"{REPORTERS_MAX:,}"}
            )
        reporter = Reporter.objects.create(scope=scope, name=batch.reporter)
    reporter.last_ms = now_ms
    reporter.due_ms = _due_ms(batch, now_ms)
    if batch.ended_seq is not None:
        reporter.ended_seq = max(batch.ended_seq, reporter.ended_seq or 0)
    return reporter, heard


def _write_reporters(update: BatchUpdate, live: int) -> None:
    """Save the reporter, and the numbers of unfinished tasks of others whose tasks it has taken over.

    `live`: change of the number of live tasks by this batch.
    """
    update.reporter.unfinished += live + update.taken_over.total()
    update.reporter.save()
    for pk, taken in sorted(update.taken_over.items()):
        Reporter.objects.filter(pk=pk).update(unfinished=F("unfinished") - taken)


def _new_failures(update: BatchUpdate, failures: Sequence[Failure]) -> list[Failure]:
    """The failures that are newer than the stored ones of their tasks. Others are noted in the receipt."""
    if not failures:
        return []
    update.counters.read({(failure.prefix, failure.group) for failure in failures})
    seqs = _stored_failures(update.scope.pk, {failure.key for failure in failures}, "seq")
    newest: dict[str, Failure] = {}
    for index, failure in sorted(enumerate(failures), key=lambda entry: entry[1].seq, reverse=True):
        group_name = (failure.prefix, failure.group)
        if failure.key in newest or failure.seq <= seqs.get(failure.key, -1):
            update.receipt.outdated += 1
        elif not update.counters.ids(group_name).prefix and (reason := update.exceeded_limit(group_name)):
            update.reject(index, failure.key, reason, "failures")
        else:
            newest[failure.key] = failure
            update.deltas[group_name]  # so that its prefix is created
            update.receipt.applied += 1
    return list(newest.values())


def _write_failures(update: BatchUpdate, failed: Sequence[Failure], done: Collection[str]) -> None:
    """Store failures, delete those of tasks that are done, and keep the newest of each prefix."""
    latest = {failure.key: failure for failure in sorted(failed, key=lambda failure: failure.seq)}
    stale = [*latest, *done]
    if stale and TaskFailure.objects.filter(scope=update.scope).exists():
        bulk.delete("progress_taskfailure", list(_stored_failures(update.scope.pk, stale, "id").values()))
    rows = []
    for failure in latest.values():
        prefix = update.counters.ids((failure.prefix, failure.group)).prefix
        values = (failure.key, failure.group, failure.message, failure.seq, update.now_ms)
        rows.append((update.scope.pk, prefix, *values))
    bulk.insert("progress_taskfailure", FAILURE_COLUMNS, rows)
    for prefix in sorted({row[1] for row in rows}):
        newest = TaskFailure.objects.filter(prefix=prefix).order_by("-at_ms", "-pk")
        bulk.delete("progress_taskfailure", list(newest.values_list("pk", flat=True)[FAILURES_KEPT:]))


def _stored_failures(scope_id: int, keys: Collection[str], column: str) -> dict[str, int]:
    """One column of the stored failures of these tasks, by key."""
    return dict(read_keys("progress_taskfailure", ("key", column), scope_id, keys))


BATCHES_MAX = 16
"""Batches of one transaction."""


@dataclass(slots=True)
class _Waiting:
    """A batch of a thread. Once `ready`: it has its result, else its thread applies it and those that follow.

    `alone`: it was among batches that failed together.
    """

    batch: Batch
    ready: threading.Event = field(default_factory=threading.Event)
    result: Receipt | TooLarge | None = None
    alone: bool = False


class Together:
    """Batches of this process. A thread applies its own and those that wait, then hands over to the next thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, list[_Waiting]] = {}

    def ingest(self, scope_id: int, batch: Batch, now_ms: int) -> Receipt:
        if batch.is_empty:
            return ingest_batch(scope_id, batch, now_ms)
        mine = _Waiting(batch)
        with self._lock:
            waiting = self._waiting.get(scope_id)
            if waiting is None:
                self._waiting[scope_id] = []
            else:
                waiting.append(mine)
        if waiting is not None:
            mine.ready.wait()
        if mine.result is None:
            self._apply(scope_id, mine, now_ms)
        if isinstance(mine.result, TooLarge):
            raise mine.result
        assert mine.result is not None
        return mine.result

    def _apply(self, scope_id: int, mine: _Waiting, now_ms: int) -> None:
        """Apply this thread's batch and those that wait. If that fails, each thread applies its own."""
        with self._lock:
            waiting = self._waiting[scope_id]
            most = 0 if mine.alone or any(one.alone for one in waiting) else BATCHES_MAX - 1
            taken, self._waiting[scope_id] = waiting[:most], waiting[most:]
        try:
            try:
                _apply_all(scope_id, [mine, *taken], now_ms)
            except Exception:
                if not taken:
                    raise
                for one in taken:
                    one.alone = True
                _apply_all(scope_id, [mine], now_ms)
        finally:
            with self._lock:
                # Those without a result come first: the next of them takes over.
                left = [one for one in taken if one.result is None] + self._waiting[scope_id]
                self._waiting[scope_id] = left[1:]
                if not left:
                    del self._waiting[scope_id]
            for one in taken:
                if one.result is not None:
                    one.ready.set()
            if left:
                left[0].ready.set()


def _apply_all(scope_id: int, waiting: list[_Waiting], now_ms: int) -> None:
    results = ingest_batches(scope_id, [one.batch for one in waiting], now_ms)
    for one, result in zip(waiting, results, strict=True):
        one.result = result
