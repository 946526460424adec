"""Cloud instances are watched, kept for the next run, released and ended; spot instances are reclaimed.

What a cloud does not report changes nothing.
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest
from pytest_django import Settings

from dstackweb.accounts.models import Project, User
from dstackweb.backends.contract import CloudInstance, InstanceState
from dstackweb.backends.models import Backend, Instance
from dstackweb.lib.models import Watch
from dstackweb.runs import attempts, services
from dstackweb.runs.models import Job, Run
from dstackweb.runs.recount import differences
from dstackweb.runs.states import JobStatus, Reason, RunStatus
from dstackweb.scheduler.cloud import watch as cloud_watch
from dstackweb.scheduler.passes import apply
from tests.factories import join, make_project, make_run, place_all
from tests.scheduler.cloud.cloud_fake import THROTTLED, FakeCloud, begin, job_of, joined, offer, running

pytestmark = pytest.mark.django_db


@pytest.fixture
def fake(db: None, monkeypatch: pytest.MonkeyPatch) -> FakeCloud:
    return FakeCloud(monkeypatch)


def paid(project: Project, member: User, **keys: Any) -> Run:
    return make_run(project, member, **({"backends": ["aws"]} | keys))


def fresh(run: Run) -> Run:
    return Run.objects.get(pk=run.pk)


def waits_again(run: Run) -> bool:
    """In its second attempt, whether or not its back-off has passed."""
    now = fresh(run)
    return now.attempt == 2 and now.status in (RunStatus.PENDING, RunStatus.SUBMITTED)


def the_machine() -> Instance:
    return Instance.objects.get()


def done(job: Job) -> None:
    attempts.end_job(job.pk, Reason.DONE_BY_RUNNER, exit_code=0)


def test_an_idle_instance_serves_only_the_next_run_of_the_same_project(
    project: Project, member: User, fake: FakeCloud
) -> None:
    done(running(paid(project, member), fake))
    fake.tick()
    idle = the_machine()
    assert (idle.status, idle.holder) == ("running", None)
    assert idle.idle_until == fake.now + dt.timedelta(minutes=5)
    stranger = paid(make_project(), member, role="manager")
    again = paid(project, member)
    assert place_all() == 2
    assert job_of(again).instance == idle
    assert job_of(stranger).instance != idle
    assert again.events.get(kind="provisioning").data["nodes"][0]["idle"] is True
    cloud_watch.poll_all()
    assert len(fake.launches) == 2
    fake.tick(100)
    assert job_of(again).instance.status == "running"


def test_an_idle_instance_terminates_after_its_idle_time_and_is_gone_once_confirmed(
    project: Project, member: User, fake: FakeCloud
) -> None:
    done(running(paid(project, member, idle_duration="1m"), fake))
    fake.tick(45)
    assert fake.terminated == []
    fake.tick(45)
    assert fake.terminated == ["i-0"]
    fake.tick(120)
    assert (the_machine().status, the_machine().ended_at) == ("stopping", None)
    fake.settle()
    assert (the_machine().status, the_machine().why) == ("gone", "idle")
    assert set(fake.terminated) == {"i-0"}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"idle_duration": "off"}, Reason.DONE_BY_RUNNER),
        ({}, Reason.EXECUTOR_ERROR),
        ({}, Reason.INSTANCE_UNREACHABLE),
    ],
)
def test_an_instance_without_idle_time_terminates_with_its_job(
    project: Project, member: User, fake: FakeCloud, keys: dict[str, Any], reason: Reason
) -> None:
    attempts.end_job(running(paid(project, member, **keys), fake).pk, reason)
    fake.tick(10)
    assert fake.terminated == ["i-0"]


@pytest.mark.parametrize(
    ("by_engine", "reason"), [(False, Reason.EXECUTOR_ERROR), (True, Reason.CREATING_CONTAINER_ERROR)]
)
def test_a_job_that_its_instance_cannot_start_fails_before_it_costs_another_instance(
    project: Project, member: User, fake: FakeCloud, by_engine: bool, reason: Reason
) -> None:
    job = running(paid(project, member), fake)
    attempts.report_end(job.pk, Reason.NOT_CLAIMED, message="no space", by_engine=by_engine)
    job.refresh_from_db()
    assert job.termination_reason == reason
    assert Run.objects.get(pk=job.run_id).status == RunStatus.FAILED
    fake.tick(10)
    assert fake.terminated == ["i-0"]


def test_an_instance_of_a_deleted_backend_is_not_kept_for_reuse(
    project: Project, member: User, fake: FakeCloud
) -> None:
    done(running(paid(project, member), fake))
    fake.tick()
    Backend.objects.update(deleted_at=fake.now)
    fake.tick(20)
    assert fake.terminated == ["i-0"]


def test_a_concurrently_terminated_idle_instance_is_not_reused(
    project: Project, member: User, fake: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(running(paid(project, member), fake))
    fake.tick()
    again = paid(project, member)
    write = apply.write_decisions

    def too_late(*args: Any) -> None:
        Instance.objects.filter(holder=None).update(status="stopping")
        write(*args)

    monkeypatch.setattr(apply, "write_decisions", too_late)
    assert place_all() == 1
    assert job_of(again).instance.cloud_id == ""
    assert list(differences()) == []


def test_a_run_stopped_before_its_instance_joined_ends_at_once_with_the_instance(
    project: Project, member: User, fake: FakeCloud
) -> None:
    run = paid(project, member)
    place_all()
    cloud_watch.poll_all()
    services.stop(run, member, "member")
    assert fresh(run).status == RunStatus.TERMINATED
    fake.tick(20)
    assert fake.terminated == ["i-0"]


@pytest.mark.slow
def test_an_instance_that_never_joins_is_terminated_and_the_next_offer_tried(
    project: Project, member: User, fake: FakeCloud, settings: Settings
) -> None:
    settings.DSTACKWEB_CLOUD_START_DEADLINE_S = 300
    fake.offers = [offer("a", "1"), offer("b", "2")]
    run = paid(project, member)
    place_all()
    fake.tick(285)
    assert fake.launches == ["a"]
    fake.tick(45)
    assert (fake.launches, fake.terminated) == (["a", "b"], ["i-0"])
    assert run.events.get(kind="offer_failed").data["code"] == "not_started"
    fake.tick(330)
    assert waits_again(run)


@pytest.mark.slow
def test_an_instance_whose_agent_starts_no_runner_is_given_up_with_its_orders(
    project: Project, member: User, fake: FakeCloud
) -> None:
    run = paid(project, member)
    begin(fake)
    first = job_of(run)
    for _ in range(22):
        Instance.objects.update(heartbeats=the_machine().heartbeats + 1)
        fake.tick(15)
    first.refresh_from_db()
    assert (first.status, first.termination_reason) == (JobStatus.FAILED, Reason.OUT_OF_CAPACITY)
    assert waits_again(run)
    fake.tick(20)
    assert fake.terminated == ["i-0"]


@pytest.mark.slow
def test_a_silent_instance_is_terminated_and_its_run_ends_once_that_is_confirmed(
    project: Project, member: User, fake: FakeCloud, settings: Settings
) -> None:
    settings.DSTACKWEB_LOST_AFTER_S = 300
    run = paid(project, member, retry=True)
    running(run, fake)
    fake.tick(330)
    assert fake.terminated == []
    fake.tick(90)
    assert fake.terminated[0] == "i-0"
    assert fresh(run).status == RunStatus.RUNNING
    fake.settle()
    assert waits_again(run)
    assert Job.objects.get(run=run, attempt=1).termination_reason == Reason.INSTANCE_UNREACHABLE


def test_an_hour_without_a_watcher_terminates_no_instance(project: Project, member: User, fake: FakeCloud) -> None:
    running(paid(project, member), fake)
    fake.now += dt.timedelta(hours=1)
    fake.monotonic += 3600
    fake.tick(10)
    assert (fake.terminated, the_machine().status) == ([], "running")


@pytest.mark.parametrize("retried", [True, False])
def test_a_reclaimed_spot_instance_stops_its_job_in_time(
    project: Project, member: User, fake: FakeCloud, retried: bool
) -> None:
    fake.offers = [offer("a", "1", spot=True)]
    run = paid(project, member, spot_policy="spot", retry=retried, stop_duration=300)
    running(run, fake)
    Instance.objects.update(interrupted_at=fake.now + dt.timedelta(seconds=120))
    fake.tick(5)
    job = job_of(run)
    assert (job.status, job.stop_reason, job.stop_grace_s) == (JobStatus.TERMINATING, Reason.INTERRUPTED, 105)
    fake.tick(30)
    assert job_of(run).stop_grace_s == 105
    assert run.events.filter(kind="spot_interruption").count() == 1
    attempts.end_job(job.pk, Reason.TERMINATED_BY_SERVER)
    assert fresh(run).status == (RunStatus.PENDING if retried else RunStatus.FAILED)
    assert Job.objects.get(pk=job.pk).termination_reason == Reason.INTERRUPTED
    fake.tick(20)
    assert (fake.terminated, the_machine().holder) == (["i-0"], None)


def test_an_instance_reclaimed_without_notice_is_an_interruption_once_gone(
    project: Project, member: User, fake: FakeCloud
) -> None:
    run = paid(project, member, retry=True)
    running(run, fake)
    fake.set("i-0", state=InstanceState.ENDING, why="interrupted")
    fake.tick(35)
    assert (the_machine().status, fresh(run).status) == ("stopping", RunStatus.RUNNING)
    fake.set("i-0", state=InstanceState.GONE, why="interrupted")
    fake.tick(35)
    assert waits_again(run)
    assert Job.objects.get(run=run, attempt=1).termination_reason == Reason.INTERRUPTED


def test_an_instance_that_terminates_before_it_joined_is_replaced(
    project: Project, member: User, fake: FakeCloud
) -> None:
    fake.offers = [offer("a", "1"), offer("b", "2")]
    run = paid(project, member)
    place_all()
    cloud_watch.poll_all()
    fake.set("i-0", state=InstanceState.GONE, why="cloud", text="Server.InternalError")
    fake.tick(40)
    assert (job_of(run).instance_type, job_of(run).attempt) == ("b", 1)
    failed = run.events.get(kind="offer_failed").data
    assert (failed["code"], failed["text"]) == ("cloud", "Server.InternalError")


def test_an_unlisted_instance_is_gone_only_after_a_successful_answer(
    project: Project, member: User, fake: FakeCloud
) -> None:
    run = paid(project, member)
    job = running(run, fake)
    fake.there.clear()
    fake.throttled = THROTTLED
    for _ in range(10):
        Job.objects.filter(pk=job.pk).update(heard_at_s=Watch.now_s())
        fake.tick(60, step_s=60)
    assert (the_machine().status, fresh(run).status) == ("running", RunStatus.RUNNING)
    fake.throttled = None
    fake.tick(35)
    assert (the_machine().status, fresh(run).status) == ("gone", RunStatus.FAILED)


def test_a_job_that_does_not_stop_has_its_instance_terminated(project: Project, member: User, fake: FakeCloud) -> None:
    run = paid(project, member, stop_duration=10)
    running(run, fake)
    services.stop(run, member, "member")
    fake.tick(60)
    assert fake.terminated == []
    fake.tick(30)
    assert fake.terminated[:1] == ["i-0"]
    fake.settle()
    assert (fresh(run).status, job_of(run).termination_reason) == (RunStatus.TERMINATED, Reason.TERMINATED_BY_USER)


def test_the_watcher_killed_between_the_job_and_its_instance_continues(
    project: Project, member: User, fake: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dstackweb.scheduler.cloud import instances as cloud_rows

    run = paid(project, member, retry=True)
    running(run, fake)
    fake.set("i-0", state=InstanceState.GONE, why="interrupted")
    with monkeypatch.context() as killed:
        killed.setattr(cloud_rows, "_write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fake.tick(40)
    assert waits_again(run)
    fake.tick(40)
    assert (the_machine().status, the_machine().holder) == ("gone", None)


def test_orphans_at_the_cloud_are_ended_unless_they_are_young(project: Project, member: User, fake: FakeCloud) -> None:
    paid(project, member)
    place_all()
    cloud_watch.poll_all()
    known = Instance.objects.get()
    long_ago, just_now = fake.now - dt.timedelta(minutes=11), fake.now - dt.timedelta(minutes=9)
    for name, instance, began in [
        ("i-lost", str(uuid4()), long_ago),
        ("i-young", str(uuid4()), just_now),
        ("i-double", str(known.pk), long_ago),
        ("i-untagged", "", long_ago),
    ]:
        fake.there[name] = CloudInstance(instance, name, "eu", InstanceState.RUNNING, launched_at=began)
    fake.there["i-far"] = CloudInstance(str(uuid4()), "i-far", "us", InstanceState.RUNNING, launched_at=long_ago)
    fake.throttled = THROTTLED
    cloud_watch.end_orphans()
    assert fake.terminated == []
    fake.throttled = None
    cloud_watch.end_orphans()
    assert sorted(fake.terminated) == ["i-double", "i-far", "i-lost", "i-untagged"]


def test_an_instance_start_is_recorded_once(project: Project, member: User, fake: FakeCloud) -> None:
    fake.offers = [offer("a", "1.5", spot=True)]
    run = paid(project, member, spot_policy="spot")
    begin(fake)
    fake.tick(40)
    started = run.events.get(kind="machine_started")
    assert started.node == 0
    assert started.data == {
        "backend": "aws", "region": "eu", "instance_type": "a", "cloud_id": "i-0", "spot": True, "price": "1.5000",
    }  # fmt: skip


def test_a_stopped_instance_is_terminated_too(project: Project, member: User, fake: FakeCloud) -> None:
    done(running(paid(project, member, idle_duration="off"), fake))
    fake.set("i-0", state=InstanceState.STOPPED)
    fake.tick(35)
    assert fake.terminated[0] == "i-0"


def test_all_nodes_know_the_first_one_s_address_when_they_start(
    project: Project, member: User, fake: FakeCloud
) -> None:
    from dstackweb.runs.launch import attempt_fields, runner_spec

    run = paid(project, member, nodes=2)
    begin(fake)
    _first, second = Job.objects.select_related("run__project", "instance", "host").filter(run=run).order_by("node")
    assert runner_spec(second)["host"] == second.instance.cloud_id
    assert attempt_fields(second.run_id, second.attempt) == {"master_ip": "10.0.0.1", "gpus_total": 0}


@pytest.mark.slow
def test_when_one_node_gets_no_instance_the_others_stop_and_the_run_is_requeued(
    project: Project, member: User, fake: FakeCloud
) -> None:
    run = paid(project, member, nodes=2)
    begin(fake)
    first, _ = Job.objects.filter(run=run).order_by("node")
    attempts.claim_job(first.pk, "n", "there")
    fake.tick(330)
    first.refresh_from_db()
    assert (fresh(run).status, first.status) == (RunStatus.TERMINATING, JobStatus.TERMINATING)
    attempts.end_job(first.pk, Reason.TERMINATED_BY_SERVER)
    assert waits_again(run)


def test_a_run_is_billed_by_the_second_from_the_launch_or_the_reuse_of_its_instance(
    project: Project, member: User, fake: FakeCloud
) -> None:
    from dstackweb.runs.usage import costs_by_run, spent_this_month

    fake.now = dt.datetime(2026, 5, 11, tzinfo=dt.UTC)
    fake.offers = [offer("a", "3.6")]
    first = paid(project, member, idle_duration="1h")
    place_all()
    fake.now += dt.timedelta(seconds=30)
    assert costs_by_run([first], fake.now) == {}
    cloud_watch.poll_all()
    joined()
    fake.now += dt.timedelta(seconds=100)
    assert costs_by_run([first], fake.now) == {first.pk: Decimal("0.1")}
    from tests.factories import start

    done(start(job_of(first)))
    cloud_watch.poll_all()
    fake.now += dt.timedelta(seconds=50)
    second = paid(project, member)
    assert place_all() == 1
    fake.now += dt.timedelta(seconds=10)
    assert costs_by_run([first, second], fake.now) == {first.pk: Decimal("0.1"), second.pk: Decimal("0.01")}
    assert spent_this_month(project.pk, fake.now) == Decimal("0.16")


def test_a_budget_is_marked_once_at_each_share_and_again_after_a_change(
    project: Project, member: User, fake: FakeCloud
) -> None:
    from dstackweb.runs.models import BudgetMark
    from dstackweb.runs.usage import mark_budgets

    fake.now = dt.datetime(2026, 5, 11, tzinfo=dt.UTC)
    project.monthly_budget = Decimal(10)
    project.save()
    running(paid(project, member), fake)

    def marks() -> list[int]:
        mark_budgets(fake.now)
        mark_budgets(fake.now)
        return sorted(BudgetMark.objects.values_list("percent", flat=True))

    assert marks() == []
    fake.now += dt.timedelta(hours=5)
    assert marks() == [50]
    fake.now += dt.timedelta(hours=5)
    assert marks() == [50, 80, 100]
    project.monthly_budget = Decimal(19)
    project.save()
    assert marks() == [50]
    fake.now = dt.datetime(2026, 6, 1, 9, tzinfo=dt.UTC)
    assert marks() == [50]
    assert BudgetMark.objects.filter(month=dt.date(2026, 6, 1)).count() == 0


def test_a_member_of_another_project_pays_nothing(project: Project, member: User, fake: FakeCloud) -> None:
    from dstackweb.runs.usage import spent_this_month

    other = make_project()
    join(other, member)
    running(paid(project, member), fake)
    fake.now += dt.timedelta(hours=1)
    assert (spent_this_month(project.pk, fake.now), spent_this_month(other.pk, fake.now)) == (Decimal(1), Decimal(0))


def test_a_region_that_one_tick_has_no_time_for_is_polled_by_the_next(
    project: Project, member: User, fake: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.offers = [offer(region=region) for region in fake.regions]
    for region in fake.regions:
        paid(project, member, regions=[region])
    place_all()
    fake.tick()
    fake.now += dt.timedelta(seconds=31)
    polled: list[str] = []

    def poll_slowly(_backend: Backend, region: str) -> None:
        polled.append(region)
        fake.monotonic += 60

    monkeypatch.setattr(cloud_watch, "poll_region", poll_slowly)
    cloud_watch.poll_all()
    cloud_watch.poll_all()
    assert polled == ["eu", "us"]
