"""Handing tasks to django-q2, over connections that are kept: it would open one to Redis for each task."""

from __future__ import annotations

import functools
from typing import Any

from django_q.brokers import Broker, get_broker
from django_q.tasks import async_task


def enqueue(task: str, *args: Any, cluster: str, name: str | None = None) -> None:
    """Have `cluster` call the dotted path `task`. Raises what the broker raises when it is away."""
    async_task(task, *args, cluster=cluster, broker=_broker(cluster), task_name=name)


@functools.cache
def _broker(cluster: str) -> Broker:
    return get_broker(cluster)
