"""A run that waits for its next attempt blocks no other run and keeps its rank."""

from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs import attempts, selectors, services
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.queue import ordering
from dstackweb.runs.queue.queues import change_queue
from dstackweb.runs.recount import differences
from dstackweb.runs.states import Reason, RunStatus
from tests.factories import make_host, make_run, place_all, placed_job, start

pytestmark = pytest.mark.django_db
HOUR = dt.timedelta(hours=1)


def failed(project: Project, user: User) -> Run:
    """A run whose first attempt has failed, with its retry ahead."""
    run = make_run(project, user, "again", retry=True)
    place_all()
    attempts.end_job(start(placed_job(run)).pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=1)
    return fresh(run)


def fresh(run: Run) -> Run:
    return Run.objects.select_related("queue", "project", "user").get(pk=run.pk)


def positions(queue: Queue) -> list[tuple[str, int | None]]:
    waiting = Run.objects.select_related("queue").filter(queue=queue, status="submitted").order_by("rank", "id")
    return [(run.name, selectors.position(run)) for run in waiting]


def test_it_has_no_position_and_those_behind_it_start(project: Project, member: User) -> None:
    make_host(cpus=1)
    run = failed(project, member)
    later = make_run(project, member, "later")
    assert (run.status, selectors.position(run)) == (RunStatus.PENDING, None)
    assert positions(run.queue) == [("later", 1)]
    assert place_all() == 1
    assert fresh(later).status == RunStatus.PROVISIONING


def test_a_retried_run_returns_ahead_of_later_submissions(project: Project, member: User) -> None:
    make_host(cpus=1)
    run = failed(project, member)
    make_run(project, member, "later")
    assert attempts.requeue_due(timezone.now() + HOUR) == 1
    assert positions(run.queue) == [("again", 1), ("later", 2)]
    back = fresh(run)
    assert (back.seniority_us, back.attempt, back.retry_at) == (run.seniority_us, 2, None)


def test_its_start_is_that_of_its_newest_attempt(project: Project, member: User) -> None:
    make_host(cpus=1)
    run = failed(project, member)
    assert run.started_at is None
    attempts.requeue_due(timezone.now() + HOUR)
    place_all()
    again_at = timezone.now()
    job = start(placed_job(run))
    began = fresh(run).started_at
    assert began is not None
    assert began >= again_at
    attempts.end_job(job.pk, Reason.DONE_BY_RUNNER, exit_code=0)
    assert fresh(run).started_at == began
    assert list(differences()) == []


def test_a_priority_or_queue_changed_before_the_retry_counts(project: Project, member: User) -> None:
    make_host(cpus=1)
    run = failed(project, member)
    services.set_priority(run, member, "manager", 20)
    change_queue(run.queue, member, "manager", ageing_minutes=None)
    make_run(project, member, "later")
    attempts.requeue_due(timezone.now() + HOUR)
    back = fresh(run)
    assert back.rank == ordering.rank(run.seniority_us, 20, ordering.STRICT_STEP_US)
    assert positions(run.queue) == [("later", 1), ("again", 2)]
    assert list(differences()) == []


@pytest.mark.parametrize(
    ("share", "attempt", "seconds"), [(0.0, 1, 0), (0.5, 1, 10), (0.999, 3, 79.92), (0.5, 40, 300)]
)
def test_the_wait_grows_with_the_attempts_up_to_a_bound_and_is_spread(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch, share: float, attempt: int, seconds: float
) -> None:
    make_host()
    monkeypatch.setattr(attempts.random, "random", lambda: share)
    run = make_run(project, member, retry=True)
    Run.objects.update(attempt=attempt)
    place_all()
    before = timezone.now()
    attempts.end_job(start(placed_job(run)).pk, Reason.INSTANCE_UNREACHABLE)
    due = fresh(run).retry_at
    assert due is not None
    assert -1 < (due - before).total_seconds() - seconds < 5


def test_before_its_time_it_stays_where_it_is(project: Project, member: User, monkeypatch: pytest.MonkeyPatch) -> None:
    make_host()
    monkeypatch.setattr(attempts.random, "random", lambda: 0.9)
    failed(project, member)
    assert attempts.requeue_due(timezone.now()) == 0
    assert place_all() == 0


def test_the_back_off_ends_with_the_time_for_retries(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host()
    monkeypatch.setattr(attempts.random, "random", lambda: 1.0)
    run = make_run(project, member, retry={"duration": "5m"})
    Run.objects.update(attempt=9)  # the back-off alone would be ten minutes
    place_all()
    attempts.end_job(start(placed_job(run)).pk, Reason.INSTANCE_UNREACHABLE)
    again = fresh(run)
    assert again.retry_at is not None
    assert again.first_failed_at is not None
    assert again.retry_at - again.first_failed_at == dt.timedelta(minutes=5)


def test_max_attempts_does_not_count_attempts_without_capacity(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member, retry={"max_attempts": 2})
    for reason in (Reason.OUT_OF_CAPACITY, Reason.INSTANCE_UNREACHABLE):
        place_all()
        attempts.end_job(start(placed_job(run)).pk, reason)
        assert fresh(run).status == RunStatus.PENDING
        attempts.requeue_due(timezone.now() + HOUR)
    place_all()
    attempts.end_job(start(placed_job(run)).pk, Reason.INSTANCE_UNREACHABLE)
    ended = fresh(run)
    assert (ended.status, ended.termination_reason) == (RunStatus.FAILED, Reason.RETRY_LIMIT_EXCEEDED)
    assert ended.attempt == 3
