"""A task works on the request that enqueued it."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest

from dstackweb.lib import logs
from dstackweb.scheduler.processes import tasks


@pytest.mark.parametrize("request_id", ["req-1", ""])
def test_a_task_carries_the_id_of_its_request_to_the_worker(monkeypatch: pytest.MonkeyPatch, request_id: str) -> None:
    sent: dict[str, Any] = {}
    monkeypatch.setattr(tasks, "_broker", lambda cluster: None)
    monkeypatch.setattr(tasks, "async_task", lambda path, *args, **options: sent.update(options))

    def enqueue() -> None:
        logs.request_id.set(request_id)
        tasks.enqueue(tasks.refresh_offers, cluster="dstackweb")

    def work() -> str:
        logs.request_id.set("the task before")
        logs.follow("django_q", {"name": "x", "group": sent["group"]})
        return logs.request_id.get()

    contextvars.Context().run(enqueue)
    assert contextvars.Context().run(work) == request_id
