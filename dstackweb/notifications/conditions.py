"""Notifications of what is so for a while, such as a queue that is stuck: one for each time, once it has lasted.

A condition stays a row until it has been absent for a while, so that one that comes and goes is notified of once.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from django.db import transaction

from dstackweb.notifications.models import Condition
from dstackweb.notifications.outbox import News, publish
from dstackweb.offers import sources
from dstackweb.runs import stuck
from dstackweb.runs.notification_codes import NotificationEvent

EVERY_S = 60.0
AFTER: Mapping[NotificationEvent, dt.timedelta] = {
    NotificationEvent.QUEUE_STUCK: dt.timedelta(minutes=30),
    NotificationEvent.BACKEND_FAILS: dt.timedelta(minutes=10),
}
"""What lasts less is no news."""
GONE_AFTER = dt.timedelta(minutes=30)
"""What comes back within this time is the same as before."""
Key = tuple[str, str]


class Found(NamedTuple):
    """What is so now."""

    data: dict[str, Any]
    project_id: int | None = None


def check(now: dt.datetime) -> int:
    """Look at what is so, and write notifications of what has lasted; returns of how many."""
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
        data = {
            "backend": row.backend.name,
            "backend_kind": row.backend.kind,
            "region": row.region,
            "failure": row.error,
        }
        yield (NotificationEvent.BACKEND_FAILS.value, str(row.backend_id)), Found(data)
