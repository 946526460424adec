"""What hosts name after a restore, and what the server does with it, without their processes (`tests/faults`)."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from django.db import transaction
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Host
from dstackweb.lib.models import Watch
from dstackweb.runs import recount
from dstackweb.runs.attempts import end_job, report_end, requeue_due
from dstackweb.runs.launch import ticket
from dstackweb.runs.models import Allocation, Job, Run, RunEvent
from dstackweb.runs.states import Reason
from dstackweb.runs.sweeps import creation
from dstackweb.scheduler import host_agents, restored
from dstackweb.scheduler.models import RestoredHost
from dstackweb.wording.events import event_text
from tests.api.test_host_agents import FILES, agent
from tests.api.test_runner_api import Runner
from tests.factories import make_run, place_all, placed_job, start
from tests.runs.sweeps.test_sweeps import make_sweep

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call reads the hosts again."""
    monkeypatch.setattr(host_agents, "REFRESH_S", 0.0)
    monkeypatch.setattr(host_agents, "_known", host_agents.KnownHosts())


@contextmanager
def since_the_backup() -> Iterator[None]:
    """What is written meanwhile is lost: the backup of before is restored."""
    backup = transaction.savepoint()
    yield
    transaction.savepoint_rollback(backup)
    restored.begin()


def held(job: Job, *, nodes: int = 1, nonce: str = "nonce", ended: bool = True) -> dict[str, Any]:
    """A job as its host has it."""
    return {"ticket": ticket(job, nodes), "nonce": nonce, "ended": ended}


def wait_in_vain() -> None:
    """Nobody has to be waited for any more."""
    RestoredHost.objects.update(since_s=Watch.now_s() - restored.WAIT_S - 1)


def test_nothing_is_placed_until_every_host_has_answered(project: Project, member: User) -> None:
    run, far, near = make_run(project, member), agent("far"), agent("near")
    with since_the_backup():
        pass
    assert place_all() == 0
    assert far.poll()["tickets"] is True
    assert far.poll(tickets=[])["tickets"] is True  # as it was when the call came
    assert far.poll()["tickets"] is False
    assert place_all() == 0
    assert restored.missing_hosts() == ["near"]
    near.poll(tickets=[], tickets_left=1)
    assert restored.missing_hosts() == ["near"]
    near.poll(tickets=[])
    assert place_all() == 1
    run.refresh_from_db()
    assert (run.status, run.attempt, restored.is_waiting()) == ("provisioning", 1, False)


def test_a_host_that_does_not_come_back_is_named_and_waited_for_a_minute(
    project: Project, member: User, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(project, member)
    agent("far")
    with since_the_backup():
        pass
    assert place_all() == 0
    wait_in_vain()
    assert place_all() == 1
    assert "not heard from far within 60 s" in caplog.text


def test_a_run_that_ended_meanwhile_is_not_placed_but_ends_as_its_runner_reports(
    project: Project, member: User
) -> None:
    far, run = agent("far"), make_run(project, member)
    with since_the_backup():
        place_all()
        job = start(placed_job(run))
        ticket_of_it = held(job)
        report_end(job.pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=3)
    assert not Job.objects.exists()
    far.poll(tickets=[ticket_of_it])
    assert place_all() == 0
    run.refresh_from_db()
    assert (run.status, Job.objects.get().pk) == ("running", job.pk)
    placed = RunEvent.objects.get(run=run, kind="provisioning")
    assert event_text(placed, nodes=1) == "found after a restore: placed on far"
    # A runner is started as for any job whose runner has died, and repeats its claim.
    (order,) = far.poll()["start"]
    assert (order["job"], order["run_uid"]) == (str(job.pk), str(run.uid))
    runner = Runner(job, "nonce")
    assert runner.post("claim", {"nonce": "nonce"}).status_code == 200
    report_end(job.pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=3)
    run.refresh_from_db()
    assert (run.status, run.exit_code, run.attempt) == ("failed", 3, 1)
    assert not list(recount.differences())


def test_what_still_runs_holds_what_it_has_and_is_not_placed_again(project: Project, member: User) -> None:
    far = agent("far", gpus=2)
    run = make_run(project, member, resources={"gpu": 2, "cpu": 4})
    with since_the_backup():
        place_all()
        job = start(placed_job(run))
        ticket_of_it = held(job, ended=False)
    other = make_run(project, member, resources={"gpu": 1})
    # Its runner is not told to end before that is known.
    runner = Runner(job, "nonce")
    assert runner.post("heartbeat", {"beat": 1}).status_code == 425
    far.poll(tickets=[ticket_of_it])
    place_all()
    assert runner.post("heartbeat", {"beat": 2}).json()["action"] == "go"
    other.refresh_from_db()
    assert other.status == "submitted"
    assert Allocation.objects.filter(job=job, gpu__isnull=False).count() == 2
    assert Host.objects.get().cpus_used == 4
    end_job(job.pk, Reason.DONE_BY_RUNNER)
    assert place_all() == 1
    assert not list(recount.differences())


def test_a_job_that_was_only_placed_goes_on_with_the_runner_that_has_begun_since(
    project: Project, member: User
) -> None:
    far, run = agent("far"), make_run(project, member)
    place_all()
    job = placed_job(run)
    with since_the_backup():
        ticket_of_it = held(start(job), ended=False)
    runner = Runner(job, "nonce")
    assert runner.post("heartbeat", {"beat": 1}).status_code == 425
    far.poll(tickets=[ticket_of_it])
    assert runner.post("heartbeat", {"beat": 2}).json()["action"] == "go"
    place_all()
    run.refresh_from_db()
    assert (run.status, run.attempt, Job.objects.count()) == ("running", 1, 1)


def test_what_a_known_job_still_holds_is_waited_for(project: Project, member: User) -> None:
    far, first = agent("far", gpus=1), make_run(project, member, resources={"gpu": 1})
    place_all()
    known = start(placed_job(first), "other")
    run = make_run(project, member, resources={"gpu": 1})
    with since_the_backup():
        end_job(known.pk, Reason.DONE_BY_RUNNER)
        place_all()
        ticket_of_it = held(start(placed_job(run)), ended=False)
    far.poll(tickets=[ticket_of_it])
    assert place_all() == 0
    assert restored.is_waiting()
    end_job(known.pk, Reason.DONE_BY_RUNNER)
    assert place_all() == 0
    run.refresh_from_db()
    assert (run.status, restored.is_waiting()) == ("running", False)


def test_a_run_that_a_person_has_stopped_since_ends_as_stopped(project: Project, member: User) -> None:
    far, run = agent("far"), make_run(project, member)
    with since_the_backup():
        place_all()
        job = start(placed_job(run))
        ticket_of_it = held(job)
    far.poll(tickets=[ticket_of_it])
    place_all()
    report_end(job.pk, Reason.TERMINATED_BY_USER, exit_code=143)
    run.refresh_from_db()
    assert (run.status, run.termination_reason) == ("terminated", "stopped_by_user")


@pytest.mark.parametrize("is_there", [True, False])
def test_nodes_are_taken_back_together_and_without_one_the_attempt_is_interrupted(
    project: Project, member: User, is_there: bool
) -> None:
    far, near = agent("far", cpus=4), agent("near", cpus=4)
    run = make_run(project, member, nodes=2, resources={"cpu": 4})
    with since_the_backup():
        place_all()
        jobs = {job.host.name: held(start(job), nodes=2) for job in Job.objects.select_related("host", "run")}
    far.poll(tickets=[jobs["far"]])
    near.poll(tickets=[jobs["near"]] if is_there else [])
    assert place_all() == 0
    run.refresh_from_db()
    assert run.status == ("running" if is_there else "submitted")
    wait_in_vain()
    assert place_all() == 0
    run.refresh_from_db()
    assert run.status == ("running" if is_there else "failed")
    assert not list(recount.differences())


def test_a_run_of_a_sweep_that_was_created_since_the_backup_is_known_when_it_is_created_again(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creation, "WAITING_AT_ONCE", 1)
    far = agent("far", cpus=1)
    sweep = make_sweep(project, member, 3, resources={"cpu": 1})
    tickets, ids = [], set()
    with since_the_backup():
        for index in range(2):
            place_all()
            job = start(placed_job(Run.objects.get(sweep=sweep, sweep_index=index)))
            tickets.append(held(job))
            ids.add(job.pk)
            end_job(job.pk, Reason.DONE_BY_RUNNER)
    assert Run.objects.filter(sweep=sweep).count() == 1
    far.poll(tickets=tickets)
    place_all()
    assert ids < set(Job.objects.values_list("pk", flat=True))
    for job_id in ids:
        end_job(job_id, Reason.DONE_BY_RUNNER)
    place_all()
    assert {run.sweep_index: run.status for run in Run.objects.filter(sweep=sweep)} == {
        0: "done", 1: "done", 2: "provisioning",
    }  # fmt: skip
    assert not list(recount.differences())


def test_so_many_ends_are_reported_at_once_and_the_others_follow(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restored, "REPORTS_AT_ONCE", 2)
    far, runs = agent("far"), [make_run(project, member) for _ in range(3)]
    with since_the_backup():
        place_all()
        tickets = [held(start(placed_job(run))) for run in runs]
    far.poll(tickets=tickets)
    assert place_all() == 0
    taken = list(Job.objects.values_list("pk", flat=True))
    assert (len(taken), restored.is_waiting()) == (2, True)
    end_job(taken[0], Reason.DONE_BY_RUNNER)
    assert place_all() == 0
    assert (Job.objects.count(), restored.is_waiting()) == (3, False)


def test_a_later_attempt_says_that_the_one_of_the_backup_is_over(project: Project, member: User) -> None:
    far = agent("far")
    run = make_run(project, member, retry={"on_events": ["interruption"]})
    place_all()
    before = start(placed_job(run), "other")
    with since_the_backup():
        end_job(before.pk, Reason.INSTANCE_UNREACHABLE)
        requeue_due(timezone.now() + dt.timedelta(hours=1))
        place_all()
        job = start(placed_job(run))
        ticket_of_it = held(job)
    far.poll(tickets=[ticket_of_it])
    place_all()
    run.refresh_from_db()
    assert (run.status, run.attempt) == ("running", 1)
    wait_in_vain()
    place_all()
    run.refresh_from_db()
    assert (run.status, run.attempt, placed_job(run).pk) == ("running", 2, job.pk)
    assert not list(recount.differences())


def test_a_host_can_name_only_jobs_that_it_got(project: Project, member: User) -> None:
    far, near, run = agent("far"), agent("near"), make_run(project, member)
    with since_the_backup():
        place_all()
        job = start(placed_job(run))
        assert job.host is not None
        ticket_of_it = held(job)
        stranger = {"far": near, "near": far}[job.host.name]
        holder = {"far": far, "near": near}[job.host.name]
    stranger.poll(tickets=[ticket_of_it, {"ticket": "made:up", "nonce": "n", "ended": True}])
    holder.poll(tickets=[ticket_of_it | {"ticket": ticket_of_it["ticket"][:-1] + "?"}])
    assert place_all() == 1
    assert placed_job(run).pk != job.pk


def test_no_file_of_a_job_is_removed_before_it_is_known_which_are_needed() -> None:
    far, job = agent("far"), str(uuid4())
    with since_the_backup():
        pass
    assert far.post("files", {**FILES, "jobs": [job]}).json()["jobs"] == []
    far.poll(tickets=[])
    place_all()
    assert far.post("files", {**FILES, "jobs": [job]}).json()["jobs"] == [job]
    assert Runner(Job(pk=job)).post("heartbeat", {"beat": 1}).status_code == 404
