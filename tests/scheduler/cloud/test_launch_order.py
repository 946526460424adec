"""Launches go in the queue's order, and what a cloud has refused is known to all: runs wait for it at their places."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from typing import Any

import pytest
from django.test import TestCase

from dstackweb.accounts.models import Project, User
from dstackweb.backends.contract import LaunchFailed, LaunchFailure, SourceFailed
from dstackweb.backends.models import Instance
from dstackweb.offers import catalog, refusals, sources
from dstackweb.runs import recount
from dstackweb.runs.models import Job, Run, Verdict
from dstackweb.runs.queue import queues
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.cloud import launching, watch as cloud_watch
from dstackweb.spec.effective import Requirements
from dstackweb.wording import events, offers as offer_words, waiting
from tests.factories import make_run, place_all
from tests.scheduler.cloud.cloud_fake import FakeCloud, job_of, offer, refused

pytestmark = pytest.mark.django_db

GPUS = [f"g{number}" for number in range(10)]


@pytest.fixture
def fake(db: None, monkeypatch: pytest.MonkeyPatch) -> FakeCloud:
    fake = FakeCloud(monkeypatch)
    fake.offers = [offer(name, str(2 + number)) for number, name in enumerate(GPUS)] + [offer("c", "1")]
    fake.fails = dict.fromkeys(GPUS, refused())
    return fake


def paid(project: Project, member: User, **keys: Any) -> Run:
    return make_run(project, member, **({"backends": ["aws"], "instance_types": GPUS, "priority": 0} | keys))


def urgent(project: Project, member: User) -> Run:
    return paid(project, member, role="manager", instance_types=["c"], priority=100)


def fresh(run: Run) -> Run:
    return Run.objects.get(pk=run.pk)


@pytest.mark.parametrize("others", [10, 20])
def test_an_urgent_run_is_the_next_call_behind_runs_that_find_no_capacity(
    project: Project, member: User, fake: FakeCloud, others: int
) -> None:
    for _ in range(others):
        paid(project, member)
    place_all()

    def arrives() -> None:
        if len(fake.launches) == 3:
            fake.before = lambda: None
            urgent(project, member)
            place_all()

    fake.before = arrives
    cloud_watch.poll_all()
    assert fake.launches[4] == "c"  # the fourth was under way
    assert Instance.objects.get(instance_type="c").status == "starting"


def test_twenty_runs_ask_for_each_offer_once_a_minute(project: Project, member: User, fake: FakeCloud) -> None:
    runs = [paid(project, member) for _ in range(20)]
    ranks = [run.rank for run in runs]
    place_all()
    cloud_watch.poll_all()
    assert sorted(fake.launches) == sorted(GPUS)
    for _ in range(10):
        fake.tick(5)
        place_all()
    assert len(fake.launches) == 10
    for _ in range(10):
        fake.tick(5)
        place_all()
    assert max(Counter(fake.launches).values()) <= 2
    assert [fresh(run).rank for run in runs] == ranks


def test_a_run_that_was_refused_everywhere_waits_at_its_place_without_an_attempt(
    project: Project, member: User, fake: FakeCloud
) -> None:
    run = paid(project, member, retry={"on_events": ["no-capacity"], "max_attempts": 2})
    place_all()
    cloud_watch.poll_all()
    place_all()
    now = fresh(run)
    assert (now.status, now.attempt, now.rank) == (RunStatus.SUBMITTED, 1, run.rank)
    assert (now.queued_at, now.retry_at, now.first_failed_at) == (run.queued_at, None, None)
    assert not Job.objects.exists()
    verdict = Verdict.objects.get(shape=run.shape)
    assert (verdict.reason, verdict.data["answers"]) == ("waiting_for_capacity", ["no_capacity"])
    assert list(recount.differences()) == []


def test_a_long_wait_shows_its_last_round_alone(project: Project, member: User, fake: FakeCloud) -> None:
    fake.fails = {"g0": refused(), "g1": refused()}
    run = paid(project, member, instance_types=["g0", "g1"])
    for _ in range(40):
        place_all()
        fake.tick(10)
    assert fake.launches.count("g0") in range(5, 9)
    kinds = Counter(run.events.values_list("kind", flat=True))
    assert kinds["returned"] <= 1
    assert kinds["offer_failed"] <= 4
    assert kinds["provisioning"] <= 1
    returned = run.events.get(kind="returned")
    assert "no offer that it may use has room now" in str(events.event_text(returned, 1))
    assert list(recount.differences()) == []


def test_when_a_refusal_is_over_one_run_tries_and_the_others_follow_it(
    project: Project, member: User, fake: FakeCloud
) -> None:
    fake.fails = {"g0": refused()}
    runs = [paid(project, member, instance_types=["g0"]) for _ in range(4)]
    place_all()
    cloud_watch.poll_all()
    assert place_all() == 0
    fake.tick(61)
    assert place_all() == 1
    assert place_all() == 0
    fake.fails = {}
    cloud_watch.poll_all()
    assert job_of(runs[0]).instance.status == "starting"
    assert place_all() == 3
    cloud_watch.poll_all()
    assert set(Instance.objects.filter(holder__isnull=False).values_list("status", flat=True)) == {"starting"}


def test_what_was_refused_shows_on_the_offer_for_every_process(project: Project, member: User, fake: FakeCloud) -> None:
    fake.fails = {"g0": refused(), "g1": refused("quota"), "g2": refused("ami")}
    paid(project, member, instance_types=["g0", "g1", "g2"])
    place_all()
    cloud_watch.poll_all()
    catalog.forget()
    refusals.forget()  # as in another process
    fake.now += dt.timedelta(seconds=12)
    found = {one.instance_type: one for one in catalog.CachedDriver(fake.backend).offers(Requirements())}
    assert [found[name].availability for name in ("g0", "g1", "g2", "g3")] == [
        "busy", "no_quota", "busy", "available",
    ]  # fmt: skip
    assert offer_words.why(found["g0"], Requirements()) == "Refused 12 s ago: the cloud has no capacity now"
    assert offer_words.why(found["g2"], Requirements()).endswith("no image can be used for it: not today")


def test_a_refresh_by_hand_forgets_what_was_refused(project: Project, member: User, fake: FakeCloud) -> None:
    fake.fails = {"g0": refused()}
    run = paid(project, member, instance_types=["g0"])
    place_all()
    cloud_watch.poll_all()
    with TestCase.captureOnCommitCallbacks(execute=True):
        sources.refresh_now(fake.backend)
    fake.fails = {}
    place_all()
    cloud_watch.poll_all()
    assert job_of(run).instance.status == "starting"


def test_a_refusal_that_our_settings_are_to_blame_for_is_repeated_ever_more_rarely(
    project: Project, member: User, fake: FakeCloud
) -> None:
    fake.fails = {"g0": refused("ami")}
    for _ in range(5):
        paid(project, member, instance_types=["g0"])
    for _ in range(90):
        place_all()
        fake.tick(10)
    assert len(fake.launches) in range(3, 6)


def test_queues_take_turns(project: Project, member: User, fake: FakeCloud) -> None:
    fake.fails = {}
    for name in ("one", "two"):
        queues.create_queue(project, member, "manager", name)
    for number in range(3):
        paid(project, member, role="manager", queue="one", priority=100, instance_types=[f"g{number}"])
    for number in range(3, 6):
        paid(project, member, queue="two", instance_types=[f"g{number}"])
    place_all()
    cloud_watch.poll_all()
    assert [int(name[1]) // 3 for name in fake.launches] == [0, 1, 0, 1, 0, 1]


def test_a_queue_whose_launches_are_refused_takes_turns_with_the_others(
    project: Project, member: User, fake: FakeCloud
) -> None:
    queues.create_queue(project, member, "manager", "two")
    paid(project, member, instance_types=GPUS[:5])
    for _ in range(3):
        paid(project, member, queue="two", instance_types=["c"])
    place_all()
    cloud_watch.poll_all()
    assert fake.launches[:6] == ["g0", "c", "g1", "c", "g2", "c"]


def test_while_the_rate_limit_has_no_room_the_most_urgent_gets_the_next_turn(
    project: Project, member: User, fake: FakeCloud
) -> None:
    fake.fails = {}
    for _ in range(3):
        paid(project, member, instance_types=["g0"])
    place_all()

    def pause(seconds: float) -> None:
        fake.throttled = None
        if not fake.pauses:
            urgent(project, member)
            place_all()
        fake.pause(seconds)

    fake.throttled = SourceFailed("throttled", until=(fake.now + dt.timedelta(seconds=0.7)).isoformat(), by="limiter")
    launching.launch_waiting(pause=pause)
    assert fake.launches == ["c", "g0", "g0", "g0"]
    assert (len(fake.pauses), round(fake.pauses[0], 3)) == (1, 0.7)


def test_a_throttled_region_is_asked_once_for_all_its_runs(project: Project, member: User, fake: FakeCloud) -> None:
    runs = [paid(project, member) for _ in range(5)]
    place_all()
    until = fake.now + dt.timedelta(seconds=100)
    fake.throttled = SourceFailed("throttled", until=until.isoformat(), api="ec2:RunInstances", region="eu")
    launching.launch_waiting()
    assert fake.asked == 1
    assert [job_of(run).detail.get("code") for run in runs] == ["source_failed"] * 5
    fake.throttled = None
    fake.fails = {}
    launching.launch_waiting()
    assert [job_of(run).detail for run in runs] == [{}] * 5


def test_an_instance_that_waits_for_its_turn_is_not_given_up(project: Project, member: User, fake: FakeCloud) -> None:
    run = paid(project, member)
    place_all()
    Instance.objects.update(status_s=3600)
    fake.before = lambda: setattr(fake, "monotonic", fake.monotonic + 20)
    fake.fails = {}
    cloud_watch.poll_all()
    assert job_of(run).instance.status == "starting"


def test_a_full_zone_is_left_out_and_the_next_cheapest_is_tried_by_another_call(
    project: Project, member: User, fake: FakeCloud
) -> None:
    zones = {"a": "1", "b": "2", "c": "9"}
    fake.offers = [offer("s", "1", spot=True, detail={"zone": "a", "zone_prices": zones})]
    fake.full = {"a", "b"}
    runs = [paid(project, member, instance_types=["s"], spot_policy="spot", max_price=5) for _ in range(2)]
    place_all()
    cloud_watch.poll_all()
    assert len(fake.launches) == 2  # one in each zone within the price
    assert {fresh(run).status for run in runs} == {"submitted"}
    rich = paid(project, member, instance_types=["s"], spot_policy="spot")
    [found] = catalog.CachedDriver(fake.backend).offers(Requirements())
    assert (found.price, found.detail["zone"], found.detail["zone_prices"]) == (9, "c", {"c": "9"})
    place_all()
    cloud_watch.poll_all()
    assert (job_of(rich).instance.zone, job_of(rich).price) == ("c", 9)


def test_a_run_of_two_nodes_that_got_no_machine_returns_to_its_place(
    project: Project, member: User, fake: FakeCloud
) -> None:
    run = paid(project, member, nodes=2, instance_types=["g0"])
    place_all()
    cloud_watch.poll_all()
    assert (fake.launches, fresh(run).status, fresh(run).attempt) == (["g0"], "submitted", 1)
    assert not Job.objects.exists()
    fake.tick(61)
    assert place_all() == 1  # both nodes
    assert Job.objects.count() == 2


def test_a_run_of_two_nodes_that_got_one_machine_waits_longer_for_the_next_try(
    project: Project, member: User, fake: FakeCloud
) -> None:
    fake.fails = {}
    run = paid(project, member, nodes=2, instance_types=["g0"])
    place_all()
    fake.during = lambda: fake.fails.update(g0=refused())
    cloud_watch.poll_all()
    fake.tick(10)
    fake.settle()
    assert fake.terminated[:1] == ["i-0"]
    now = fresh(run)
    assert (now.status in ("pending", "submitted"), now.rank, now.first_failed_at) == (True, run.rank, None)


def test_an_order_whose_answer_was_lost_is_not_given_to_another_offer_unasked(
    project: Project, member: User, fake: FakeCloud
) -> None:
    fake.fails = {}
    run = paid(project, member, instance_types=["g0", "g1"])
    place_all()
    fake.during = lambda: (_ for _ in ()).throw(SourceFailed("service_error", text="cut off"))
    launching.launch_waiting()
    refusals.remember_refusal(Instance.objects.get(), LaunchFailed(LaunchFailure.NO_CAPACITY, "full"))
    launching.launch_waiting()
    assert (job_of(run).instance_type, job_of(run).instance.cloud_id, len(fake.there)) == ("g0", "i-0", 1)


def test_one_instance_that_cannot_be_ordered_does_not_hold_up_the_others(
    project: Project, member: User, fake: FakeCloud
) -> None:
    fake.fails = {"g0": ZeroDivisionError()}
    paid(project, member, instance_types=["g0"], priority=50)
    other = paid(project, member, instance_types=["c"])
    place_all()
    with pytest.raises(ZeroDivisionError):
        launching.launch_waiting()
    assert job_of(other).instance.status == "starting"


def test_the_wait_says_why_offers_were_refused() -> None:
    data = {"code": "offers", "offers": 3, "nodes": 1, "answers": ["ami", "no_capacity"]}
    text = "refused lately: no image can be used for it, the cloud has no capacity now"
    assert waiting.reason("waiting_for_capacity", data).text == f"3 matching offers, none available now; {text}"
