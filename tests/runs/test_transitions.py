from __future__ import annotations

import pytest
from django.utils import timezone

from dstackweb.runs import attempts
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.models import Job, Run, RunEvent
from dstackweb.runs.recount import differences
from dstackweb.runs.states import RUN_MOVES, JobStatus, RunStatus
from dstackweb.runs.transitions import IllegalTransition, lock_run, move_job, move_run, record
from tests.factories import cloud_job, join, make_project, make_run, make_user

pytestmark = pytest.mark.django_db


@pytest.fixture
def run() -> Run:
    project = make_project()
    return make_run(project, join(project, make_user()))


def test_a_move_writes_status_event_and_counters_together(run: Run) -> None:
    assert move_run(run, RunStatus.PROVISIONING, now=timezone.now())
    run.refresh_from_db()
    assert run.status == RunStatus.PROVISIONING
    assert RunEvent.objects.filter(run=run, kind="provisioning").get().data["from"] == "submitted"
    assert (run.queue.count.submitted, run.queue.count.provisioning) == (0, 1)
    assert list(differences()) == []


def test_of_two_concurrent_transitions_of_a_run_one_wins_and_the_other_changes_nothing(run: Run) -> None:
    twin = Run.objects.get(pk=run.pk)
    assert move_run(run, RunStatus.PROVISIONING, now=timezone.now())
    assert not move_run(twin, RunStatus.TERMINATED, now=timezone.now())
    run.refresh_from_db()
    assert run.status == RunStatus.PROVISIONING
    assert list(differences()) == []


def test_a_move_of_an_earlier_attempt_changes_nothing(run: Run) -> None:
    twin = Run.objects.get(pk=run.pk)
    Run.objects.filter(pk=run.pk).update(attempt=2)
    assert not move_run(twin, RunStatus.PROVISIONING, now=timezone.now())


def test_an_illegal_move_raises_and_shows_the_history(run: Run) -> None:
    with pytest.raises(IllegalTransition, match=r"submitted → done is not allowed; last events: .*submitted"):
        move_run(run, RunStatus.DONE, now=timezone.now())


def test_an_illegal_move_of_a_job_raises_and_names_the_job(run: Run) -> None:
    job = cloud_job(run)
    assert move_job(job, JobStatus.FAILED, now=timezone.now())
    with pytest.raises(IllegalTransition, match=r"job 0 of attempt 1.*failed → running is not allowed"):
        move_job(job, JobStatus.RUNNING, now=timezone.now())
    assert Job.objects.get(pk=job.pk).status == JobStatus.FAILED


def test_a_concurrently_claimed_job_does_not_end_as_unclaimed(run: Run) -> None:
    job = cloud_job(run)
    assert attempts.claim_job(job.pk, "nonce", "here")
    assert not move_job(job, JobStatus.FAILED, now=timezone.now(), unclaimed=True)
    assert Job.objects.get(pk=job.pk).status == JobStatus.PROVISIONING
    assert move_job(job, JobStatus.FAILED, now=timezone.now())


def test_an_event_raises_the_version_that_polls_compare(run: Run) -> None:
    before = Run.objects.get(pk=run.pk).version
    record(run, RunEventKind.SUBMITTED, {})
    assert Run.objects.get(pk=run.pk).version == before + 1


def test_locking_a_run_to_change_its_jobs_raises_the_version_that_polls_compare(run: Run) -> None:
    before = Run.objects.get(pk=run.pk).version
    assert lock_run(run.pk).version == before + 1


def test_ended_statuses_are_final_and_every_other_status_can_end() -> None:
    ended = {RunStatus.DONE, RunStatus.FAILED, RunStatus.TERMINATED}
    for status, targets in RUN_MOVES.items():
        assert (not targets) == (status in ended)
        reachable, frontier = set(targets), list(targets)
        while frontier:
            new = RUN_MOVES[frontier.pop()] - reachable
            reachable |= new
            frontier += new
        assert status in ended or reachable & ended
