"""Records on a run's timeline that more of its tasks fail than before, which people are notified of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import transaction
from django.db.models import F

from dstackweb.lib.times import to_moment
from dstackweb.progress.failing import Rise
from dstackweb.progress.models import Scope
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.models import Run, RunEvent
from dstackweb.runs.transitions import record

ALERTS_MAX = 20
"""Most events of one attempt, which may have thousands of prefixes and fail in each."""


def record_rises(scope: Scope, rises: Mapping[str, Rise], now_ms: int, **_signal: Any) -> None:
    """Write an event for each prefix, in the transaction that counts its tasks."""
    run = Run.objects.filter(pk=scope.run_id).select_related("project", "user").first()
    if run is None:
        return
    count = RunEvent.objects.filter(run=run, attempt=scope.attempt, kind=RunEventKind.TASKS_FAIL).count()
    for name, rise in list(rises.items())[: max(0, ALERTS_MAX - count)]:
        data = {"prefix": name, **rise._asdict()}
        # A run's row is locked before its scope's, which is locked here: its version, by which pages see the event,
        # rises once that is over.
        record(run, RunEventKind.TASKS_FAIL, data, attempt=scope.attempt, at=to_moment(now_ms), is_locked=True)
    transaction.on_commit(lambda: Run.objects.filter(pk=run.pk).update(version=F("version") + 1), robust=True)
