"""Tasks of ended attempts: marked by the transition, settled by a worker, found again if neither happened."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.progress import counters
from dstackweb.progress.ingest import ingest_batch
from dstackweb.progress.models import Scope
from dstackweb.progress.reports import Batch, Event
from dstackweb.progress.states import TaskState
from dstackweb.runs import attempts, services
from dstackweb.runs.models import Run
from dstackweb.runs.recount import differences
from dstackweb.runs.states import Reason
from dstackweb.scheduler import watch
from dstackweb.scheduler.models import PeriodicJob
from dstackweb.scheduler.processes import retention, tasks
from tests.factories import make_host, make_run, place_all, placed_job, start

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(project: Project, member: User) -> Run:
    """A run that is running, with one task of each kind."""
    make_host()
    run = make_run(project, member, "train-1", retry=True)
    place_all()
    start(placed_job(run))
    report(run, 1)
    return run


def report(run: Run, attempt: int) -> None:
    events = (
        Event("load-1", TaskState.MEMORY, 1, "load", "load"),
        Event("load-2", TaskState.QUEUED, 1, "load", "load"),
    )
    ingest_batch(counters.ensure_scope(run.project_id, run.pk, attempt), Batch("log-0", events), 1)


def scope(run: Run, attempt: int = 1) -> Scope:
    return Scope.objects.get(run_id=run.pk, attempt=attempt)


def test_a_run_that_ends_has_its_tasks_settled_soon(run: Run, django_capture_on_commit_callbacks: Any) -> None:
    soon = timezone.now() + dt.timedelta(seconds=1)
    tasks.ensure_rows(tasks.control_jobs())
    PeriodicJob.objects.update(due_at=timezone.now() + dt.timedelta(hours=1))
    with django_capture_on_commit_callbacks(execute=True):
        attempts.end_job(placed_job(run).pk, Reason.DONE_BY_RUNNER, exit_code=0)
    assert list(PeriodicJob.objects.filter(due_at__lte=soon).values_list("name", flat=True)) == ["ended-tasks"]
    assert watch.has_unsettled_tasks()
    watch.settle_tasks(timezone.now())
    assert (scope(run).memory, scope(run).released, scope(run).settled) == (1, 1, True)
    assert not watch.has_unsettled_tasks()
    assert list(differences()) == []


def test_a_retry_ends_the_tasks_of_its_attempt_and_the_next_starts_empty(run: Run) -> None:
    attempts.end_job(placed_job(run).pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=1)
    assert scope(run).ended_ms is not None
    attempts.requeue_due(timezone.now() + dt.timedelta(days=1))
    place_all()
    report(run, 2)
    watch.settle_tasks(timezone.now())
    assert scope(run).settled
    assert (scope(run, 2).queued, scope(run, 2).ended_ms) == (1, None)


def test_a_stopping_run_still_reports_until_it_has_ended(run: Run, member: User) -> None:
    services.stop(run, member, "member")
    assert scope(run).ended_ms is None
    attempts.end_job(placed_job(run).pk, Reason.TERMINATED_BY_USER)
    assert scope(run).ended_ms is not None


def test_tasks_first_reported_after_the_end_of_the_attempt_are_still_settled(run: Run) -> None:
    """Its first report was let in before the end, and written after it: no end will come for that scope."""
    attempts.end_job(placed_job(run).pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=1)
    Scope.objects.filter(run_id=run.pk).delete()
    report(run, 1)
    watch.settle_tasks(timezone.now())
    assert (scope(run).released, scope(run).settled) == (1, True)


def test_tasks_of_a_deleted_run_are_settled(project: Project, run: Run) -> None:
    Scope.objects.filter(run_id=run.pk).update(run_id=run.pk + 1000)
    watch.settle_tasks(timezone.now())
    assert Scope.objects.get(run_id=run.pk + 1000).settled


def test_tasks_of_running_attempts_are_not_settled(run: Run) -> None:
    watch.settle_tasks(timezone.now())
    assert (scope(run).queued, scope(run).ended_ms) == (1, None)


def test_tasks_of_old_runs_are_pruned(run: Run) -> None:
    attempts.end_job(placed_job(run).pk, Reason.DONE_BY_RUNNER, exit_code=0)
    watch.settle_tasks(timezone.now())
    Scope.objects.filter(run_id=run.pk).update(ended_ms=1)
    retention.prune()
    assert not Scope.objects.filter(run_id=run.pk).exists()
