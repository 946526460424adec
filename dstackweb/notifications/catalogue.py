"""What there may be news of: what each event is about, and who may read it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

from dstackweb.accounts.models import Role
from dstackweb.runs.notification_codes import NotificationEvent


class About(Enum):
    RUN = auto()
    PROJECT = auto()
    DEPLOYMENT = auto()
    """For its admins alone; channels of projects don't get it."""


class Kind(NamedTuple):
    about: About
    least: Role = Role.VIEWER
    """The role in its project that a reader needs."""


EVENTS: Mapping[NotificationEvent, Kind] = {
    NotificationEvent.RUN_STARTED: Kind(About.RUN),
    NotificationEvent.RUN_ENDED: Kind(About.RUN),
    NotificationEvent.RUN_FAILED: Kind(About.RUN),
    NotificationEvent.RUN_STOPS_SOON: Kind(About.RUN),
    NotificationEvent.RUN_DISPLACED: Kind(About.RUN),
    NotificationEvent.RUN_KEPT: Kind(About.RUN),
    NotificationEvent.QUEUE_STUCK: Kind(About.PROJECT),
    NotificationEvent.BUDGET_SPENT: Kind(About.PROJECT, Role.MANAGER),
    NotificationEvent.BACKEND_FAILS: Kind(About.DEPLOYMENT),
    NotificationEvent.HOST_HELD_BACK: Kind(About.DEPLOYMENT),
}
"""What rules may be about, in the order of lists."""
