"""A job gets a cloud instance: from the next offer where one is refused."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Backend, Instance
from dstackweb.lib.models import Watch
from dstackweb.runs import attempts
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import JobStatus, Reason, RunStatus
from dstackweb.scheduler.cloud import launching, watch as cloud_watch
from dstackweb.wording import statuses
from tests.factories import make_run, place_all
from tests.scheduler.cloud.cloud_fake import THROTTLED, FakeCloud, begin, job_of, offer, refused

pytestmark = pytest.mark.django_db


@pytest.fixture
def fake(db: None, monkeypatch: pytest.MonkeyPatch) -> FakeCloud:
    return FakeCloud(monkeypatch)


def paid(project: Project, member: User, **keys: Any) -> Run:
    return make_run(project, member, **({"backends": ["aws"]} | keys))


def fresh(run: Run) -> Run:
    return Run.objects.get(pk=run.pk)


def test_a_placed_job_has_its_instance_row_before_the_cloud_is_called(
    project: Project, member: User, fake: FakeCloud
) -> None:
    fake.offers = [offer("g5", gpu_name="A10G", gpu_count=1, gpu_memory_mib=24576)]
    run = paid(project, member)
    place_all()
    instance = Instance.objects.get()
    assert fake.asked == 0
    assert (instance.holder, instance.status, instance.gpu_count) == (job_of(run).pk, "requested", 1)
    cloud_watch.poll_all()
    instance.refresh_from_db()
    assert (instance.status, instance.cloud_id, instance.launched_at) == ("starting", "i-0", fake.now)


def test_a_refused_offer_is_recorded_and_the_next_cheapest_is_tried(
    project: Project, member: User, fake: FakeCloud
) -> None:
    fake.offers = [offer("a", "1"), offer("b", "2"), offer("c", "3", region="us"), offer("d", "9")]
    fake.fails = {"a": refused(), "b": refused("quota")}
    run = paid(project, member, max_price=5)
    place_all()
    cloud_watch.poll_all()
    job = job_of(run)
    assert fake.launches == ["a", "b", "c"]
    assert (job.instance_type, job.region, job.price) == ("c", "us", Decimal(3))
    failed = [(e.data["instance_type"], e.data["code"]) for e in run.events.filter(kind="offer_failed")]
    assert failed == [("a", "no_capacity"), ("b", "quota")]
    assert sorted(Instance.objects.values_list("instance_type", "status", "why")) == [
        ("a", "gone", "no_capacity"), ("b", "gone", "quota"), ("c", "starting", ""),
    ]  # fmt: skip


def test_a_spot_instance_has_the_price_of_the_zone_it_got(project: Project, member: User, fake: FakeCloud) -> None:
    prices = {"eu-b": "2.5", "eu-a": "1", "eu-c": "9"}
    fake.offers = [offer("a", "1", spot=True, detail={"zone": "eu-a", "zone_prices": prices})]
    fake.full = {"eu-a"}
    run = paid(project, member, max_price=5, spot_policy="spot")
    place_all()
    instance = Instance.objects.get()
    assert (instance.price, instance.zone_prices) == (1, {"eu-a": "1", "eu-b": "2.5"})  # eu-c is over max_price
    cloud_watch.poll_all()
    instance.refresh_from_db()
    assert (instance.zone, instance.price, job_of(run).price) == ("eu-b", Decimal("2.5"), Decimal("2.5"))
    assert run.events.get(kind="machine_started").data["price"] == "2.5"


def test_nodes_of_one_run_stay_in_their_region(project: Project, member: User, fake: FakeCloud) -> None:
    fake.offers = [offer("a", "1"), offer("b", "2", region="us"), offer("c", "3")]
    fake.fails = {"a": refused()}
    run = paid(project, member, nodes=2)
    place_all()
    cloud_watch.poll_all()
    assert set(Job.objects.filter(run=run).values_list("region", "instance_type")) == {("eu", "c")}


def test_a_spent_budget_stops_the_search_too(project: Project, member: User, fake: FakeCloud) -> None:
    fake.offers = [offer("a", "1"), offer("b", "2")]
    fake.fails = {"a": refused()}
    run = paid(project, member)
    place_all()
    project.monthly_budget = Decimal(0)
    project.save()
    cloud_watch.poll_all()
    assert (fake.launches, fresh(run).status) == (["a"], RunStatus.SUBMITTED)


@pytest.mark.slow
def test_a_cloud_throttled_for_20_minutes_fails_no_run_and_terminates_no_instance(
    project: Project, member: User, fake: FakeCloud
) -> None:
    at_work = paid(project, member)
    begin(fake)
    attempts.claim_job(job_of(at_work).pk, "n", "here")
    attempts.start_job(job_of(at_work).pk)
    waiting = paid(project, member)
    place_all()
    fake.throttled = THROTTLED
    for _ in range(20):
        Job.objects.filter(run=at_work).update(heard_at_s=Watch.now_s())
        fake.tick(60, step_s=60)
        place_all()
    assert fresh(at_work).status == RunStatus.RUNNING
    assert fresh(waiting).status in (RunStatus.PENDING, RunStatus.SUBMITTED, RunStatus.PROVISIONING)
    assert fresh(waiting).attempt > 1
    assert fake.terminated == []
    assert Instance.objects.get(jobs__run=at_work).status == "running"
    fake.throttled = None
    fake.tick(700, step_s=60)
    place_all()
    fake.tick()
    assert job_of(waiting).instance.status == "starting"


def test_an_unreachable_cloud_is_shown_on_the_job_and_retried(project: Project, member: User, fake: FakeCloud) -> None:
    run = paid(project, member)
    place_all()
    fake.throttled = THROTTLED
    cloud_watch.poll_all()
    assert "is throttled" in statuses.message(job_of(run).detail, job_of(run).message)
    fake.throttled = None
    cloud_watch.poll_all()
    assert job_of(run).instance.status == "starting"


def test_a_launch_killed_before_its_answer_is_stored_starts_no_second_instance(
    project: Project, member: User, fake: FakeCloud
) -> None:
    paid(project, member)
    place_all()
    fake.during = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        launching.launch_waiting()
    assert Instance.objects.get().cloud_id == ""
    fake.tick(5)
    assert Instance.objects.get().cloud_id == "i-0"
    assert len(fake.there) == 1


@pytest.mark.parametrize("why", ["deleted", "disabled"])
def test_an_instance_ordered_from_a_backend_deleted_or_disabled_since_is_ended(
    project: Project, member: User, fake: FakeCloud, why: str
) -> None:
    paid(project, member)
    place_all()
    fake.during = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        launching.launch_waiting()
    fake.backend.deleted_at, fake.backend.enabled = fake.now if why == "deleted" else None, False
    fake.backend.save()
    fake.tick(45)
    assert fake.terminated[:1] == ["i-0"]
    fake.settle()
    assert (Instance.objects.get().status, Instance.objects.get().why) == ("gone", why)


def test_a_disabled_backend_launches_nothing_for_runs_that_were_placed_before(
    project: Project, member: User, fake: FakeCloud
) -> None:
    run = paid(project, member)
    place_all()
    Backend.objects.filter(pk=fake.backend.pk).update(enabled=False)
    launching.launch_waiting()
    run.refresh_from_db()
    assert (fake.there, run.status, run.attempt) == ({}, "submitted", 1)
    assert not Instance.objects.exists()


def test_duplicate_tasks_launch_one_instance(project: Project, member: User, fake: FakeCloud) -> None:
    paid(project, member)
    place_all()
    fake.during = launching.launch_waiting  # while the first is still at it
    launching.launch_waiting()
    launching.launch_waiting()
    assert (len(fake.there), len(fake.launches), Instance.objects.count()) == (1, 1, 1)


def test_an_instance_launched_after_its_run_was_stopped_is_terminated(
    project: Project, member: User, fake: FakeCloud
) -> None:
    run = paid(project, member)
    place_all()
    fake.during = lambda: attempts.end_job(job_of(run).pk, Reason.TERMINATED_BY_USER)
    launching.launch_waiting()
    fake.tick(20)
    assert fake.terminated == ["i-0"]
    fake.settle()
    assert Instance.objects.get().status == "gone"


def test_an_instance_whose_row_was_given_up_concurrently_is_terminated(
    project: Project, member: User, fake: FakeCloud
) -> None:
    paid(project, member)
    place_all()
    fake.during = lambda: Instance.objects.update(status="gone", holder=None)
    launching.launch_waiting()
    assert Instance.objects.get().status == "stopping"
    fake.tick(10)
    assert fake.terminated[0] == "i-0"


def test_a_launch_never_sent_for_a_stopped_run_is_closed_once_the_cloud_lists_no_instance(
    project: Project, member: User, fake: FakeCloud
) -> None:
    run = paid(project, member)
    place_all()
    attempts.end_job(job_of(run).pk, Reason.TERMINATED_BY_USER)
    fake.throttled = THROTTLED
    fake.tick(300, step_s=60)
    assert Instance.objects.get().status == "stopping"
    fake.throttled = None
    fake.tick(20)
    assert Instance.objects.get().status == "gone"
    assert job_of(run).status == JobStatus.TERMINATED
