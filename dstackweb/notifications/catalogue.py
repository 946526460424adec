"""What there may be news of: what each event is about, and who may read it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

from dstackweb.accounts.models import Role
from dstackweb.runs.notification_codes import NotificationEvent


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
    NotificationEvent.QUEUE_STUCK: EventInfo(Subject.PROJECT),
    NotificationEvent.BUDGET_SPENT: EventInfo(Subject.PROJECT, Role.MANAGER),
    NotificationEvent.BACKEND_FAILS: EventInfo(Subject.DEPLOYMENT),
    NotificationEvent.HOST_HELD_BACK: EventInfo(Subject.DEPLOYMENT),
}
"""What rules may be about, in the order of lists."""
