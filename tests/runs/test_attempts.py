from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Conflict
from dstackweb.runs import attempts
from dstackweb.runs.models import Allocation, Job, Run
from dstackweb.runs.recount import differences
from dstackweb.runs.rows import queue_rows
from dstackweb.runs.states import Reason, RunStatus
from tests.factories import make_host, make_run, place_all, placed_job, start

pytestmark = pytest.mark.django_db


def fresh(run: Run) -> Run:
    return Run.objects.select_related("queue").get(pk=run.pk)


def test_only_one_runner_claims_a_job_and_it_may_repeat_the_claim(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member)
    place_all()
    job = placed_job(run)
    attempts.claim_job(job.pk, "mine", "here")
    attempts.claim_job(job.pk, "mine", "here")
    with pytest.raises(Conflict):
        attempts.claim_job(job.pk, "another", "there")


def test_a_run_goes_from_placed_over_running_to_done_and_frees_its_resources(project: Project, member: User) -> None:
    host = make_host(gpus=2)
    run = make_run(project, member, resources={"gpu": 2, "cpu": 3})
    place_all()
    job = placed_job(run)
    assert (fresh(run).status, sorted(job.gpus)) == (RunStatus.PROVISIONING, ["GPU-box-1-0", "GPU-box-1-1"])
    start(job)
    assert fresh(run).status == RunStatus.RUNNING
    assert attempts.end_job(job.pk, Reason.DONE_BY_RUNNER, exit_code=0)
    assert not attempts.end_job(job.pk, Reason.DONE_BY_RUNNER, exit_code=0)
    assert (fresh(run).status, fresh(run).termination_reason, fresh(run).exit_code) == ("done", "all_jobs_done", 0)
    host.refresh_from_db()
    assert (host.cpus_used, Allocation.objects.count()) == (0, 0)
    assert list(differences()) == []


def test_a_failed_command_fails_the_run_with_its_exit_code(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member)
    place_all()
    job = start(placed_job(run))
    attempts.end_job(job.pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=127, message="command not found")
    assert (fresh(run).status, fresh(run).exit_code) == (RunStatus.FAILED, 127)
    assert "command not found" in fresh(run).status_message


def test_a_retried_run_keeps_its_seniority_and_returns_to_its_old_position(project: Project, member: User) -> None:
    make_host(cpus=1)
    run = make_run(project, member, retry=True)
    place_all()
    job = start(placed_job(run))
    make_run(project, member, "later")
    attempts.end_job(job.pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=1)
    assert (fresh(run).status, fresh(run).attempt) == (RunStatus.PENDING, 2)
    assert fresh(run).retry_at > timezone.now() - dt.timedelta(seconds=1)
    assert attempts.requeue_due(timezone.now() + dt.timedelta(hours=1)) == 1
    assert [row.name for row in queue_rows(run.queue)] == [run.name, "later"]


def test_without_retry_an_interruption_fails_the_run(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member)
    place_all()
    attempts.end_job(start(placed_job(run)).pk, Reason.INSTANCE_UNREACHABLE, message="gone")
    assert fresh(run).status == RunStatus.FAILED


def test_one_failed_node_stops_the_gang_and_ends_unclaimed_nodes_at_once(project: Project, member: User) -> None:
    make_host(cpus=4)
    run = make_run(project, member, nodes=3)
    assert place_all() == 1
    first, second = placed_job(run, 0), placed_job(run, 1)
    start(first, "a")
    start(second, "b")
    attempts.end_job(first.pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=9)
    assert fresh(run).status == RunStatus.TERMINATING
    assert sorted(Job.objects.filter(run=run).values_list("status", flat=True)) == [
        "failed",
        "terminated",
        "terminating",
    ]
    attempts.end_job(second.pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=143)
    assert (fresh(run).status, fresh(run).exit_code) == (RunStatus.FAILED, 9)
    assert list(differences()) == []


def test_a_gang_is_placed_whole_or_not_at_all(project: Project, member: User) -> None:
    make_host(cpus=2)
    run = make_run(project, member, nodes=3)
    make_run(project, member, "small")
    assert place_all() == 1
    assert fresh(run).status == RunStatus.SUBMITTED
    assert not Job.objects.filter(run=run).exists()


def test_a_report_of_an_earlier_attempt_changes_nothing(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member, retry=True)
    place_all()
    old = start(placed_job(run))
    attempts.end_job(old.pk, Reason.INSTANCE_UNREACHABLE)
    attempts.requeue_due(timezone.now() + dt.timedelta(hours=1))
    place_all()
    new = start(placed_job(run), "second")
    attempts.end_job(old.pk, Reason.DONE_BY_RUNNER, exit_code=0)
    assert fresh(run).status == RunStatus.RUNNING
    new.refresh_from_db()
    assert new.status == "running"
