"""Channels that send: set up by a person for themselves, or by a project's managers for the project."""

from __future__ import annotations

import base64
import datetime as dt
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone, translation
from django.utils.translation import gettext as _

from dstackweb.accounts.access import project_for, visible_projects
from dstackweb.accounts.models import Project, Role, User
from dstackweb.lib.errors import Conflict, Invalid, NotFound
from dstackweb.lib.outbound import check_url
from dstackweb.lib.secrets import decrypt, encrypt
from dstackweb.notifications import services
from dstackweb.notifications.hours import send_at
from dstackweb.notifications.models import Channel, ChannelKind, Delivery, DeliveryStatus
from dstackweb.runs.notification_codes import NotificationEvent

MOST = 20
"""Channels of one person or one project."""
LOGGED = 50
"""Deliveries on a channel's page."""


def of_user(user: User) -> QuerySet[Channel]:
    """A person's channels that send."""
    return Channel.objects.filter(user=user).exclude(kind=ChannelKind.APP)


def of_project(project: Project) -> QuerySet[Channel]:
    return Channel.objects.filter(project=project)


def find(user: User, channel_id: int) -> Channel:
    """A channel that the user may change: their own, or that of a project they manage. Raises NotFound, Forbidden."""
    mine = Q(user=user) | Q(project__in=visible_projects(user))
    channel = Channel.objects.exclude(kind=ChannelKind.APP).select_related("project", "user").filter(pk=channel_id)
    if (found := channel.filter(mine).first()) is None:
        raise NotFound(_("there is no such channel"))
    if found.project is not None:
        project_for(user, found.project.name, Role.MANAGER)
    return found


def create(owner: User | Project, kind: ChannelKind, name: str, url: str = "") -> Channel:
    """A channel to `url`, with its first rules; an e-mail channel has no URL. Raises Invalid, Conflict."""
    if kind != ChannelKind.EMAIL:
        url = url.strip()
        try:
            check_url(url)
        except ValueError as error:
            raise Invalid.at("url", msg=str(error)) from None
    whose: dict[str, Any] = {"user": owner} if isinstance(owner, User) else {"project": owner}
    with transaction.atomic():
        if Channel.objects.filter(**whose).exclude(kind=ChannelKind.APP).count() >= MOST:
            raise Conflict(_("there are %(most)s channels already; delete one first") % {"most": MOST})
        channel = Channel.objects.create(
            kind=kind,
            name=name.strip(),
            language=translation.get_language(),
            url=encrypt(url) if url else "",
            key=encrypt(new_key()) if kind == ChannelKind.WEBHOOK else "",
            **whose,
        )
        services.write_rules(channel, services.first_rules(channel))
    return channel


def new_key() -> str:
    """A key for signatures as Standard Webhooks writes it: `whsec_` and 32 random bytes in base64."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


def replace_key(channel: Channel) -> str:
    """Sign with a new key from now on; returns it."""
    key = new_key()
    channel.key = encrypt(key)
    channel.save(update_fields=["key"])
    return key


def host_of(channel: Channel) -> str:
    """Where a channel sends to, without the part of its URL that lets anyone write there."""
    return urlsplit(decrypt(channel.url)).hostname or ""


def turn(channel: Channel, on: bool) -> None:
    """Turn a channel on or off. What waits is sent once it is on again."""
    channel.enabled = on
    channel.save(update_fields=["enabled"])
    if on:
        _try_now(channel.pk)


def set_hours(channel: Channel, zone: str, times: Mapping[str, dt.time | None]) -> None:
    """Set the time zone and times of day. What waits for its first attempt is sent by them, too."""
    channel.zone, fields = zone, ["zone", *times]
    for name, time in times.items():
        setattr(channel, name, time)
    with transaction.atomic():
        channel.save(update_fields=fields)
        waiting = channel.deliveries.filter(status=DeliveryStatus.WAITING, attempts=0)
        waiting.exclude(event=NotificationEvent.TEST).update(due_at=send_at(timezone.now(), services.hours_of(channel)))


def _try_now(channel_id: int) -> None:
    """Leave a channel alone no longer, unless a worker has it."""
    sending = Delivery.objects.filter(channel=channel_id, status=DeliveryStatus.SENDING).values("channel")
    Channel.objects.filter(pk=channel_id).exclude(pk__in=sending).update(failures=0, held_until=None)


def send_test(channel: Channel, by: User) -> Delivery:
    """Send a notification to see that it arrives."""
    now = timezone.now()
    return Delivery.objects.create(
        channel=channel,
        key=f"test:{now.timestamp()}:{secrets.token_hex(4)}",
        event=NotificationEvent.TEST,
        project=channel.project,
        data={"by": by.get_username()},
        at=now,
        status=DeliveryStatus.WAITING,
        due_at=now,
    )


def deliveries(channel: Channel) -> QuerySet[Delivery]:
    """What was sent to a channel or is to be, the newest first; of a person's, what they may see now."""
    found = channel.deliveries.select_related("project").order_by("-pk")
    return found if channel.user is None else found.filter(services.readable_by(channel.user))


def send_again(user: User, uid: UUID) -> Delivery:
    """Send what was sent, or has failed, once more, with the same id. Raises NotFound, Conflict."""
    found = Delivery.objects.filter(uid=uid).first()
    if found is None:
        raise NotFound(_("there is no such notification"))
    find(user, found.channel_id)
    over = Delivery.objects.filter(pk=found.pk).exclude(status__in=[DeliveryStatus.WAITING, DeliveryStatus.SENDING])
    now = timezone.now()
    if not over.update(status=DeliveryStatus.WAITING, due_at=now, attempts=0, answer=None, problem=""):
        raise Conflict(_("it is being sent already"))
    _try_now(found.channel_id)
    return found
