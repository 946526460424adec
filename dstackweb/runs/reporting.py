"""Where reported tasks are counted: in the scope of the run's current attempt, and only while the run is placed."""

from __future__ import annotations

from django.db import transaction

from dstackweb.lib.errors import Conflict
from dstackweb.progress.counters import ensure_scope
from dstackweb.progress.models import Scope
from dstackweb.runs.models import Run
from dstackweb.runs.states import PLACED
from dstackweb.runs.transitions import lock_run


def scope_for(run: Run, attempt: int | None = None) -> int:
    """The id of the scope that counts the tasks of the run's attempt, the present one if None is named.

    Raises Conflict unless that is the present one, and under way.
    """
    _refuse_unless_open(run, attempt)
    found = Scope.objects.filter(project=run.project_id, run_id=run.pk, attempt=run.attempt).values_list("pk").first()
    if found is not None:
        return int(found[0])
    with transaction.atomic():
        # Behind the run's row: the end of the attempt, which ends its scope, comes before this or finds it.
        run = lock_run(run.pk)
        _refuse_unless_open(run, attempt)
        return ensure_scope(run.project_id, run.pk, run.attempt)


def _refuse_unless_open(run: Run, attempt: int | None) -> None:
    if attempt is not None and attempt < run.attempt:
        raise Conflict(f"attempt {attempt} is over; tasks are told of attempt {run.attempt}", attempt=run.attempt)
    if attempt is not None and attempt > run.attempt:
        raise Conflict(f"there is no attempt {attempt} yet", attempt=run.attempt)
    if run.status not in PLACED:
        raise Conflict("tasks are told while a run is under way, and this one is not", status=run.status)
