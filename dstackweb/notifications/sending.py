"""Sends notifications: each once, wherever a worker is killed.

A worker claims a channel for a while, takes what is due there into a batch, sends it with no transaction open, and
notes the answer where the batch is still its own. What a worker left in a batch and did not note may have arrived:

- a webhook's receiver can recognize a repeated notification by its id: it is sent again, with the same id;
- people can't: it is marked as UNKNOWN, and they may have it sent again.

Failures are repeated with growing delays, each notification's own, and the channel is left alone meanwhile, so that a
receiver that hangs costs one request at a time.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from django.conf import settings
from django.db import transaction
from django.db.models import F, Q
from django.urls import reverse
from django.utils import timezone, translation

from dstackweb.accounts import preferences
from dstackweb.lib import outbound
from dstackweb.lib.errors import DomainError
from dstackweb.lib.network import full_jitter
from dstackweb.lib.secrets import decrypt
from dstackweb.notifications import mail, messages, services
from dstackweb.notifications.hours import after_quiet
from dstackweb.notifications.messages import Notice, Post
from dstackweb.notifications.models import GROUPED, Channel, ChannelKind, Delivery, DeliveryStatus
from dstackweb.runs.notification_codes import DeliveryProblem

log = logging.getLogger(__name__)

CLAIM = dt.timedelta(seconds=60)
"""A worker has a channel for so long: longer than a message may take, so that two never have it at once."""
EVERY_S = 3.0
GROUP = {ChannelKind.EMAIL: 200, ChannelKind.SLACK: 20, ChannelKind.TEAMS: 20}
"""Notifications in one message to people, most."""
BUDGET_S = 10.0
"""After this time a tick begins no further message."""
MOST_ATTEMPTS = 12
BASE_S, CAP_S = 30.0, 6 * 3600.0
"""The delay after the first failure, and the longest: all attempts take about a day."""
HOLD_CAP_S = 600.0
"""A channel that fails is left alone for at most this long, unless it asks for more."""
RETRIED = frozenset({408, 425, 429})
"""Answers below 500 after which people's messages are tried again; others mean that the address is wrong."""


class SendResult(NamedTuple):
    """What came of a message. `again`: whether the same may be tried later, after `wait_s` if the receiver said so."""

    status: DeliveryStatus
    problem: DeliveryProblem | None = None
    answer: int | None = None
    again: bool = False
    wait_s: float = 0.0


def has_due() -> bool:
    return bool(_due_channels(timezone.now(), 1))


def send_due() -> int:
    """Send what is due, for a few seconds; returns how many messages were sent."""
    end, sent = time.monotonic() + BUDGET_S, 0
    turns = deque(_due_channels(timezone.now(), 100))
    while turns and time.monotonic() < end:
        channel_id = turns.popleft()
        if send_next(channel_id, timezone.now()):
            sent += 1
            turns.append(channel_id)
    return sent


def _due_channels(now: dt.datetime, most: int) -> list[int]:
    free = Q(channel__held_until=None) | Q(channel__held_until__lte=now)
    # Those that are being sent were left by a worker, since the channel is free: its claim has expired.
    unfinished = Q(status=DeliveryStatus.WAITING, due_at__lte=now) | Q(status=DeliveryStatus.SENDING)
    due = Delivery.objects.filter(free, unfinished, channel__enabled=True)
    # Those that answered last time first, and of these in turn: none waits for another that hangs or has much to get.
    turn = ("channel__failures", F("channel__held_until").asc(nulls_first=True), "channel")
    return list(due.order_by(*turn).values_list("channel", flat=True).distinct()[:most])


def send_next(channel_id: int, now: dt.datetime) -> bool:
    """Send a channel's next message; True if it arrived, and there may be more."""
    until = now + CLAIM
    free = Q(held_until=None) | Q(held_until__lte=now)
    if not Channel.objects.filter(free, pk=channel_id, enabled=True).update(held_until=until):
        return False
    channel = Channel.objects.select_related("user").get(pk=channel_id)
    _close_left_batches(channel, now)
    _drop_unreadable(channel)
    batch, found = _take(channel, now)
    if not found:
        Channel.objects.filter(pk=channel_id, held_until=until).update(held_until=None)
        return False
    result = _send(channel, batch, found, now)
    _note(channel, batch, found, result, now, until)
    return result.status == DeliveryStatus.SENT


def _close_left_batches(channel: Channel, now: dt.datetime) -> None:
    """Of a worker that has the channel no more."""
    left = channel.deliveries.filter(status=DeliveryStatus.SENDING)
    if channel.kind in GROUPED:
        left.update(status=DeliveryStatus.UNKNOWN, problem=DeliveryProblem.INTERRUPTED)
    else:
        left.update(status=DeliveryStatus.WAITING, due_at=now, problem=DeliveryProblem.INTERRUPTED)


def _drop_unreadable(channel: Channel) -> None:
    """Of projects that the channel's user has left meanwhile, or anything if the account is not active any more."""
    if channel.user is not None:
        waiting = channel.deliveries.filter(status=DeliveryStatus.WAITING)
        hidden = waiting.exclude(services.readable_by(channel.user))
        hidden.update(status=DeliveryStatus.FAILED, problem=DeliveryProblem.NO_ACCESS)


def _take(channel: Channel, now: dt.datetime) -> tuple[uuid.UUID, list[Delivery]]:
    """Mark what is sent next as being sent, and return it."""
    batch = uuid.uuid4()
    due = channel.deliveries.filter(status=DeliveryStatus.WAITING, due_at__lte=now).order_by("due_at", "pk")
    ids = list(due.values_list("pk", flat=True)[: GROUP.get(ChannelKind(channel.kind), 1)])
    Delivery.objects.filter(pk__in=ids, status=DeliveryStatus.WAITING).update(
        status=DeliveryStatus.SENDING, batch=batch, attempts=F("attempts") + 1
    )
    return batch, list(Delivery.objects.filter(batch=batch).select_related("project").order_by("pk"))


def _send(channel: Channel, batch: uuid.UUID, found: Sequence[Delivery], now: dt.datetime) -> SendResult:
    """Send a message. No transaction is open, and nothing is written."""
    try:
        with translation.override(_language(channel)):
            notices = [messages.notice(one, settings.DSTACKWEB_PUBLIC_URL) for one in found]
            if channel.kind == ChannelKind.EMAIL:
                return _mail(channel, batch, notices)
            return _post(channel, decrypt(channel.url), _request(channel, notices, now))
    except DomainError:
        return SendResult(DeliveryStatus.FAILED, DeliveryProblem.BAD_KEY)
    except Exception:
        # A fault of ours must not keep the channel's other notifications from being sent.
        log.exception("notifications %s were not sent", [one.pk for one in found])
        return SendResult(DeliveryStatus.UNKNOWN, DeliveryProblem.INTERRUPTED)


def _language(channel: Channel) -> str:
    """That of its user's account; else the one that it was set up in."""
    chosen = channel.user.language if channel.user is not None else ""
    return next(filter(preferences.is_known, (chosen, channel.language)), settings.LANGUAGE_CODE)


def _request(channel: Channel, notices: Sequence[Notice], now: dt.datetime) -> Post:
    match channel.kind:
        case ChannelKind.SLACK:
            return messages.slack(notices)
        case ChannelKind.TEAMS:
            return messages.teams(notices)
    return messages.webhook(notices[0], decrypt(channel.key), now)


def _mail(channel: Channel, batch: uuid.UUID, notices: Sequence[Notice]) -> SendResult:
    address = channel.user.email if channel.user is not None else ""
    if not address:
        return SendResult(DeliveryStatus.FAILED, DeliveryProblem.NO_ADDRESS)
    page = reverse("channel", args=[channel.pk])
    text = messages.mail_text(notices, settings.DSTACKWEB_PUBLIC_URL and settings.DSTACKWEB_PUBLIC_URL + page)
    problem, again = mail.send(address, messages.subject(notices), text, batch)
    if problem is None:
        return SendResult(DeliveryStatus.SENT)
    if problem == DeliveryProblem.NO_ANSWER:
        return SendResult(DeliveryStatus.UNKNOWN, problem)
    return SendResult(DeliveryStatus.FAILED, problem, again=again)


def _post(channel: Channel, url: str, request: Post) -> SendResult:
    """To people, what may have arrived is not repeated."""
    try:
        answer = outbound.post(url, request.body, request.headers, settings.DSTACKWEB_WEBHOOK_NETWORKS)
    except outbound.Refused:
        return SendResult(DeliveryStatus.FAILED, DeliveryProblem.PRIVATE_ADDRESS)
    except outbound.Unreachable:
        return SendResult(DeliveryStatus.FAILED, DeliveryProblem.UNREACHABLE, again=True)
    except outbound.NoAnswer:
        if channel.kind in GROUPED:
            return SendResult(DeliveryStatus.UNKNOWN, DeliveryProblem.NO_ANSWER)
        return SendResult(DeliveryStatus.FAILED, DeliveryProblem.NO_ANSWER, again=True)
    status = answer.status
    if 200 <= status < 300:
        return SendResult(DeliveryStatus.SENT, answer=status)
    if status == 410:
        return SendResult(DeliveryStatus.FAILED, DeliveryProblem.GONE, status)
    again = channel.kind not in GROUPED or status >= 500 or status in RETRIED
    wait_s = min(CAP_S, answer.retry_after_s)
    return SendResult(DeliveryStatus.FAILED, DeliveryProblem.ANSWER, status, again, wait_s)


def _note(
    channel: Channel,
    batch: uuid.UUID,
    found: Sequence[Delivery],
    result: SendResult,
    now: dt.datetime,
    until: dt.datetime,
) -> None:
    """Write what came of a message, unless its batch was closed meanwhile, and let others have the channel."""
    facts = {"problem": result.problem or "", "answer": result.answer}
    with transaction.atomic():
        mine = Delivery.objects.filter(batch=batch, status=DeliveryStatus.SENDING)
        for one in found if result.again else ():
            if one.attempts < MOST_ATTEMPTS:
                wait = dt.timedelta(seconds=max(result.wait_s, delay_s(one.attempts)))
                due = after_quiet(now + wait, services.hours_of(channel))
                mine.filter(pk=one.pk).update(status=DeliveryStatus.WAITING, due_at=due, **facts)
        mine.update(status=result.status, **facts)
        if result.problem == DeliveryProblem.GONE:
            channel.enabled = False
            channel.save(update_fields=["enabled"])
        claimed = Channel.objects.filter(pk=channel.pk, held_until=until)
        if result.status == DeliveryStatus.SENT:
            claimed.update(failures=0, held_until=now)  # when it had its turn
        else:
            pause = max(result.wait_s, min(HOLD_CAP_S, delay_s(channel.failures + 1)))
            claimed.update(failures=F("failures") + 1, held_until=now + dt.timedelta(seconds=pause))


def delay_s(attempts: int) -> float:
    """Seconds to wait after so many attempts in a row have failed: half of it is random."""
    longest = min(CAP_S, BASE_S * 2.0 ** min(attempts - 1, 60))
    return longest / 2 + full_jitter(0, longest / 2, longest / 2)
