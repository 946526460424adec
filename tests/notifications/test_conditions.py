"""What is so for a while is notified once: queues that are stuck, backends that can't be read."""

from __future__ import annotations

import datetime as dt

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.backends import api_calls
from dstackweb.backends.models import ApiCount, Backend
from dstackweb.notifications import outbox, services
from dstackweb.notifications.models import Condition, Delivery
from dstackweb.notifications.services import RuleScope
from dstackweb.offers.models import SourceRow
from dstackweb.runs.codes import WaitReason
from dstackweb.runs.models import Queue, Run, Verdict
from dstackweb.runs.notification_codes import NotificationEvent
from dstackweb.wording import notifications as words
from tests.factories import make_run, make_user
from tests.notifications.conftest import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]


@pytest.fixture
def queue(run: Run, ann: User) -> Queue:
    """With a run that waits; ann wants to hear of it."""
    services.set_rules(services.bell_of(ann), {NotificationEvent.QUEUE_STUCK: RuleScope(own=False)})
    return run.queue


def check(minutes: float) -> int:
    return outbox.check_conditions(NOW + dt.timedelta(minutes=minutes))


def pause(queue: Queue, paused: bool = True) -> None:
    Queue.objects.filter(pk=queue.pk).update(paused=paused)


def notified() -> list[str]:
    return [words.notification(one.event, one.data).text for one in Delivery.objects.order_by("pk")]


def test_a_queue_that_is_paused_for_half_an_hour_is_notified_once(queue: Queue) -> None:
    pause(queue)
    assert [check(minutes) for minutes in (0, 29, 30, 31, 600)] == [0, 0, 1, 0, 0]
    assert notified() == ["1 run waits. The queue is paused."]
    assert Delivery.objects.get().project == queue.project


def test_a_queue_in_which_nothing_waits_is_not_stuck(queue: Queue, run: Run, ann: User) -> None:
    from dstackweb.runs.services import stop

    stop(run, ann, "member")
    pause(queue)
    assert [check(minutes) for minutes in (0, 60)] == [0, 0]


def test_a_queue_whose_runs_are_all_impossible_is_stuck_and_one_with_another_is_not(
    queue: Queue, run: Run, project: Project, ann: User
) -> None:
    Verdict.objects.create(queue=queue, shape=run.shape, reason=WaitReason.IMPOSSIBLE)
    other = make_run(project, ann, "other", resources={"cpu": 3})
    assert [check(minutes) for minutes in (0, 60)] == [0, 0]
    Verdict.objects.create(queue=queue, shape=other.shape, reason=WaitReason.USER_LIMIT, data={"never": True})
    assert [check(minutes) for minutes in (61, 92)] == [0, 1]
    assert notified() == ["2 runs wait. None of them can ever start as things are: see why each waits."]


def test_what_comes_and_goes_is_reported_once_and_again_after_it_was_away(queue: Queue) -> None:
    pause(queue)
    assert [check(minutes) for minutes in (0, 30)] == [0, 1]
    pause(queue, False)
    assert check(31) == 0
    pause(queue)
    assert [check(minutes) for minutes in (32, 90)] == [0, 0]
    pause(queue, False)
    assert [check(minutes) for minutes in (91, 122)] == [0, 0]
    assert not Condition.objects.exists()
    pause(queue)
    assert [check(minutes) for minutes in (123, 152, 153)] == [0, 0, 1]
    assert len(notified()) == 2


def test_a_short_pause_before_it_is_reported_does_not_count(queue: Queue) -> None:
    """It was stuck and is not: no notification of what is over."""
    pause(queue)
    check(0)
    pause(queue, False)
    assert check(30) == 0
    assert notified() == []


def test_one_that_is_killed_between_marking_and_writing_reports_it_next_time(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_news: object) -> int:
        raise KeyboardInterrupt

    pause(queue)
    check(0)
    with monkeypatch.context() as patched:
        patched.setattr(outbox, "publish", die)
        with pytest.raises(KeyboardInterrupt):
            check(30)
    assert outbox.publish is outbox.publish
    assert check(31) == 1
    assert len(notified()) == 1


def test_deployment_admins_hear_of_a_backend_that_cannot_be_read(project: Project, ann: User) -> None:
    root = make_user("root", is_superuser=True)
    backend = Backend.objects.create(name="cloud", kind="aws")
    error = {"code": "failed", "text": "no such account"}
    row = SourceRow.objects.create(backend=backend, source="quotas", region="eu-west-1", error=error)
    SourceRow.objects.filter(pk=row.pk).update(failures=2, failed_at=NOW)
    assert [check(minutes) for minutes in (0, 10)] == [0, 0]
    SourceRow.objects.filter(pk=row.pk).update(failures=3)
    assert [check(minutes) for minutes in (11, 20, 21, 22)] == [0, 0, 1, 0]
    one = Delivery.objects.get()
    assert (one.channel.user, one.event, one.project) == (root, "backend_fails", None)
    label = words.notification(one.event, one.data)
    assert label.label == "Backend cloud cannot be read"
    assert "eu-west-1" in label.text
    assert "no such account" in label.text
    Backend.objects.filter(pk=backend.pk).update(enabled=False)
    assert [check(minutes) for minutes in (23, 54)] == [0, 0]
    assert not Condition.objects.exists()


def test_deployment_admins_hear_of_an_api_before_its_limit_is_reached(project: Project, ann: User) -> None:
    root = make_user("root", is_superuser=True)
    at = api_calls.period(NOW)
    of = {"kind": "aws", "api": "ec2.RunInstances", "region": "eu-west-1", "at": at}
    ApiCount.objects.create(**of, requests=20, tight=3)
    ApiCount.objects.create(**{**of, "region": "us-east-1"}, requests=5, tight=5)
    assert check(0) == 0
    ApiCount.objects.filter(region="eu-west-1").update(tight=4)
    assert [check(minutes) for minutes in (1, 2)] == [1, 0]
    delivery = Delivery.objects.get()
    assert (delivery.channel.user, delivery.event) == (root, "api_limit")
    label = words.notification(delivery.event, delivery.data)
    assert label.label == "ec2.RunInstances (eu-west-1) is near its rate limit"
    assert "After 4 of 20 requests" in label.text
    ApiCount.objects.filter(region="us-east-1").update(requests=10, throttles=5)
    assert check(3) == 1
    label = words.notification("api_limit", Delivery.objects.exclude(pk=delivery.pk).get().data)
    assert (label.label, "5 of 10" in label.text) == ("ec2.RunInstances (us-east-1) is throttled", True)
