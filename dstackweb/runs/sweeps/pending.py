"""Sweeps that wait for the end of runs or other sweeps (`after`). None of their runs exists before, so that all of them
are released or canceled by one row. Their waiting in the queue counts from their entry, as that of runs does.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection

from dstackweb.runs import dependencies
from dstackweb.runs.codes import DependencyOutcome
from dstackweb.runs.dependencies import OVER, Consequence
from dstackweb.runs.models import Dependency, Queue, Sweep
from dstackweb.runs.queue.queues import take_seniority
from dstackweb.runs.shared_rows import touch_sweep

FIELDS = ("is_pending", "status_detail", "seniority_us", "stopped_at")


def due(sweep_ids: Collection[int]) -> set[int]:
    """Those of these waiting sweeps of which a predecessor has ended or was removed."""
    if not sweep_ids:
        return set()
    found = Dependency.objects.filter(OVER, outcome=DependencyOutcome.WAITING, waiting_sweep__in=sweep_ids)
    return {pk for pk in found.values_list("waiting_sweep", flat=True) if pk is not None}


def settle(queue: Queue, sweep: Sweep, now: dt.datetime) -> None:
    """Note how the predecessors of a sweep have ended, and let it enter its queue, or cancel it. Repeatable.

    Call with its queue locked; then `creation.fill` makes its runs, or ends it.
    """
    if not sweep.is_pending:
        return
    found, consequence = dependencies.take_stock(sweep)
    match consequence:
        case Consequence.ENTER:
            enter(queue, sweep)
        case Consequence.CANCEL:
            sweep.stopped_at = now
            _change(sweep, is_pending=False, detail=found)
        case Consequence.WAIT | Consequence.KEEP:
            _change(sweep, is_pending=True, detail=found)


def enter(queue: Queue, sweep: Sweep) -> None:
    """Give it the queue's next seniority, which its runs will have."""
    sweep.seniority_us = take_seniority(queue.pk).last_seniority_us
    _change(sweep, is_pending=False, detail=[])


def _change(sweep: Sweep, *, is_pending: bool, detail: list[Dependency]) -> None:
    sweep.is_pending = is_pending
    sweep.status_detail = dependencies.detail(detail) if detail else {}
    sweep.save(update_fields=FIELDS)
    touch_sweep(sweep)
