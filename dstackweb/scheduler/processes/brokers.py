"""django-q2's broker on the database, or on Redis: a process loads only the one that it uses. From both, a cluster that
is too old for the database takes no tasks (`lib.schema`)."""

from __future__ import annotations

import time
from typing import Any

from django.conf import settings

from dstackweb.lib import schema

IDLE_S = 1.0
BUSY_S, REST_S = 0.3, 0.06


def nothing() -> None:
    """The tasks are left to newer clusters. The supervisor stops this one soon."""
    time.sleep(IDLE_S)  # in the place of a dequeue, which waits too


if "redis" in settings.Q_CLUSTER:
    from django_q.brokers.redis_broker import Redis

    class RedisBroker(Redis):  # type: ignore[misc]  # django-q2 has no types
        def dequeue(self) -> Any:
            return nothing() if schema.refusal() else super().dequeue()

else:
    from django_q.brokers.orm import ORM

    class OrmBroker(ORM):  # type: ignore[misc]  # django-q2 has no types
        """A task brings the next soon, so it looks often after one (`poll` in Q_CLUSTER)."""

        busy_until = 0.0

        def dequeue(self) -> Any:
            if schema.refusal():
                return nothing()
            tasks = super().dequeue()  # waits for `poll` if there are none
            now = time.monotonic()
            if tasks:
                self.busy_until = now + BUSY_S
            elif now > self.busy_until:
                time.sleep(REST_S)  # the super class waits less, for a task that follows soon
            return tasks
