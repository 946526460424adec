"""What there may be news of, channels and their rules, and what readers have read."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils.translation import gettext as _

from dstackweb.accounts.access import visible_projects
from dstackweb.accounts.models import Role, User
from dstackweb.audit.models import AuditAction, AuditKind
from dstackweb.audit.recorder import record
from dstackweb.lib import sql
from dstackweb.lib.errors import NotFound
from dstackweb.notifications.hours import Hours
from dstackweb.notifications.models import Channel, ChannelKind, Delivery, Rule
from dstackweb.runs.history import parse_zone
from dstackweb.runs.notification_codes import NotificationEvent

MOST_UNREAD = 10
"""Counting stops here: the bell then says 9+."""


class RuleScope(NamedTuple):
    """Whose runs a rule is about: the user's own, or all; `project_id` None means all their projects."""

    own: bool
    project_id: int | None = None


class Subject(Enum):
    RUN = auto()
    PROJECT = auto()
    DEPLOYMENT = auto()
    """For its admins alone; channels of projects don't get it."""


class EventInfo(NamedTuple):
    about: Subject
    least: Role = Role.VIEWER
    """The role in its project that a reader needs."""


EVENTS: Mapping[NotificationEvent, EventInfo] = {
    NotificationEvent.RUN_STARTED: EventInfo(Subject.RUN),
    NotificationEvent.RUN_ENDED: EventInfo(Subject.RUN),
    NotificationEvent.RUN_FAILED: EventInfo(Subject.RUN),
    NotificationEvent.RUN_STOPS_SOON: EventInfo(Subject.RUN),
    NotificationEvent.RUN_DISPLACED: EventInfo(Subject.RUN),
    NotificationEvent.RUN_KEPT: EventInfo(Subject.RUN),
    NotificationEvent.TASKS_FAIL: EventInfo(Subject.RUN),
    NotificationEvent.QUEUE_STUCK: EventInfo(Subject.PROJECT),
    NotificationEvent.BUDGET_SPENT: EventInfo(Subject.PROJECT, Role.MANAGER),
    NotificationEvent.BACKEND_FAILS: EventInfo(Subject.DEPLOYMENT),
    NotificationEvent.API_LIMIT: EventInfo(Subject.DEPLOYMENT),
    NotificationEvent.HOST_HELD_BACK: EventInfo(Subject.DEPLOYMENT),
}
"""What rules may be about, in the order of lists."""
DEFAULTS: Mapping[NotificationEvent, RuleScope] = {
    event: RuleScope(own=info.about == Subject.RUN)
    for event, info in EVENTS.items()
    if event not in (NotificationEvent.RUN_ENDED, NotificationEvent.QUEUE_STUCK)
}
"""What a new user sees in the app, and what goes to a new channel of theirs."""


def make_bell(instance: User, created: bool = False, raw: bool = False, **_signal: Any) -> None:
    """Give a new user a channel in the app."""
    if created and not raw:
        bell_of(instance)


def bell_of(user: User) -> Channel:
    """The user's channel in the app, made with DEFAULTS where it is missing."""
    mine = Channel.objects.filter(user=user, kind=ChannelKind.APP)
    if (found := mine.first()) is not None:
        return found
    with transaction.atomic():
        # In bulk, which sends no signals: no person made the change, and so not in the audit log.
        Channel.objects.bulk_create([Channel(user=user, kind=ChannelKind.APP)], ignore_conflicts=True)
        bell = mine.get()
        write_rules(bell, DEFAULTS)
    return bell


def first_rules(channel: Channel) -> Mapping[NotificationEvent, RuleScope]:
    """What goes to a new channel that sends: a person's own runs, or the project's that fail."""
    if channel.project_id is None:
        return DEFAULTS
    return {NotificationEvent.RUN_FAILED: RuleScope(own=False, project_id=channel.project_id)}


def hours_of(channel: Channel) -> Hours:
    """When it sends; in UTC where this machine does not know its time zone."""
    try:
        zone = parse_zone(channel.zone)
    except ValueError:
        zone = dt.UTC
    return Hours(zone, channel.quiet_from, channel.quiet_until, channel.digest_at)


def set_rules(channel: Channel, wanted: Mapping[NotificationEvent, RuleScope]) -> None:
    """Let exactly these events go to a channel. Of one that sends, the audit log says what changed."""
    with transaction.atomic():
        before = _events_of(channel)
        channel.rules.exclude(event__in=[event.value for event in wanted]).delete()
        write_rules(channel, wanted)
        if channel.kind != ChannelKind.APP and before != (after := _events_of(channel)):
            changes = {"rules": [before, after]}
            record(AuditKind.CHANNEL, AuditAction.CHANGED, channel.name, project=channel.project, changes=changes)


def _events_of(channel: Channel) -> list[str]:
    """Its rules for the audit log, such as `run_failed` or `run_ended (own)`."""
    rules = channel.rules.select_related("project").order_by("event")
    scopes = [(rule.event, "own" if rule.own else rule.project and rule.project.name) for rule in rules]
    return [f"{event} ({scope})" if scope else event for event, scope in scopes]


def write_rules(channel: Channel, wanted: Mapping[NotificationEvent, RuleScope]) -> None:
    rows = (
        Rule(channel=channel, event=event.value, own=scope.own, project_id=scope.project_id)
        for event, scope in wanted.items()
    )
    sql.write(rows, ["channel", "event"], ["own", "project"])


def inbox(user: User) -> QuerySet[Delivery]:
    """The user's notifications in the app, the newest first, of projects that they may still see."""
    mine = Delivery.objects.filter(channel__user=user, channel__kind=ChannelKind.APP)
    return mine.filter(readable_by(user)).order_by("-pk")


def readable_by(user: User) -> Q:
    """The notifications that a user may see now: of their projects, and the deployment's if they are its admin."""
    if not user.is_active:
        return Q(pk__in=[])
    here = Q(project__in=visible_projects(user))
    return here | Q(project=None) if user.is_superuser else here | Q(project=None, event=NotificationEvent.TEST)


def unread(user: User) -> int:
    """How many of them are unread, at most MOST_UNREAD."""
    return inbox(user).filter(unread=True).order_by()[:MOST_UNREAD].count()


def open_one(user: User, uid: UUID) -> Delivery:
    """A notification of the user, read from now on. Raises NotFound."""
    found = inbox(user).filter(uid=uid).select_related("project").first()
    if found is None:
        raise NotFound(_("There is no such notification. It may have been deleted because it was old."))
    mark_read(user, [found.pk])
    return found


def old(now: dt.datetime) -> QuerySet[Delivery]:
    """Those to be deleted."""
    return Delivery.objects.filter(at__lt=now - dt.timedelta(days=settings.DSTACKWEB_NOTIFICATIONS_DAYS))


def mark_read(user: User, ids: Iterable[int] | None = None) -> int:
    """Mark these notifications of the user as read, or all; returns how many were not."""
    mine = Delivery.objects.filter(channel__in=Channel.objects.filter(user=user, kind=ChannelKind.APP), unread=True)
    return (mine if ids is None else mine.filter(pk__in=ids)).update(unread=False)
