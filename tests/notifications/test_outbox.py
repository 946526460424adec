"""Notifications are written with their events, for those whom a rule names and who may read them, and once."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest
from django.conf import settings
from django.db import transaction

from dstackweb.accounts.models import Membership, Project, User
from dstackweb.backends.hosts import inventory
from dstackweb.notifications import channels, outbox, services
from dstackweb.notifications.models import Channel, ChannelKind, Delivery
from dstackweb.notifications.services import RuleScope
from dstackweb.runs import services as runs, usage
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.models import BudgetMark, Run, RunEvent
from dstackweb.runs.notification_codes import NotificationEvent
from dstackweb.runs.removal import delete
from dstackweb.runs.shared_rows import shared_rows_last
from dstackweb.runs.states import Reason, RunStatus
from dstackweb.runs.transitions import lock_run, move_run, move_runs, record
from dstackweb.scheduler.processes import retention
from dstackweb.wording import notifications as words
from tests.factories import join, make_host, make_project, make_run, make_user

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]
NOW = dt.datetime(2031, 5, 4, 9, 30, tzinfo=dt.UTC)


@pytest.fixture
def project() -> Project:
    return make_project("main")


@pytest.fixture
def ann(project: Project) -> User:
    return join(project, make_user("ann"))


@pytest.fixture
def run(project: Project, ann: User) -> Run:
    return make_run(project, ann, "train")


def of(user: User) -> list[tuple[str, str]]:
    """A user's notifications, the oldest first: event and run."""
    found = Delivery.objects.filter(channel__user=user).order_by("pk")
    return [(row.event, row.data["run"]) for row in found]


def started(run: Run, waited: dt.timedelta) -> None:
    Run.objects.filter(pk=run.pk).update(queued_at=NOW - waited)
    run.refresh_from_db()
    for status in (RunStatus.PROVISIONING, RunStatus.RUNNING):
        assert move_run(run, status, now=NOW)


def ended(run: Run, status: RunStatus, **fields: Any) -> None:
    if run.status == RunStatus.SUBMITTED:
        started(run, dt.timedelta())
    assert move_run(run, RunStatus.TERMINATING, now=NOW)
    assert move_run(run, status, now=NOW, **fields)


def test_a_new_user_hears_of_own_runs_that_fail(run: Run, ann: User) -> None:
    ended(run, RunStatus.FAILED, termination_reason=Reason.JOB_FAILED, status_message="Exit code 1.")
    assert of(ann) == [("run_failed", "train")]
    row = Delivery.objects.get()
    assert row.unread
    assert (row.run_uid, row.project, row.at) == (run.uid, run.project, NOW)
    assert row.data["message"] == "Exit code 1."


@pytest.mark.parametrize(
    ("waited", "expected"),
    [(outbox.LONG_WAIT - dt.timedelta(seconds=1), []), (outbox.LONG_WAIT, [("run_started", "train")])],
)
def test_a_start_is_news_after_a_long_wait_only(
    run: Run, ann: User, waited: dt.timedelta, expected: list[tuple[str, str]]
) -> None:
    started(run, waited)
    assert of(ann) == expected


def test_the_warning_of_a_policy_is_a_notification(run: Run, ann: User) -> None:
    with transaction.atomic():
        record(lock_run(run.pk), RunEventKind.UTILIZATION_NOTICE, {"gpu": 0}, is_locked=True)
    assert of(ann) == [("run_stops_soon", "train")]


def test_who_stops_a_run_is_not_notified_that_it_failed(run: Run, ann: User) -> None:
    runs.stop(run, ann, "member")
    run.refresh_from_db()
    assert run.status == RunStatus.TERMINATED
    assert of(ann) == []


def test_nothing_is_there_when_the_transaction_is_rolled_back(run: Run, ann: User) -> None:
    with transaction.atomic():
        ended(run, RunStatus.FAILED)
        assert len(of(ann)) == 1
        transaction.set_rollback(True)
    assert of(ann) == []


def test_an_event_is_there_once_however_often_it_is_published(run: Run, ann: User) -> None:
    ended(run, RunStatus.FAILED)
    outbox.on_run_events(RunEvent.objects.select_related("run").all())
    assert len(of(ann)) == 1


def test_an_end_that_two_rules_name_is_one_notification(run: Run, ann: User) -> None:
    bell = services.bell_of(ann)
    both = dict.fromkeys((NotificationEvent.RUN_ENDED, NotificationEvent.RUN_FAILED), RuleScope(own=True))
    services.set_rules(bell, both)
    ended(run, RunStatus.FAILED)
    assert of(ann) == [("run_failed", "train")]


def test_rules_of_all_runs_reach_members_only_while_they_are(run: Run, project: Project) -> None:
    bob, eve = join(project, make_user("bob"), "viewer"), make_user("eve")
    for user in (bob, eve):
        services.set_rules(services.bell_of(user), {NotificationEvent.RUN_ENDED: RuleScope(own=False)})
    ended(run, RunStatus.DONE)
    assert (of(bob), of(eve)) == ([("run_ended", "train")], [])
    Membership.objects.filter(user=bob).delete()
    ended(make_run(project, join(project, make_user("carl")), "next"), RunStatus.DONE)
    assert len(of(bob)) == 1


def test_a_rule_of_one_project_is_silent_about_others(ann: User, project: Project) -> None:
    other = make_project("other")
    join(other, ann)
    services.set_rules(services.bell_of(ann), {NotificationEvent.RUN_ENDED: RuleScope(own=False, project_id=other.pk)})
    ended(make_run(project, ann, "here"), RunStatus.DONE)
    ended(make_run(other, ann, "there"), RunStatus.DONE)
    assert of(ann) == [("run_ended", "there")]


def test_of_many_runs_that_end_at_once_each_owner_hears_of_theirs(project: Project, ann: User) -> None:
    bob = join(project, make_user("bob"))
    mine, theirs = make_run(project, ann, "mine"), make_run(project, bob, "theirs")
    with shared_rows_last():
        move_runs([mine, theirs], RunStatus.FAILED, now=NOW, data=[{}, {}])
    assert (of(ann), of(bob)) == ([("run_failed", "mine")], [("run_failed", "theirs")])


def test_a_notification_outlives_its_run(run: Run, ann: User) -> None:
    ended(run, RunStatus.FAILED)
    delete(run, ann, "member")
    assert of(ann) == [("run_failed", "train")]


def test_rules_change_as_a_whole(ann: User) -> None:
    bell = services.bell_of(ann)
    services.set_rules(
        bell, {NotificationEvent.RUN_FAILED: RuleScope(own=False), NotificationEvent.RUN_ENDED: RuleScope(True)}
    )
    found = {rule.event: rule.own for rule in bell.rules.all()}
    assert found == {"run_failed": False, "run_ended": True}


def test_a_user_has_one_channel_in_the_app(ann: User) -> None:
    assert services.bell_of(ann) == services.bell_of(ann)
    assert Channel.objects.filter(user=ann).count() == 1


def test_counting_unread_ones_stops_at_ten(ann: User) -> None:
    bell = services.bell_of(ann)
    rows = [Delivery(channel=bell, key=str(number), event="test", unread=True) for number in range(12)]
    Delivery.objects.bulk_create(rows)
    assert services.unread(ann) == 10
    assert services.mark_read(ann) == 12
    assert services.unread(ann) == 0


def test_what_one_has_left_is_neither_shown_nor_counted_any_more(run: Run, ann: User) -> None:
    ended(run, RunStatus.FAILED)
    assert (services.inbox(ann).count(), services.unread(ann)) == (1, 1)
    Membership.objects.filter(user=ann).delete()
    assert (services.inbox(ann).count(), services.unread(ann)) == (0, 0)


def test_old_notifications_are_pruned(run: Run, ann: User) -> None:
    ended(run, RunStatus.FAILED)
    old = Delivery.objects.get().at + dt.timedelta(days=settings.DSTACKWEB_NOTIFICATIONS_DAYS)
    retention.prune(old)
    assert Delivery.objects.count() == 1
    retention.prune(old + dt.timedelta(seconds=1))
    assert not Delivery.objects.exists()


def test_an_owner_hears_who_keeps_a_run_unless_it_was_they(run: Run, project: Project, ann: User) -> None:
    boss = join(project, make_user("boss"), "manager")
    data = {"minutes": 30, "until": NOW.isoformat(), "reason": "a checkpoint", "left": 2}
    with transaction.atomic():
        record(lock_run(run.pk), RunEventKind.UTILIZATION_KEPT, data, actor=ann, is_locked=True)
    assert of(ann) == []
    with transaction.atomic():
        record(lock_run(run.pk), RunEventKind.UTILIZATION_KEPT, data, actor=boss, is_locked=True)
    assert of(ann) == [("run_kept", "train")]
    label = words.notification("run_kept", Delivery.objects.get().data)
    assert label.label == "boss keeps train"
    assert "a checkpoint" in label.text


def test_managers_hear_once_of_each_share_of_a_budget(
    project: Project, ann: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    boss = join(project, make_user("boss"), "manager")
    Project.objects.filter(pk=project.pk).update(monthly_budget=100)

    def spend_so_far(dollars: int) -> None:
        monkeypatch.setattr(usage, "spent_this_month", lambda _project, _now: Decimal(dollars))
        for _ in range(2):
            usage.mark_budgets(NOW)

    def notified() -> list[str]:
        found = Delivery.objects.filter(channel__user=boss).order_by("pk")
        return [f"{row.event} {row.data['percent']} of {row.data['budget']}" for row in found]

    spend_so_far(60)
    assert notified() == []
    spend_so_far(85)
    assert notified() == ["budget_spent 80 of 100.00"]
    label = words.notification("budget_spent", Delivery.objects.get().data)
    assert (label.label, label.text[:16]) == ("main has spent 80 % of its budget", "$85.00 of $100.0")
    BudgetMark.objects.all().delete()  # as if another worker had not seen them yet
    spend_so_far(120)
    assert notified() == ["budget_spent 80 of 100.00", "budget_spent 100 of 100.00"]
    Project.objects.filter(pk=project.pk).update(monthly_budget=110)
    spend_so_far(120)
    assert notified()[2:] == ["budget_spent 100 of 110.00"]
    assert not Delivery.objects.filter(channel__user=ann).exists()


def test_deployment_admins_hear_of_a_host_that_is_held_back(project: Project, ann: User) -> None:
    root, host = make_user("root", is_superuser=True), make_host("box")
    channels.create(project, ChannelKind.SLACK, "team", "https://hooks.example.org/x")
    with transaction.atomic():
        for _ in range(inventory.HOLD_BACK_AFTER + 2):
            inventory.count_failed_start(host.pk, "no space left on device", NOW)
    (row,) = Delivery.objects.all()
    assert (row.channel.user, row.event) == (root, "host_held_back")
    assert "no space left" in words.notification(row.event, row.data).text
    assert services.inbox(root).count() == 1
    User.objects.filter(pk=root.pk).update(is_superuser=False)
    assert services.inbox(User.objects.get(pk=root.pk)).count() == 0
