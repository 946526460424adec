"""A job that a signal ended on a cloud machine: the cloud says whether its machine was ended with it."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.backends.contract import InstanceState
from dstackweb.backends.models import Instance
from dstackweb.runs import attempts, services
from dstackweb.runs.launch import job_token
from dstackweb.runs.models import Job, Run
from dstackweb.runs.recount import differences
from dstackweb.runs.states import JobStatus, Reason, RunStatus
from dstackweb.scheduler.cloud import agents, lifecycle
from dstackweb.web.runs.details import node_line
from dstackweb.wording import statuses
from tests.factories import make_host, make_run, place_all, placed_job, start
from tests.scheduler.cloud.cloud_fake import THROTTLED, FakeCloud, begin, running

pytestmark = pytest.mark.django_db
RETRY = {"on_events": ["interruption"]}
TERM = 128 + 15


@pytest.fixture
def fake(db: None, monkeypatch: pytest.MonkeyPatch) -> FakeCloud:
    return FakeCloud(monkeypatch)


@pytest.fixture
def run(project: Project, member: User) -> Run:
    return make_run(project, member, backends=["aws"], retry=RETRY)


@pytest.fixture
def job(run: Run, fake: FakeCloud) -> Job:
    return running(run, fake)


def report(job: Job, exit_code: int = TERM, **more: Any) -> None:
    """What a runner sends whose commands have ended with this code."""
    token = {"Authorization": f"Bearer {job_token(job.pk)}", "X-Nonce": "nonce"}
    end = {"exit_code": exit_code, "reason": "container_exited_with_error", "log_size": 7, **more}
    path = f"/api/v1/runner/jobs/{job.pk}/exit"
    assert Client().post(path, end, content_type="application/json", headers=token).status_code == 200


def fresh(job: Job) -> Job:
    return Job.objects.select_related("run").get(pk=job.pk)


def test_an_externally_terminated_instance_interrupts_its_job(job: Job, fake: FakeCloud) -> None:
    fake.set("i-0", state=InstanceState.ENDING, why="cloud", text="User initiated shutdown")
    report(job)
    assert (fresh(job).status, fresh(job).run.status) == (JobStatus.TERMINATING, RunStatus.RUNNING)
    fake.tick(5)
    ended = fresh(job)
    assert (ended.termination_reason, ended.exit_code, ended.log_size) == (Reason.INSTANCE_UNREACHABLE, TERM, 7)
    assert ended.message == "User initiated shutdown"
    assert (ended.run.status, ended.run.attempt) == (RunStatus.PENDING, 2)
    assert list(differences()) == []


def test_the_cloud_api_shows_that_a_spot_instance_was_reclaimed(job: Job, fake: FakeCloud) -> None:
    fake.set("i-0", state=InstanceState.ENDING, why="interrupted")
    report(job, 128 + 9)
    fake.tick(5)
    assert fresh(job).termination_reason == Reason.INTERRUPTED


def test_a_job_killed_on_a_healthy_instance_fails_by_itself(job: Job, fake: FakeCloud) -> None:
    report(job, 128 + 9)
    fake.tick(5)
    assert fresh(job).status == JobStatus.TERMINATING
    fake.tick(15)
    ended = fresh(job)
    assert (ended.termination_reason, ended.exit_code) == (Reason.CONTAINER_EXITED_WITH_ERROR, 137)
    assert ended.detail == {"code": "exited", "exit_code": 137}
    assert ended.run.status == RunStatus.FAILED


@pytest.mark.parametrize("exit_code", [1, 128 + 11, 128 + 6])
def test_an_end_by_itself_waits_for_nothing(job: Job, exit_code: int) -> None:
    report(job, exit_code)
    assert fresh(job).status == JobStatus.FAILED


def test_commands_that_handle_the_signal_are_interrupted_as_well(job: Job, fake: FakeCloud) -> None:
    """Their exit code says nothing, but their runner got the signal too."""
    fake.set("i-0", state=InstanceState.ENDING)
    report(job, 1, signalled=True)
    fake.tick(5)
    assert fresh(job).termination_reason == Reason.INSTANCE_UNREACHABLE


def test_a_spot_notice_that_only_the_runner_has_seen_is_an_interruption_at_once(job: Job, fake: FakeCloud) -> None:
    at = (fake.now + dt.timedelta(seconds=1)).isoformat()
    report(job, signalled=True, interruption={"at": at})
    assert fresh(job).termination_reason == Reason.INTERRUPTED
    assert Instance.objects.get().interrupted_at is not None


def test_a_notice_after_the_report_makes_it_an_interruption(job: Job, fake: FakeCloud) -> None:
    report(job)
    agents.record_interruption(job.instance_id, fake.now + dt.timedelta(seconds=1))
    fake.tick(1)
    assert fresh(job).termination_reason == Reason.INTERRUPTED


def test_while_the_cloud_does_not_answer_nothing_is_concluded(job: Job, fake: FakeCloud) -> None:
    fake.throttled = THROTTLED
    report(job)
    report(job)
    fake.tick(5 * 60)
    assert fresh(job).status == JobStatus.TERMINATING
    assert "asking the cloud about its machine" in node_line(fresh(job)).why
    assert agents.next_step(job.instance_id, agents.AgentReport(left=True))["do"] == "wait"
    assert job.run.events.filter(kind="machine_asked").count() == 1
    fake.throttled = None
    fake.tick(40)
    assert fresh(job).termination_reason == Reason.CONTAINER_EXITED_WITH_ERROR


def test_an_answer_to_an_older_question_settles_nothing(
    job: Job, fake: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cloud was asked before the machine began to end, and answers after the report."""
    monkeypatch.setattr(lifecycle, "CONFIRM_S", 0.0)
    ask = fake.ask

    def slow() -> None:
        monkeypatch.setattr(fake, "ask", ask)
        report(job)

    monkeypatch.setattr(fake, "ask", slow)
    fake.tick(30)
    assert fresh(job).status == JobStatus.TERMINATING
    fake.set("i-0", state=InstanceState.ENDING)
    fake.tick(10)
    assert fresh(job).termination_reason == Reason.INSTANCE_UNREACHABLE


def test_a_stop_ends_it_without_the_cloud(job: Job, fake: FakeCloud, member: User) -> None:
    report(job)
    services.stop(job.run, member, "member")
    assert (fresh(job).status, fresh(job).run.status) == (JobStatus.TERMINATED, RunStatus.TERMINATED)


def test_the_cloud_is_not_queried_about_a_stopped_job(job: Job, member: User) -> None:
    services.stop(job.run, member, "member")
    report(job)
    assert (fresh(job).status, fresh(job).run.status) == (JobStatus.TERMINATED, RunStatus.TERMINATED)


def test_other_nodes_that_fail_for_want_of_the_lost_one_do_not_hide_the_interruption(
    project: Project, member: User, fake: FakeCloud
) -> None:
    run = make_run(project, member, backends=["aws"], retry=RETRY, nodes=2)
    begin(fake)
    first, second = (start(placed_job(run, node), "nonce") for node in (0, 1))
    fake.set(Instance.objects.get(jobs=first).cloud_id, state=InstanceState.ENDING)
    report(first)
    report(second, 1)
    assert Run.objects.get(pk=run.pk).status == RunStatus.TERMINATING
    fake.tick(5)
    now = Run.objects.get(pk=run.pk)
    assert (now.status, now.attempt) == (RunStatus.PENDING, 2)


def test_an_own_host_that_is_shut_down_interrupts_its_jobs(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member, retry=RETRY)
    place_all()
    job = start(placed_job(run))
    report(job, signalled=True)
    ended = fresh(job)
    assert (ended.termination_reason, ended.run.status) == (Reason.INSTANCE_UNREACHABLE, RunStatus.PENDING)
    assert statuses.message(ended.detail, "") == "its machine was shut down while it ran (exit code 143)"


def test_on_an_own_host_commands_killed_by_a_signal_fail_by_themselves(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member, retry=RETRY)
    place_all()
    job = start(placed_job(run))
    report(job)
    assert fresh(job).run.status == RunStatus.FAILED


def test_the_instance_of_a_signalled_job_is_not_reused(job: Job, fake: FakeCloud) -> None:
    fake.set("i-0", state=InstanceState.ENDING)
    report(job)
    fake.tick(5)
    fake.settle()
    assert (Instance.objects.get().status, Instance.objects.get().holder) == ("gone", None)
    assert attempts.end_job(job.pk, Reason.DONE_BY_RUNNER) is False
