"""Tasks in Redis."""

from __future__ import annotations

from typing import Any

from django_q.brokers.redis_broker import Redis

from dstackweb.lib import schema
from dstackweb.scheduler.processes.brokers import nothing


class RedisBroker(Redis):  # type: ignore[misc]  # django-q2 has no types
    def dequeue(self) -> Any:
        return nothing() if schema.refusal() else super().dequeue()
