"""The pages of channels: who may set them up, what they say of deliveries, and that no address leaks."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from pytest_django import Settings

from dstackweb.accounts.models import Project, User
from dstackweb.lib.secrets import decrypt
from dstackweb.notifications import channels, services
from dstackweb.notifications.messages import path_of
from dstackweb.notifications.models import Channel, ChannelKind, Delivery
from dstackweb.notifications.services import EVENTS
from dstackweb.runs.notification_codes import DeliveryProblem
from dstackweb.runs.services import ensure_queue
from tests.factories import join, make_project, make_user
from tests.forms import open_form, submit

SignIn = Callable[[User], Client]
EVENT_NAMES = {event.value for event in EVENTS}
URL = "https://hooks.example.org/services/T1/B2/secret-part"
MINE = "/account/notifications/settings/"


@pytest.fixture
def hook(ann: User) -> Channel:
    return channels.create(ann, ChannelKind.WEBHOOK, "my program", URL)


@pytest.fixture
def page(ann: User, as_user: SignIn) -> Client:
    return as_user(ann)


def address(channel: Channel, action: str = "") -> str:
    return f"/account/notifications/channels/{channel.pk}/{action}"


def add(client: Client, kind: str, name: str, url: str, page: str = MINE, **request: Any) -> Any:
    return submit(client, page, {"kind": kind, "name": name, "url": url}, **request)


def press(client: Client, channel: Channel, action: str) -> Any:
    """Press the button of the channel's page that does this."""
    return submit(client, address(channel), to=f"/{action}")


def test_a_channel_is_added_with_its_url_encrypted(ann: User, page: Client) -> None:
    answer = add(page, "slack", "#gpus", URL, follow=True)
    assert "#gpus" in answer.content.decode()
    channel = Channel.objects.get(name="#gpus")
    assert channel.user == ann
    assert URL not in channel.url
    assert decrypt(channel.url) == URL
    assert channel.rules.filter(own=True).count() == 6
    for shown in (answer, page.get(MINE)):
        assert "hooks.example.org" in shown.content.decode()
        assert "secret-part" not in shown.content.decode()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://example.org/",
        "https://name:password@example.org/",
        "https://example.org/a b",
        "https://exam\nple.org/",
        "https://[::1",
        "https://example.org:99999/",
    ],
)
def test_what_is_no_url_is_refused_beside_its_field(page: Client, url: str) -> None:
    answer = add(page, "slack", "x", url)
    assert answer.status_code == 422
    assert 'id="id_url_error"' in answer.content.decode()


def test_mail_is_offered_where_it_can_be_sent(ann: User, page: Client, settings: Settings) -> None:
    offered = '<option value="email"'
    assert offered not in page.get(MINE).content.decode()
    User.objects.filter(pk=ann.pk).update(email="ann@example.org")
    settings.DSTACKWEB_EMAIL_URL = "smtp://mail.example.org?from=gpus@example.org"
    assert offered in page.get(MINE).content.decode()
    add(page, "email", "mail", "")
    assert Channel.objects.get(name="mail").url == ""


def test_a_channel_of_others_is_not_there(hook: Channel, mia: User, as_user: SignIn) -> None:
    """No page of theirs has its forms."""
    other = as_user(mia)
    assert other.get(address(hook)).status_code == 404
    for action in ("test/", "key/", "turn/", "delete/", "hours/"):
        assert other.post(address(hook, action), {"on": "no"}).status_code == 404
    assert Channel.objects.filter(pk=hook.pk, enabled=True, key=hook.key).exists()
    assert not hook.deliveries.exists()


def test_a_channel_of_another_project_does_not_reveal_that_project_s_name(ann: User, page: Client) -> None:
    """Channels are counted through: any of their numbers could be tried."""
    channel = channels.create(make_project("acquisition"), ChannelKind.SLACK, "team", URL)
    one = channels.send_test(channel, make_user("eve"))
    for answer in (
        page.get(address(channel)),
        page.post(address(channel, "delete/")),
        page.post(f"/account/notifications/{one.uid}/again/"),
    ):
        assert answer.status_code == 404
        assert "acquisition" not in answer.content.decode()


def test_managers_set_up_a_project_s_channels_and_members_do_not(project: Project, ann: User, as_user: SignIn) -> None:
    boss = join(project, make_user("boss"), "manager")
    form = open_form(as_user(boss), f"/p/{project}/notifications/", having="kind")
    changes = {"kind": "teams", "name": "team", "url": URL}
    assert as_user(ann).get(f"/p/{project}/notifications/").status_code == 403
    by_hand = as_user(ann).post(f"/p/{project}/notifications/add/", form.filled(changes))  # no page of hers has it
    assert by_hand.status_code == 403
    assert form.send(changes).status_code == 302
    channel = Channel.objects.get(project=project)
    assert [(rule.event, rule.project) for rule in channel.rules.all()] == [("run_failed", project)]
    assert "hooks.example.org" in as_user(boss).get(f"/p/{project}/notifications/").content.decode()
    assert as_user(boss).get(address(channel)).status_code == 200
    assert as_user(ann).get(address(channel)).status_code == 403


def test_the_log_says_what_came_of_each_delivery_and_sends_it_again(hook: Channel, page: Client) -> None:
    assert press(page, hook, "test/").status_code == 302
    failed = {"status": "failed", "attempts": 12, "answer": 500, "problem": DeliveryProblem.ANSWER}
    hook.deliveries.update(**failed)
    shown = page.get(address(hook)).content.decode()
    for words in ("12 attempts", "HTTP 500", "The receiver refused it."):
        assert words in shown
    one = Delivery.objects.get(channel=hook)
    again = open_form(page, address(hook), to=f"/{one.uid}/again/")
    assert again.send().status_code == 302
    one.refresh_from_db()
    assert (one.status, one.attempts, one.answer) == ("waiting", 0, None)
    assert again.send().status_code == 409


def test_a_channel_that_is_off_offers_to_send_nothing(hook: Channel, page: Client) -> None:
    press(page, hook, "test/")
    hook.deliveries.update(status="failed")
    assert "Send again" in page.get(address(hook)).content.decode()
    channels.turn(hook, on=False)
    assert "Send again" not in page.get(address(hook)).content.decode()


def test_a_key_is_shown_once_and_only_for_programs(hook: Channel, ann: User, page: Client) -> None:
    shown = press(page, hook, "key/").content.decode()
    hook.refresh_from_db()
    assert decrypt(hook.key) in shown
    assert decrypt(hook.key) not in page.get(address(hook)).content.decode()
    slack = channels.create(ann, ChannelKind.SLACK, "slack", URL)
    assert address(slack, "key/") not in page.get(address(slack)).content.decode()
    page.post(address(slack, "key/"))  # which no page sends, then
    slack.refresh_from_db()
    assert slack.key == ""


def test_a_channel_is_turned_off_and_deleted(hook: Channel, page: Client) -> None:
    press(page, hook, "turn/")
    assert "This channel is off." in page.get(address(hook)).content.decode()
    press(page, hook, "turn/")
    hook.refresh_from_db()
    assert hook.enabled
    press(page, hook, "delete/")
    assert not Channel.objects.filter(pk=hook.pk).exists()


def test_a_channel_stored_with_another_secret_key_can_be_deleted(hook: Channel, page: Client) -> None:
    Channel.objects.filter(pk=hook.pk).update(url="unreadable")
    assert page.get(MINE).status_code == 200
    assert page.get(address(hook)).status_code == 200
    press(page, hook, "delete/")
    assert not Channel.objects.filter(pk=hook.pk).exists()


def test_nobody_has_more_than_twenty_channels(ann: User, page: Client) -> None:
    for number in range(channels.MOST):
        Channel.objects.create(user=ann, kind=ChannelKind.SLACK, name=str(number))
    answer = add(page, "slack", "x", URL)
    assert answer.status_code == 422
    assert "20 channels already" in answer.content.decode()


def test_events_of_the_deployment_are_offered_to_its_admins_alone(
    hook: Channel, page: Client, project: Project, as_user: SignIn
) -> None:
    root = as_user(make_user("root", is_superuser=True))
    mine, offered = "/account/notifications/settings/", 'name="host_held_back"'
    assert offered in root.get(mine).content.decode()
    assert offered not in page.get(mine).content.decode()
    of_project = channels.create(project, ChannelKind.SLACK, "team", URL)
    assert offered not in root.get(address(of_project)).content.decode()
    form = open_form(page, address(hook), having="run_failed")
    chosen = form.filled({**{name: "off" for name in form.values if name in EVENT_NAMES}, "run_failed": "own"})
    page.post(address(hook), {**chosen, "host_held_back": "all"})  # as no page asks for it
    assert [(rule.event, rule.own) for rule in hook.rules.all()] == [("run_failed", True)]


def test_a_notification_leads_to_what_it_is_about(ann: User, project: Project, page: Client) -> None:
    bell = services.bell_of(ann)
    ensure_queue(project, "night")
    for event, target in {"budget_spent": "/p/main/machines/", "queue_stuck": "/p/main/queues/night/"}.items():
        row = {"key": event, "event": event, "data": {"queue": "night"}}
        one = Delivery.objects.create(channel=bell, project=project, **row)
        assert page.get(f"/account/notifications/{one.uid}/open/").headers["Location"] == target
    of_all = Delivery.objects.create(channel=bell, key="host", event="host_held_back")
    assert path_of(of_all) == "/health/"
    assert page.get("/health/").headers["Location"] == "/p/main/health/"


def test_times_are_set_and_wrong_ones_are_refused_beside_their_field(hook: Channel, ann: User, page: Client) -> None:
    form = {"zone": "Europe/Berlin", "quiet_from": "22:00", "quiet_until": "07:00"}
    page.cookies["zone"] = "Asia/Tokyo"
    assert 'value="Asia/Tokyo"' in page.get(address(hook)).content.decode()
    assert submit(page, address(hook), form).status_code == 302
    hook.refresh_from_db()
    assert (hook.zone, str(hook.quiet_from), str(hook.quiet_until)) == ("Europe/Berlin", "22:00:00", "07:00:00")
    assert 'value="22:00"' in page.get(address(hook)).content.decode()
    for until in ("", "22:00"):
        answer = submit(page, address(hook), {"quiet_until": until})
        assert answer.status_code == 422
        assert 'id="id_quiet_until_error"' in answer.content.decode()
    assert "digest_at" not in page.get(address(hook)).content.decode()
    slack = channels.create(ann, ChannelKind.SLACK, "slack", URL)
    empty = {"zone": "UTC", "quiet_from": "", "quiet_until": "", "digest_at": "08:00"}
    submit(page, address(slack), empty)
    slack.refresh_from_db()
    assert str(slack.digest_at) == "08:00:00"


def test_times_that_no_page_offers_are_refused(hook: Channel, page: Client) -> None:
    served = open_form(page, address(hook), having="zone").values
    for field, wrong in (("zone", "Mars/Base"), ("quiet_from", "late")):
        answer = page.post(address(hook, "hours/"), {**served, field: wrong})
        assert answer.status_code == 422
        assert f'id="id_{field}_error"' in answer.content.decode()
    assert page.post(address(hook, "hours/"), {"zone": "UTC"}).status_code == 422


def test_the_log_says_when_what_waits_is_sent(hook: Channel, ann: User, page: Client) -> None:
    channels.send_test(hook, ann)
    hook.deliveries.update(due_at=timezone.now() + dt.timedelta(hours=3, seconds=30))
    assert "to be sent" in page.get(address(hook)).content.decode()
    hook.deliveries.update(attempts=2)
    shown = page.get(address(hook)).content.decode()
    assert "next attempt" in shown
    assert "in 3 h" in shown
    hook.deliveries.update(status="sent")
    assert "next attempt" not in page.get(address(hook)).content.decode()
