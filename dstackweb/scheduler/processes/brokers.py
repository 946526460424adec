"""django-q2's brokers, from which a cluster that is too old for the database takes no tasks (`lib.schema`)."""

from __future__ import annotations

import time
from typing import Any

from django_q.brokers.orm import ORM
from django_q.brokers.redis_broker import Redis

from dstackweb.lib import schema

IDLE_S = 1.0
BUSY_S, REST_S = 0.3, 0.06


class OrmBroker(ORM):  # type: ignore[misc]  # django-q2 has no types
    """Tasks in the database. A task brings the next soon, so it looks often after one (`poll` in Q_CLUSTER)."""

    busy_until = 0.0

    def dequeue(self) -> Any:
        if schema.refusal():
            return _nothing()
        tasks = super().dequeue()  # waits for `poll` if there are none
        now = time.monotonic()
        if tasks:
            self.busy_until = now + BUSY_S
        elif now > self.busy_until:
            time.sleep(REST_S)
        return tasks


class RedisBroker(Redis):  # type: ignore[misc]  # django-q2 has no types
    """Tasks in Redis."""

    def dequeue(self) -> Any:
        return _nothing() if schema.refusal() else super().dequeue()


def _nothing() -> None:
    """The tasks are left to newer clusters. The supervisor stops this one soon."""
    time.sleep(IDLE_S)
