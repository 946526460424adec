"""Tasks in the database."""

from __future__ import annotations

import time
from typing import Any

from django_q.brokers.orm import ORM

from dstackweb.lib import schema
from dstackweb.scheduler.processes.brokers import nothing

BUSY_S, REST_S = 0.3, 0.06


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
            time.sleep(REST_S)
        return tasks
