"""Notifications reach their receivers: each once, wherever a worker is killed, and again later where that failed."""

from __future__ import annotations

import datetime as dt
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections
from django.utils import timezone
from pytest_django import Settings

from dstackweb.accounts.models import Membership, User
from dstackweb.lib import outbound
from dstackweb.lib.secrets import decrypt
from dstackweb.notifications import channels, messages, sending
from dstackweb.notifications.models import Channel, ChannelKind, Delivery, DeliveryStatus
from tests.notifications.conftest import MakeChannel
from tests.notifications.receiver import MailServer, Receiver

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]
Fail = Callable[..., None]
PUBLIC_URL = "https://gpus.example.org"
OVER_HTTP = (ChannelKind.WEBHOOK, ChannelKind.SLACK, ChannelKind.TEAMS)


class Killed(BaseException):
    """As a worker ends that is killed."""


def later(seconds: float = 0) -> dt.datetime:
    return timezone.now() + dt.timedelta(seconds=seconds)


def to(channel: Channel) -> list[Delivery]:
    return list(channel.deliveries.order_by("pk"))


def statuses(channel: Channel) -> list[str]:
    return [one.status for one in to(channel)]


def die(*_args: Any) -> None:
    raise Killed


def test_a_webhook_is_signed_as_standard_webhooks_says(channel_to: MakeChannel, fail: Fail, receiver: Receiver) -> None:
    channel = channel_to(ChannelKind.WEBHOOK)
    fail("train")
    assert sending.has_due()
    assert sending.send_due() == 1
    (request,), (one,) = receiver.requests, to(channel)
    found = json.loads(request.body)
    assert found["type"] == "run_failed"
    assert found["data"]["run"] == "train"
    assert found["data"]["url"] == f"https://gpus.example.org/p/main/runs/{one.run_uid}/"
    head = request.headers
    assert head["webhook-id"] == str(one.uid)
    signature = messages.sign(decrypt(channel.key), str(one.uid), head["webhook-timestamp"], request.body)
    assert head["webhook-signature"] == signature
    assert (one.status, one.answer, one.attempts) == ("sent", 204, 1)
    assert not sending.has_due()


def test_each_notification_is_a_request_to_a_program_and_one_message_to_people(
    channel_to: MakeChannel, fail: Fail, receiver: Receiver
) -> None:
    hook, slack, teams = map(channel_to, (ChannelKind.WEBHOOK, ChannelKind.SLACK, ChannelKind.TEAMS))
    fail("first", "second")
    assert sending.send_due() == 4
    bodies = [json.loads(request.body) for request in receiver.requests]
    assert [body["data"]["run"] for body in bodies if "data" in body] == ["first", "second"]
    (text,) = [body["text"] for body in bodies if "text" in body]
    assert "first" in text
    assert "second" in text
    (card,) = [body["attachments"][0]["content"] for body in bodies if "attachments" in body]
    assert len(card["body"]) == 2
    assert statuses(hook) == statuses(slack) == statuses(teams) == ["sent", "sent"]


@pytest.mark.parametrize("kind", [ChannelKind.SLACK, ChannelKind.WEBHOOK])
def test_a_worker_killed_between_sending_and_noting_notifies_nobody_twice(
    kind: ChannelKind, channel_to: MakeChannel, fail: Fail, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = channel_to(kind)
    fail("train")
    with monkeypatch.context() as patched:
        patched.setattr(sending, "_note", die)
        with pytest.raises(Killed):
            sending.send_due()
    assert len(receiver.requests) == 1
    assert not sending.has_due()  # its claim holds for a while
    sending.send_next(channel.pk, later(61))
    if kind == ChannelKind.WEBHOOK:
        assert statuses(channel) == ["sent"]
        assert len({request.headers["webhook-id"] for request in receiver.requests}) == 1
    else:
        assert statuses(channel) == ["unknown"]
        assert len(receiver.requests) == 1


def test_a_worker_killed_before_it_took_anything_loses_nothing(
    channel_to: MakeChannel, fail: Fail, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = channel_to(ChannelKind.SLACK)
    fail("train")
    with monkeypatch.context() as patched:
        patched.setattr(sending, "_take", die)
        with pytest.raises(Killed):
            sending.send_due()
    assert receiver.requests == []
    assert sending.send_next(channel.pk, later(61))
    assert statuses(channel) == ["sent"]


def test_what_a_late_worker_notes_does_not_count_after_its_claim(
    channel_to: MakeChannel, fail: Fail, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped for a minute while it sent; another has taken the channel meanwhile."""
    channel = channel_to(ChannelKind.SLACK)
    fail("train")
    real = sending._send

    def slow(*args: Any) -> sending.SendResult:
        with monkeypatch.context() as patched:
            patched.setattr(sending, "_send", real)
            sending.send_next(channel.pk, later(61))
        return real(*args)

    monkeypatch.setattr(sending, "_send", slow)
    sending.send_next(channel.pk, later())
    assert statuses(channel) == ["unknown"]
    assert len(receiver.requests) == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", [ChannelKind.SLACK, ChannelKind.WEBHOOK])
def test_two_workers_at_once_send_nothing_twice(
    kind: ChannelKind, channel_to: MakeChannel, fail: Fail, receiver: Receiver
) -> None:
    channel = channel_to(kind)
    fail("one", "two", "three")
    together = threading.Barrier(4)

    def work() -> None:
        together.wait()
        try:
            while sending.has_due():
                sending.send_due()
        finally:
            connections.close_all()

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    while sending.send_next(channel.pk, later()):
        pass
    assert statuses(channel) == ["sent"] * 3
    sent = b"\n".join(request.body for request in receiver.requests)
    assert [sent.count(f"{name}: failed".encode()) for name in ("one", "two", "three")] == [1, 1, 1]


def test_a_failure_is_repeated_later_with_the_same_id(channel_to: MakeChannel, fail: Fail, receiver: Receiver) -> None:
    channel = channel_to(ChannelKind.WEBHOOK)
    fail("train")
    receiver.answers = [500, 400]
    now = later()
    assert not sending.send_next(channel.pk, now)
    (one,) = to(channel)
    assert (one.status, one.answer, one.problem, one.attempts) == ("waiting", 500, "answer", 1)
    assert one.due_at is not None
    assert dt.timedelta(seconds=15) <= one.due_at - now <= dt.timedelta(seconds=30)
    assert not sending.send_next(channel.pk, now)  # the channel is left alone
    assert not sending.send_next(channel.pk, later(60))
    assert sending.send_next(channel.pk, later(600))
    assert (statuses(channel), len(receiver.requests)) == (["sent"], 3)
    assert len({request.headers["webhook-id"] for request in receiver.requests}) == 1


def test_after_twelve_attempts_a_notification_has_failed(
    channel_to: MakeChannel, fail: Fail, receiver: Receiver
) -> None:
    channel = channel_to(ChannelKind.WEBHOOK)
    fail("train")
    receiver.answers = [500] * 20
    for day in range(20):
        sending.send_next(channel.pk, later(day * 86400))
    assert (statuses(channel), len(receiver.requests)) == (["failed"], sending.MOST_ATTEMPTS)


def test_delays_grow_to_six_hours_and_are_never_short() -> None:
    for attempts in range(1, 13):
        longest = min(6 * 3600, 30 * 2 ** (attempts - 1))
        assert all(longest / 2 <= sending.delay_s(attempts) <= longest for _ in range(50))


def test_a_channel_that_fails_does_not_hold_back_others(
    channel_to: MakeChannel, fail: Fail, receiver: Receiver
) -> None:
    channels_ = [channel_to(ChannelKind.SLACK) for _ in range(2)]
    fail("train")
    receiver.answers = [503]
    assert sending.send_due() == 1
    assert sorted(statuses(channels_[0]) + statuses(channels_[1])) == ["sent", "waiting"]


def test_channels_that_answer_go_before_those_that_failed(
    channel_to: MakeChannel, fail: Fail, receiver: Receiver
) -> None:
    """A tick sends for a few seconds only, and each request to a receiver that hangs takes most of them."""
    hangs, answers = channel_to(ChannelKind.SLACK), channel_to(ChannelKind.WEBHOOK)
    Channel.objects.filter(pk=hangs.pk).update(failures=3)
    fail("train")
    assert sending.send_due() == 2
    assert ["webhook-id" in request.headers for request in receiver.requests] == [True, False]
    assert statuses(answers) == ["sent"]


def test_channels_take_turns_however_much_one_of_them_has_to_get(ann: User, fail: Fail, receiver: Receiver) -> None:
    """A slow program with a thousand notifications must not keep others from being notified for hours."""
    first, _second = (channels.create(ann, ChannelKind.WEBHOOK, name, f"{receiver.url}{name}") for name in "ab")
    fail("one", "two")
    sending.send_next(first.pk, later())
    assert sending.send_due() == 3
    assert [request.path for request in receiver.requests] == ["/a", "/b", "/a", "/b"]


def test_a_receiver_that_names_a_time_is_left_alone_until_then(
    channel_to: MakeChannel, fail: Fail, receiver: Receiver
) -> None:
    channel = channel_to(ChannelKind.SLACK)
    fail("train")
    now = later()
    receiver.answers, receiver.retry_after = [429], "900"
    sending.send_next(channel.pk, now)
    (one,) = to(channel)
    channel.refresh_from_db()
    asked = now + dt.timedelta(seconds=900)
    assert (one.status, one.answer, one.due_at, channel.held_until) == ("waiting", 429, asked, asked)
    assert not sending.send_next(channel.pk, later(890))
    assert sending.send_next(channel.pk, later(910))
    assert statuses(channel) == ["sent"]


@pytest.mark.django_db(transaction=True)
def test_no_transaction_is_open_while_a_message_is_sent(
    channel_to: MakeChannel, fail: Fail, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver that hangs must not keep rows locked."""
    channel, open_ = channel_to(ChannelKind.SLACK), []
    real = outbound.post

    def post(*args: Any, **more: Any) -> outbound.Answer:
        open_.append(connections["default"].in_atomic_block)
        return real(*args, **more)

    fail("train")
    monkeypatch.setattr(outbound, "post", post)
    sending.send_due()
    assert (open_, statuses(channel)) == ([False], ["sent"])


def test_what_waits_for_somebody_who_left_the_project_is_not_sent(
    ann: User, channel_to: MakeChannel, fail: Fail, receiver: Receiver
) -> None:
    channel = channel_to(ChannelKind.SLACK)
    fail("train")
    Membership.objects.filter(user=ann).delete()
    channels.send_test(channel, ann)
    sending.send_due()
    assert [(one.status, one.problem) for one in to(channel)] == [("failed", "no_access"), ("sent", "")]
    assert len(receiver.requests) == 1
    User.objects.filter(pk=ann.pk).update(is_active=False)
    channels.send_test(channel, ann)
    sending.send_due()
    assert to(channel)[-1].problem == "no_access"
    assert len(receiver.requests) == 1


def test_no_address_and_no_key_gets_into_a_log(
    ann: User, receiver: Receiver, fail: Fail, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a request fails, and where we do."""
    secret = "T1-B2-secret-part"
    hooks = [channels.create(ann, kind, kind, f"{receiver.url}{secret}") for kind in OVER_HTTP]
    receiver.answers = [500, 404]
    with caplog.at_level(logging.DEBUG):
        fail("train")
        sending.send_due()
        hooks[0].deliveries.update(data={"run": 1}, status="waiting", due_at=later(-1))
        sending.send_next(hooks[0].pk, later(3600))
    assert len(receiver.requests) == 3
    assert "were not sent" in caplog.text
    for text in (secret, *(decrypt(hook.key) for hook in hooks if hook.key)):
        assert text not in caplog.text


def test_an_address_that_is_wrong_for_people_is_not_tried_again(
    channel_to: MakeChannel, fail: Fail, receiver: Receiver
) -> None:
    channel = channel_to(ChannelKind.SLACK)
    fail("train")
    receiver.answers = [404]
    sending.send_due()
    assert statuses(channel) == ["failed"]


def test_a_receiver_that_is_gone_turns_its_channel_off(channel_to: MakeChannel, fail: Fail, receiver: Receiver) -> None:
    channel = channel_to(ChannelKind.WEBHOOK)
    receiver.answers = [410]
    fail("train", "next")
    sending.send_due()
    channel.refresh_from_db()
    assert not channel.enabled
    assert sorted(statuses(channel)) == ["failed", "waiting"]
    assert not sending.has_due()
    channels.turn(channel, on=True)
    sending.send_due()
    assert sorted(statuses(channel)) == ["failed", "sent"]


def test_a_private_address_is_not_reached_unless_allowed(
    channel_to: MakeChannel, fail: Fail, receiver: Receiver, settings: Settings
) -> None:
    channel = channel_to(ChannelKind.WEBHOOK)
    settings.DSTACKWEB_WEBHOOK_NETWORKS = []
    fail("train")
    sending.send_due()
    (one,) = to(channel)
    assert (one.status, one.problem) == ("failed", "private_address")
    assert receiver.requests == []


def test_a_receiver_that_does_not_listen_is_tried_again(channel_to: MakeChannel, fail: Fail) -> None:
    channel = channel_to(ChannelKind.SLACK)
    channel.url = channels.encrypt("http://127.0.0.1:9/")
    channel.save()
    fail("train")
    sending.send_due()
    (one,) = to(channel)
    assert (one.status, one.problem) == ("waiting", "unreachable")


def test_sending_again_repeats_what_is_over(ann: User, channel_to: MakeChannel, fail: Fail, receiver: Receiver) -> None:
    channel = channel_to(ChannelKind.WEBHOOK)
    fail("train")
    sending.send_due()
    channels.send_again(ann, to(channel)[0].uid)
    with pytest.raises(channels.Conflict, match="already"):
        channels.send_again(ann, to(channel)[0].uid)
    sending.send_due()
    assert len(receiver.requests) == 2
    assert receiver.requests[0].headers["webhook-id"] == receiver.requests[1].headers["webhook-id"]
    assert statuses(channel) == ["sent"]


def test_a_fault_of_ours_does_not_keep_others_from_being_sent(
    channel_to: MakeChannel, fail: Fail, receiver: Receiver
) -> None:
    first, second = channel_to(ChannelKind.SLACK), channel_to(ChannelKind.SLACK)
    fail("train")
    first.deliveries.update(data={"run": 1})
    sending.send_due()
    assert (statuses(first), statuses(second)) == (["unknown"], ["sent"])


def test_what_waits_for_the_daily_message_is_one_message_then(
    channel_to: MakeChannel, fail: Fail, receiver: Receiver
) -> None:
    channel = channel_to(ChannelKind.SLACK)
    in_an_hour = (later(3600)).time().replace(second=0, microsecond=0)
    channels.set_hours(channel, "UTC", {"digest_at": in_an_hour})
    fail("first", "second")
    assert not sending.has_due()
    assert not sending.send_next(channel.pk, later())
    assert sending.send_next(channel.pk, later(3700))
    (request,) = receiver.requests
    assert b"first" in request.body
    assert b"second" in request.body
    assert not sending.send_next(channel.pk, later(90000))


def test_what_waits_goes_by_new_times_and_tests_at_once(
    ann: User, channel_to: MakeChannel, fail: Fail, receiver: Receiver
) -> None:
    channel = channel_to(ChannelKind.SLACK)
    begin, end = (later(seconds).time().replace(microsecond=0) for seconds in (-3600, 3600))
    channels.set_hours(channel, "UTC", {"quiet_from": begin, "quiet_until": end})
    fail("train")
    channels.send_test(channel, ann)
    sending.send_due()
    assert statuses(channel) == ["waiting", "sent"]
    channels.set_hours(channel, "UTC", {"quiet_from": None, "quiet_until": None})
    sending.send_due()
    assert statuses(channel) == ["sent", "sent"]


def test_a_failure_is_not_repeated_in_quiet_hours(channel_to: MakeChannel, fail: Fail, receiver: Receiver) -> None:
    channel = channel_to(ChannelKind.WEBHOOK)
    fail("train")
    begin, end = (later(seconds).time().replace(microsecond=0) for seconds in (5, 7200))
    Channel.objects.filter(pk=channel.pk).update(quiet_from=begin, quiet_until=end)
    receiver.answers = [500]
    sending.send_due()
    (one,) = to(channel)
    assert one.due_at is not None
    assert one.due_at >= later(7000)


@pytest.fixture
def mailed(ann: User, settings: Settings) -> Any:
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    with MailServer() as server:
        settings.DSTACKWEB_EMAIL_URL = "smtp://127.0.0.1?from=gpus@example.org"
        settings.EMAIL_HOST, settings.EMAIL_PORT, settings.EMAIL_USE_TLS = "127.0.0.1", server.port, False
        settings.DEFAULT_FROM_EMAIL, settings.DSTACKWEB_PUBLIC_URL = "gpus@example.org", PUBLIC_URL
        channel = channels.create(ann, ChannelKind.EMAIL, "mail")
        yield server, channel


def test_a_mail_goes_to_the_account_s_address(mailed: tuple[MailServer, Channel], fail: Fail) -> None:
    server, channel = mailed
    fail("train")
    sending.send_due()
    ((to_, mail),) = server.mails
    assert to_ == "ann@example.org"
    assert f"To choose or turn off these mails: {PUBLIC_URL}/account/notifications/channels/{channel.pk}/" in str(mail)
    assert (mail["Subject"], mail["From"]) == ("[main] train: failed", "gpus@example.org")
    assert mail["Message-ID"] == f"<{Delivery.objects.get(channel=channel).batch}@example.org>"
    assert statuses(channel) == ["sent"]


def test_a_mail_server_that_is_busy_is_tried_again_and_one_that_refuses_is_not(
    mailed: tuple[MailServer, Channel], fail: Fail
) -> None:
    server, channel = mailed
    fail("train")
    server.refusals[:] = ["451 busy", "550 no"]
    sending.send_due()
    assert statuses(channel) == ["waiting"]
    sending.send_next(channel.pk, later(600))
    assert (statuses(channel), server.mails) == (["failed"], [])
    assert to(channel)[0].problem == "mail_refused"


def test_without_a_mail_server_a_mail_fails_with_that_reason(ann: User, fail: Fail) -> None:
    channel = channels.create(ann, ChannelKind.EMAIL, "mail")
    fail("train")
    sending.send_due()
    assert [(one.status, one.problem) for one in to(channel)] == [(DeliveryStatus.FAILED, "mail_off")]
