"""Writes notifications in the transactions of their events: either both are there or neither.

One query finds the rules, one statement writes all notifications of a batch. What is written already stays as it is.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from dstackweb.accounts.access import allows
from dstackweb.accounts.models import Membership, User
from dstackweb.backends import api_calls
from dstackweb.backends.models import HostEvent, HostEventKind
from dstackweb.notifications import services
from dstackweb.notifications.hours import send_at
from dstackweb.notifications.models import ChannelKind, Condition, Delivery, DeliveryStatus, Rule
from dstackweb.notifications.services import EVENTS
from dstackweb.offers import sources
from dstackweb.runs import stuck
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.models import BudgetMark, Run, RunEvent
from dstackweb.runs.notification_codes import NotificationEvent
from dstackweb.runs.states import Reason

LONG_WAIT = dt.timedelta(minutes=5)
"""A start after a shorter wait is no news."""
BY_PEOPLE = {Reason.STOPPED_BY_USER, Reason.ABORTED_BY_USER}
WARNED_FROM = 80
"""Percent of a budget."""


@dataclass(frozen=True)
class News:
    """Something that happened. `events` are what rules may call it, the most specific first; `key` names it for ever.

    `user_id` is the owner of the run that it is about, `by_id` who did it and is not notified.
    """

    key: str
    events: Sequence[NotificationEvent]
    at: dt.datetime
    data: dict[str, Any]
    project_id: int | None = None
    run_uid: UUID | None = None
    user_id: int | None = None
    by_id: int | None = None


def on_run_events(events: Iterable[RunEvent], **_signal: Any) -> None:
    if found := [news for event in events if (news := news_of(event)) is not None]:
        publish(found)


def news_of(event: RunEvent) -> News | None:
    """What a run's event is to people; None if no rule is about such events."""
    run, more = event.run, dict[str, Any]()
    match event.kind:
        case RunEventKind.RUNNING:
            waited = event.at - run.queued_at
            if waited < LONG_WAIT:
                return None
            names, more = [NotificationEvent.RUN_STARTED], {"waited_s": round(waited.total_seconds())}
        case RunEventKind.DONE:
            names = [NotificationEvent.RUN_ENDED]
        case RunEventKind.FAILED | RunEventKind.TERMINATED:
            names = [NotificationEvent.RUN_FAILED, NotificationEvent.RUN_ENDED]
            if run.termination_reason in BY_PEOPLE:
                del names[0]
        case RunEventKind.UTILIZATION_NOTICE | RunEventKind.UTILIZATION_WOULD_STOP | RunEventKind.INACTIVITY_NOTICE:
            names = [NotificationEvent.RUN_STOPS_SOON]
        case RunEventKind.DISPLACED:
            names = [NotificationEvent.RUN_DISPLACED]
        case RunEventKind.TASKS_FAIL:
            names = [NotificationEvent.TASKS_FAIL]
        case RunEventKind.UTILIZATION_KEPT:
            by = event.actor.get_username() if event.actor is not None else ""
            names, more = [NotificationEvent.RUN_KEPT], {"by": by}
        case _:
            return None
    return News(
        key=f"run-event:{event.pk}",
        events=names,
        at=event.at,
        data={**_of_run(run), "kind": event.kind, "data": event.data, **more},
        project_id=run.project_id,
        run_uid=run.uid,
        user_id=run.user_id,
        by_id=event.actor_id if event.kind == RunEventKind.UTILIZATION_KEPT else None,
    )


def on_host_event(instance: HostEvent, created: bool, **_signal: Any) -> None:
    if created and instance.kind == HostEventKind.HELD_BACK:
        data = {"host": instance.host.name, "error": instance.data.get("error", "")}
        publish([News(f"host-event:{instance.pk}", [NotificationEvent.HOST_HELD_BACK], instance.at, data)])


def on_budget_marks(marks: Sequence[BudgetMark], **_signal: Any) -> None:
    """Write a notification of the highest share of a project's budget that it has just spent."""
    mark = max(marks, key=lambda one: one.percent)
    if mark.percent >= WARNED_FROM:
        data = {"percent": mark.percent, "spent": str(mark.spent), "budget": str(mark.budget)}
        key = f"budget:{mark.project_id}:{mark.month}:{mark.percent}:{mark.budget}"
        data["project"] = mark.project.name
        publish([News(key, [NotificationEvent.BUDGET_SPENT], mark.at, data, project_id=mark.project_id)])


def _of_run(run: Run) -> dict[str, Any]:
    return {
        "run": run.name,
        "status": run.status,
        "reason": run.termination_reason,
        "message": run.status_message,
        "detail": run.status_detail,
    }


def publish(found: Sequence[News]) -> int:
    """Write what rules ask for, in this transaction; returns how many notifications there were, old ones included."""
    rules = _rules(found)
    readers = _Readers(rules, found)
    rows = [
        _row(rule, name, news)
        for news in found
        for rule, name in _first_by_channel(rules, news)
        if readers.may_read(rule, name, news)
    ]
    Delivery.objects.bulk_create(rows, ignore_conflicts=True)
    return len(rows)


def _row(rule: Rule, name: NotificationEvent, news: News) -> Delivery:
    in_app = rule.channel.kind == ChannelKind.APP
    return Delivery(
        channel=rule.channel,
        key=news.key,
        event=name.value,
        project_id=news.project_id,
        run_uid=news.run_uid,
        data=news.data,
        at=news.at,
        unread=in_app,
        status=DeliveryStatus.SENT if in_app else DeliveryStatus.WAITING,
        due_at=None if in_app else send_at(timezone.now(), services.hours_of(rule.channel)),
    )


def _rules(found: Sequence[News]) -> list[Rule]:
    names = {name.value for news in found for name in news.events}
    projects = {news.project_id for news in found if news.project_id is not None}
    users = {news.user_id for news in found if news.user_id is not None}
    here = Q(project=None) | Q(project__in=projects)
    whose = Q(own=True, channel__user__in=users) | Q(own=False)
    return list(Rule.objects.filter(here, whose, event__in=names).select_related("channel").order_by("pk"))


def _first_by_channel(rules: Sequence[Rule], news: News) -> Iterable[tuple[Rule, NotificationEvent]]:
    """For each channel the first of the news' names that a rule of it has."""
    found: dict[int, tuple[Rule, NotificationEvent]] = {}
    for name in news.events:
        for rule in rules:
            wanted = rule.event == name and rule.project_id in (None, news.project_id)
            own = rule.channel.user_id
            if wanted and (not rule.own or own == news.user_id) and (own is None or own != news.by_id):
                found.setdefault(rule.channel_id, (rule, name))
    return found.values()


class _Readers:
    """Who may read what, loaded once for a batch."""

    def __init__(self, rules: Sequence[Rule], found: Sequence[News]) -> None:
        users = {rule.channel.user_id for rule in rules if rule.channel.user_id is not None}
        self.roles: defaultdict[int, dict[int, str]] = defaultdict(dict)
        self.admins: set[int] = set()
        if not users:
            return
        self.admins |= set(User.objects.filter(pk__in=users, is_superuser=True).values_list("pk", flat=True))
        members = Membership.objects.filter(user__in=users, project__in={news.project_id for news in found})
        for user_id, project_id, role in members.values_list("user_id", "project_id", "role"):
            self.roles[user_id][project_id] = role

    def may_read(self, rule: Rule, name: NotificationEvent, news: News) -> bool:
        user_id = rule.channel.user_id
        if user_id in self.admins:
            return True
        if news.project_id is None:
            return False
        if user_id is None:
            return rule.channel.project_id == news.project_id
        role = self.roles[user_id].get(news.project_id)
        return role is not None and allows(role, EVENTS[name].least)


CONDITIONS_EVERY_S = 60.0
AFTER: Mapping[NotificationEvent, dt.timedelta] = {
    NotificationEvent.QUEUE_STUCK: dt.timedelta(minutes=30),
    NotificationEvent.BACKEND_FAILS: dt.timedelta(minutes=10),
    NotificationEvent.API_LIMIT: dt.timedelta(0),
}
"""What lasts less is no news."""
GONE_AFTER = dt.timedelta(minutes=30)
"""What comes back within this time is the same as before."""
Key = tuple[str, str]


class Found(NamedTuple):
    """A condition that is so now."""

    data: dict[str, Any]
    project_id: int | None = None


def check_conditions(now: dt.datetime) -> int:
    """Write notifications of what has been so for a while, such as a queue that is stuck; returns how many.

    A condition stays a row until it has been absent for a while, so that one that comes and goes is notified of once.
    """
    found = dict(_all(now))
    known = {(row.event, row.subject): row for row in Condition.objects.all()}
    away = [row.pk for key, row in known.items() if key not in found]
    Condition.objects.filter(pk__in=away, away_since__lte=now - GONE_AFTER).delete()
    Condition.objects.filter(pk__in=away, away_since=None).update(away_since=now)
    Condition.objects.exclude(pk__in=away).exclude(away_since=None).update(away_since=None)
    new = [
        Condition(event=event, subject=subject, since=now) for event, subject in found if (event, subject) not in known
    ]
    Condition.objects.bulk_create(new, ignore_conflicts=True)
    due = Condition.objects.filter(notified=False, away_since=None)
    return sum(_notify(row, found[row.event, row.subject], now) for row in due if (row.event, row.subject) in found)


def _notify(row: Condition, found: Found, now: dt.datetime) -> bool:
    event = NotificationEvent(row.event)
    if now - row.since < AFTER[event]:
        return False
    with transaction.atomic():
        if not Condition.objects.filter(pk=row.pk, notified=False).update(notified=True):
            return False
        publish([News(f"condition:{row.pk}", [event], now, found.data, found.project_id)])
    return True


def _all(now: dt.datetime) -> Iterator[tuple[Key, Found]]:
    for one in stuck.stuck_queues():
        data = {"queue": one.queue.name, "code": one.code, "waiting": one.waiting}
        yield (NotificationEvent.QUEUE_STUCK.value, str(one.queue.pk)), Found(data, one.queue.project_id)
    for row in sources.failing(now):
        backend = row.backend
        data = {"backend": backend.name, "backend_kind": backend.kind, "region": row.region, "failure": row.error}
        yield (NotificationEvent.BACKEND_FAILS.value, str(row.backend_id)), Found(data)
    for api, figures in api_calls.strained(now).items():
        numbers = {name: getattr(figures, name) for name in ("requests", "throttles", "tight")}
        subject = hashlib.sha256(" ".join(api).encode()).hexdigest()[:40]
        yield (NotificationEvent.API_LIMIT.value, subject), Found({**api._asdict(), **numbers})
