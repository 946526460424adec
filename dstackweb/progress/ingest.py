"""Taking what a reporter tells: tasks one by one, and groups as absolute counts.

All of it happens behind the scope's row, in one transaction. The same batches give the same counters, however often
and in which order they come.
"""

from __future__ import annotations

from django.db import transaction

from dstackweb.lib.errors import Conflict, TooLarge
from dstackweb.progress import by_count, by_key, failures
from dstackweb.progress.batch import Taking
from dstackweb.progress.counters import Book, locked
from dstackweb.progress.events import Batch, Receipt
from dstackweb.progress.models import Reporter, Scope

REPORTERS_MAX = 10_000
"""Processes that tell of one attempt: a sweep may start one for each of its tasks."""


def take(scope_id: int, batch: Batch, now_ms: int) -> Receipt:
    """Count what a batch tells; answers what became of its entries.

    Raises Scope.DoesNotExist; Conflict when the attempt is over; TooLarge when the scope has too many reporters.
    """
    with transaction.atomic():
        scope = locked(scope_id)
        if scope.ended_ms is not None:
            raise Conflict("This attempt is over: nothing more is taken for it.")
        taking = Taking(scope, _heard(scope, batch, now_ms), now_ms, Book(scope))
        if batch.ended_seq is not None:
            by_key.end(taking)
            by_count.end(taking)
        tasks = by_key.decide(taking, batch.events)
        counts = by_count.decide(taking, batch.counts)
        failed = failures.decide(taking, batch.failures)
        taking.book.read(taking.deltas)
        taking.book.shift(taking.deltas, now_ms)
        by_key.write(taking, tasks)
        by_count.write(taking, counts)
        failures.write(taking, [*failed, *tasks.failed], tasks.done)
    return taking.receipt


def _heard(scope: Scope, batch: Batch, now_ms: int) -> Reporter:
    """The reporter's row, with what this batch says about itself."""
    reporter = Reporter.objects.filter(scope=scope, name=batch.reporter).first()
    if reporter is None:
        if Reporter.objects.filter(scope=scope).count() >= REPORTERS_MAX:
            raise TooLarge(f"This attempt has {REPORTERS_MAX:,} reporters already.")
        reporter = Reporter(scope=scope, name=batch.reporter)
    told = [entry.seq for entries in (batch.events, batch.counts, batch.failures) for entry in entries]
    reporter.last_seq = max(reporter.last_seq, batch.ended_seq or 0, *told)
    reporter.last_ms = now_ms
    if batch.ended_seq is not None:
        reporter.ended_seq = max(batch.ended_seq, reporter.ended_seq or 0)
    reporter.save()
    return reporter
