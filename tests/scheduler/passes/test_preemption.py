"""Preemption as passes carry it out."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.notifications.models import Delivery
from dstackweb.runs import attempts, services
from dstackweb.runs.models import DisplacedWork, Job, Queue, Run
from dstackweb.runs.states import JobStatus, Reason, RunStatus
from dstackweb.scheduler.models import Reservation
from dstackweb.scheduler.passes import placement_pass
from dstackweb.scheduler.passes.decision import decide_now, plan
from dstackweb.wording import events as event_words, queue as queue_words
from tests.factories import join, make_host, make_run, make_user, place_all, placed_job, start

pytestmark = pytest.mark.django_db
GPU = {"resources": {"gpu": 1}}


def fresh(run: Run) -> Run:
    return Run.objects.select_related("queue", "project").get(pk=run.pk)


def statuses(*runs: Run) -> list[str]:
    return [fresh(run).status for run in runs]


def sentences(run: Run) -> list[str]:
    """The run's events in words."""
    return [str(event_words.event_text(one, 1)) for one in run.events.order_by("pk")]


def ends(run: Run, exit_code: int | None = 143) -> None:
    """The runner's report after it has got SIGTERM."""
    for job in Job.objects.filter(run=run, status=JobStatus.TERMINATING):
        attempts.report_end(job.pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=exit_code)


@pytest.fixture(autouse=True)
def queue(project: Project) -> Queue:
    found = Queue.objects.get(project=project)
    Queue.objects.filter(pk=found.pk).update(preempt_points=20)
    found.refresh_from_db()
    return found


def running(project: Project, user: User, name: str, **keys: Any) -> Run:
    run = make_run(project, user, name, **(GPU | {"preemptible": True, "priority": 10} | keys))
    place_all()
    for job in Job.objects.filter(run=run, attempt=1):
        start(job, f"nonce-{job.node}")
    return fresh(run)


@pytest.fixture
def low(project: Project, member: User) -> Run:
    """It runs on the only GPU."""
    make_host(gpus=1)
    return running(project, member, "low")


def urgent(project: Project, member: User, name: str = "urgent", **keys: Any) -> Run:
    return make_run(project, member, name, **(GPU | {"priority": 80} | keys))


def test_a_run_displaces_a_lower_one_which_keeps_its_place_and_runs_again(
    project: Project, member: User, low: Run
) -> None:
    first = urgent(project, join(project, make_user("bob")))
    place_all()
    job = placed_job(low)
    assert (job.status, job.stop_reason, job.stop_grace_s) == ("terminating", "preempted", 20)
    assert statuses(low, first) == ["terminating", "submitted"]
    assert "displaced by urgent of bob: it stops and is queued again" in sentences(low)
    assert f"displaces low of {member}" in sentences(first)
    assert Reservation.objects.get().run_id == first.pk
    ends(low)
    assert statuses(low) == ["submitted"]
    assert "back in its place in the queue after it was displaced" in sentences(low)
    assert place_all() == 1
    assert statuses(low, first) == ["submitted", "provisioning"]
    again = fresh(low)
    assert (again.attempt, again.seniority_us, again.rank) == (2, low.seniority_us, low.rank)
    assert not Reservation.objects.exists()
    attempts.end_job(start(placed_job(first), "other").pk, Reason.DONE_BY_RUNNER)
    place_all()
    start(placed_job(low), "again")
    attempts.end_job(placed_job(low).pk, Reason.DONE_BY_RUNNER)
    assert statuses(low, first) == ["done", "done"]


def test_what_was_freed_is_kept_for_the_run_that_displaced(project: Project, member: User, low: Run) -> None:
    first = urgent(project, member)
    place_all()
    behind = make_run(project, member, "behind", **GPU)
    ends(low)
    place_all()
    assert statuses(first, behind, low) == ["provisioning", "submitted", "submitted"]


def test_nobody_else_is_displaced_while_the_first_victim_still_stops(project: Project, member: User) -> None:
    make_host(gpus=2)
    runs = [running(project, member, f"low-{n}") for n in range(2)]
    urgent(project, member)
    for _ in range(3):
        place_all()
    assert sorted(statuses(*runs)) == ["running", "terminating"]
    assert fresh(runs[1]).status == "terminating"  # the newer one


def test_a_displaced_run_needs_no_retry_and_uses_up_none(project: Project, member: User) -> None:
    make_host(gpus=1)
    low = running(project, member, "low", retry={"on_events": ["error"], "max_attempts": 2})
    for n in range(3):
        first = urgent(project, member, f"urgent-{n}")
        place_all()
        ends(low)
        place_all()
        attempts.end_job(start(placed_job(first), f"first-{n}").pk, Reason.DONE_BY_RUNNER)
        place_all()
        start(placed_job(low), f"low-{n}")
    attempts.report_end(placed_job(low).pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=1)
    assert statuses(low) == ["pending"]  # its first failure, after four attempts
    assert fresh(low).attempt == 5


@pytest.mark.parametrize(
    ("of_low", "of_first", "points"),
    [
        ({"preemptible": False}, {}, 20),
        ({"priority": 61}, {}, 20),
        ({}, {}, None),
        ({}, {"resources": {"gpu": 2}}, 20),
        ({}, {"priority": 10}, 1),
    ],
)
def test_nobody_is_displaced_who_may_not_be_or_where_it_does_not_help(
    project: Project, member: User, queue: Queue, of_low: dict[str, Any], of_first: dict[str, Any], points: int | None
) -> None:
    Queue.objects.filter(pk=queue.pk).update(preempt_points=points)
    make_host(gpus=1)
    low = running(project, member, "low", **of_low)
    first = urgent(project, member, **of_first)
    place_all()
    assert statuses(low, first) == ["running", "submitted"]


def test_a_run_that_ranks_ahead_by_its_wait_is_not_displaced(project: Project, member: User, low: Run) -> None:
    """35 hours of waiting are worth 70 points."""
    Run.objects.filter(pk=low.pk).update(rank=low.rank - 71 * 30 * 60 * 1_000_000)
    first = urgent(project, member)
    place_all()
    assert statuses(low, first) == ["running", "submitted"]


def test_a_run_does_not_displace_past_one_ahead_that_waits_for_the_same_hosts(
    project: Project, member: User, low: Run
) -> None:
    ahead = urgent(project, member, "ahead", priority=29)
    Run.objects.filter(pk=ahead.pk).update(rank=low.rank - 10**15)
    first = urgent(project, member)
    place_all()
    assert statuses(low, ahead, first) == ["running", "submitted", "submitted"]


def test_a_run_that_ends_well_within_its_grace_is_done(project: Project, member: User, low: Run) -> None:
    urgent(project, member)
    place_all()
    attempts.report_end(placed_job(low).pk, Reason.DONE_BY_RUNNER, exit_code=0)
    assert statuses(low) == ["done"]


def test_a_displaced_run_that_its_member_stops_is_not_queued_again(project: Project, member: User, low: Run) -> None:
    urgent(project, member)
    place_all()
    services.stop(Run.objects.select_related("user").get(pk=low.pk), member, "member")
    ends(low)
    assert (fresh(low).status, fresh(low).termination_reason) == ("terminated", "stopped_by_user")


def test_a_run_that_no_runner_has_claimed_is_back_at_once(project: Project, member: User) -> None:
    make_host(gpus=1)
    low = make_run(project, member, "low", preemptible=True, priority=10, **GPU)
    place_all()
    first = urgent(project, member)
    place_all()
    place_all()
    assert statuses(low, first) == ["submitted", "provisioning"]


def test_all_nodes_of_a_run_are_stopped_for_one(project: Project, member: User) -> None:
    make_host("box-1", gpus=1)
    make_host("box-2", gpus=1)
    gang = running(project, member, "gang", nodes=2)
    first = urgent(project, member)
    place_all()
    assert {job.status for job in Job.objects.filter(run=gang)} == {"terminating"}
    attempts.report_end(placed_job(gang, 0).pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=143)
    place_all()
    assert statuses(gang, first) == ["terminating", "provisioning"]
    ends(gang)
    place_all()
    assert statuses(gang, first) == ["submitted", "provisioning"]


def test_nothing_is_stopped_for_a_run_whose_turn_comes_as_soon(project: Project, member: User) -> None:
    make_host(gpus=2)
    low = running(project, member, "low")
    ending = make_run(project, member, "ending", max_duration="1h", **GPU)
    place_all()
    start(placed_job(ending), "other")
    Job.objects.filter(run=ending).update(started_at=timezone.now() - dt.timedelta(minutes=60))
    first = urgent(project, member)
    place_all()
    assert statuses(low, ending, first) == ["running", "running", "submitted"]


def test_a_victim_that_changed_meanwhile_has_the_pass_start_over(
    project: Project, member: User, low: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = urgent(project, member)
    write = placement_pass.apply.write_displacements

    def late(*args: Any) -> None:
        Run.objects.filter(pk=low.pk).update(priority=75)
        write(*args)

    monkeypatch.setattr(placement_pass.apply, "write_displacements", late)
    place_all()
    assert statuses(low, first) == ["running", "submitted"]
    assert not Reservation.objects.exists()


def test_a_victim_that_left_the_queue_meanwhile_is_not_stopped(
    project: Project, member: User, low: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    urgent(project, member)
    other = services.ensure_queue(project, "other")
    write = placement_pass.apply.write_displacements

    def late(*args: Any) -> None:
        Run.objects.filter(pk=low.pk).update(queue=other)
        write(*args)

    monkeypatch.setattr(placement_pass.apply, "write_displacements", late)
    place_all()
    assert statuses(low) == ["running"]


def test_a_limit_does_not_keep_a_run_from_what_others_leave_for_it(
    project: Project, queue: Queue, member: User, low: Run
) -> None:
    ann = join(project, make_user("ann"))
    Queue.objects.filter(pk=queue.pk).update(max_running_per_user=1)
    first = urgent(project, ann)
    small = make_run(project, ann, "small", resources={"cpu": 1}, priority=40)
    for _ in range(3):
        place_all()
        assert statuses(low, first, small) == ["terminating", "submitted", "submitted"]
    ends(low)
    place_all()
    assert statuses(low, first, small) == ["submitted", "provisioning", "submitted"]


def test_a_run_that_may_not_use_hosts_keeps_nobody_from_displacing(project: Project, member: User, low: Run) -> None:
    urgent(project, member, "elsewhere", backends=["cloud"])
    first = urgent(project, member)
    place_all()
    assert statuses(low, first) == ["terminating", "submitted"]


def test_a_displaced_run_waits_from_when_it_is_back(project: Project, member: User, low: Run) -> None:
    before = fresh(low).queued_at
    urgent(project, member)
    place_all()
    ends(low)
    assert fresh(low).status == "submitted"
    assert fresh(low).queued_at > before
    assert fresh(low).seniority_us == low.seniority_us


def test_the_owner_of_a_displaced_run_is_notified(project: Project, low: Run) -> None:
    urgent(project, join(project, make_user("bob")))
    place_all()
    note = Delivery.objects.get(event="run_displaced")
    assert (note.data["run"], note.data["data"]["run"], note.data["data"]["user"]) == ("low", "urgent", "bob")


def test_plan_and_why_say_what_it_would_cost_until_it_is_done(project: Project, member: User, low: Run) -> None:
    Job.objects.filter(run=low).update(placed_at=timezone.now() - dt.timedelta(minutes=35))
    config = {"type": "task", "commands": ["true"], "priority": 80, **GPU}
    planned = plan(project, member, "member", services.Submission(config))
    text = f"when its turn comes, it displaces 1 run of {member}: 35 min of work"
    assert queue_words.would_displace(planned) == text
    assert not plan(project, member, "member", services.Submission(config | {"priority": 29})).displaces
    first = urgent(project, member)
    assert [one.name for one in decide_now(fresh(first)).displaces] == ["low"]
    assert fresh(low).status == "running"
    place_all()
    assert not decide_now(fresh(first)).displaces


def test_a_run_that_is_waited_for_is_gone_when_it_was_asked_to(project: Project, member: User, low: Run) -> None:
    first = urgent(project, member)
    place_all()
    starts_at = Reservation.objects.get().starts_at
    assert starts_at is not None
    assert 60 < (starts_at - timezone.now()).total_seconds() < 100
    place_all()
    assert Reservation.objects.get().starts_at == starts_at
    assert decide_now(fresh(first)).reservation is not None
    assert fresh(first).status == RunStatus.SUBMITTED


def test_a_members_runs_displace_no_more_work_than_their_budget_of_a_day(
    project: Project, member: User, queue: Queue, low: Run
) -> None:
    """One GPU for 90 minutes each time: the second time within a day is above two GPU-hours."""
    Queue.objects.filter(pk=queue.pk).update(preempt_gpu_hours=2)
    bob, eve = (join(project, make_user(name)) for name in ("bob", "eve"))
    placed_at = timezone.now() - dt.timedelta(minutes=90)
    Job.objects.filter(run=low).update(placed_at=placed_at)
    first = urgent(project, bob)
    place_all()
    ends(low)
    assert place_all() == 1
    attempts.end_job(start(placed_job(first), "other").pk, Reason.DONE_BY_RUNNER)
    place_all()
    start(placed_job(low), "again")
    Job.objects.filter(run=low, attempt=2).update(placed_at=placed_at)
    second = urgent(project, bob, "second")
    place_all()
    assert statuses(low, second) == ["running", "submitted"]
    decision = decide_now(fresh(second))
    assert [one.name for one in decision.displaces] == ["low"]
    budget = decision.work_budget
    assert budget is not None
    assert budget.displaced_ms // 60_000 == 90
    assert budget.allowed_at is None  # by then the victim's own work is above it
    said = str(queue_words.budget_of_work(budget, decision.at))
    assert said == "to displace 1.5 GPU-h of work is above its member's budget of 2 GPU-h in 24 h"
    Job.objects.filter(run=low, attempt=2).update(placed_at=timezone.now())
    DisplacedWork.objects.update(gpu_ms=2 * 3_600_000, at=timezone.now() - dt.timedelta(hours=23))
    later = decide_now(fresh(second))
    assert later.work_budget is not None
    assert later.work_budget.allowed_at == DisplacedWork.objects.get().at + dt.timedelta(days=1)
    said = str(queue_words.budget_of_work(later.work_budget, later.at))
    assert said.startswith("its member's runs displaced 2 of 2 GPU-h in 24 h: it may displace from ")
    services.stop(second, bob, "member")
    urgent(project, eve, "third")  # the budget is each member's own
    place_all()
    assert statuses(low) == ["terminating"]
    assert DisplacedWork.objects.count() == 2
    DisplacedWork.objects.update(at=timezone.now() - dt.timedelta(days=2))
    Queue.objects.filter(pk=queue.pk).update(preempt_gpu_hours=None)
