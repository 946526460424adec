"""Settles the tasks of ended attempts, also where an end was not recorded when it happened."""

from __future__ import annotations

import datetime as dt
import time

from django.db.models import Q

from dstackweb.progress import finalize
from dstackweb.progress.models import Scope
from dstackweb.runs.models import Run
from dstackweb.runs.prefix_counters import to_ms
from dstackweb.runs.states import ENDED

WORK_S = 20.0
"""How long one task settles scopes, far below django-q's timeout. The next one continues."""


def has_work() -> bool:
    """Whether tasks of any run may change yet."""
    return Scope.objects.filter(Q(ended_ms=None, run_id__gt=0) | Q(ended_ms__isnull=False, settled=False)).exists()


def settle(now: dt.datetime) -> None:
    """Settle scopes that are due, those that ended first going first."""
    end_missed_scopes(now)
    began = time.monotonic()
    for scope_id in finalize.due():
        while time.monotonic() - began < WORK_S and not finalize.settle(scope_id):
            pass


def end_missed_scopes(now: dt.datetime) -> None:
    """End scopes of attempts that were over when their first tasks were reported: nothing else would end them."""
    open_scopes = list(Scope.objects.filter(ended_ms=None, run_id__gt=0).values_list("run_id", "attempt"))
    going_on = Run.objects.filter(pk__in={run_id for run_id, _ in open_scopes}).exclude(status__in=ENDED)
    current = dict(going_on.values_list("pk", "attempt"))
    over = [(run_id, attempt) for run_id, attempt in open_scopes if current.get(run_id, attempt + 1) > attempt]
    finalize.end(over, to_ms(now))
