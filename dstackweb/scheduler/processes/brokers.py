"""django-q2's brokers, from which a cluster that is too old for the database takes no tasks (`lib.schema`)."""

from __future__ import annotations

import time
from typing import Any

from django_q.brokers.orm import ORM
from django_q.brokers.redis_broker import Redis

from dstackweb.lib import schema

IDLE_S = 1.0


class OrmBroker(ORM):  # type: ignore[misc]  # django-q2 has no types
    """Tasks in the database."""

    def dequeue(self) -> Any:
        return _nothing() if schema.refusal() else super().dequeue()


class RedisBroker(Redis):  # type: ignore[misc]  # django-q2 has no types
    """Tasks in Redis."""

    def dequeue(self) -> Any:
        return _nothing() if schema.refusal() else super().dequeue()


def _nothing() -> None:
    """The tasks are left to newer clusters. The supervisor stops this one soon."""
    time.sleep(IDLE_S)
