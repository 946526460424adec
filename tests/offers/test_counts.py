"""Counts of the cache: added up in memory, written every few seconds, none lost."""

from __future__ import annotations

import datetime as dt

import pytest
from django.db import DatabaseError
from django.test import Client
from django_q.signals import post_execute_in_worker

from dstackweb.backends.models import Backend
from dstackweb.offers import counts
from dstackweb.offers.models import CacheCount
from tests.offers.cloud_stub import Clock

pytestmark = pytest.mark.django_db


def rows() -> list[tuple[dt.datetime, int]]:
    return list(CacheCount.objects.order_by("hour").values_list("hour", "hits"))


def test_each_hour_has_its_own(backend: Backend, clock: Clock) -> None:
    hour = clock.now.replace(minute=0, second=0, microsecond=0)
    clock.pass_s((hour - clock.now).total_seconds() + 3599)
    counts.add(backend.pk, hits=1)
    clock.pass_s(1)
    for _ in range(3):
        counts.add(backend.pk, hits=1)
        counts.flush()
    assert rows() == [(hour, 1), (hour + dt.timedelta(hours=1), 3)]


def test_a_request_writes_them_a_few_seconds_later_and_a_task_at_its_end(
    backend: Backend, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "FLUSH_S", 3600.0)
    counts.add(backend.pk, hits=1)
    client.get("/healthz")
    assert rows() == []
    post_execute_in_worker.send(sender="django_q", func=None, task={})
    assert [hits for _, hits in rows()] == [1]
    monkeypatch.setattr(counts, "FLUSH_S", 0.0)
    counts.add(backend.pk, hits=1)
    client.get("/healthz")
    assert [hits for _, hits in rows()] == [2]


def test_counts_that_fail_to_be_stored_are_stored_later(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise DatabaseError("away")

    counts.add(backend.pk, hits=1)
    with monkeypatch.context() as patched:
        patched.setattr(counts, "_write", away)
        counts.flush()
    counts.add(backend.pk, hits=1)
    counts.flush()
    assert [hits for _, hits in rows()] == [2]


def test_counts_of_a_deleted_backend_are_dropped_and_do_not_block_others(backend: Backend, plain: Backend) -> None:
    counts.add(backend.pk, hits=1)
    counts.add(plain.pk, hits=1)
    Backend.objects.filter(pk=backend.pk).delete()
    counts.flush()
    assert list(CacheCount.objects.values_list("backend", "hits")) == [(plain.pk, 1)]


def test_old_hours_are_dropped(backend: Backend, clock: Clock) -> None:
    counts.add(backend.pk, hits=1)
    counts.flush()
    counts.prune(clock.now + counts.KEPT - dt.timedelta(hours=1))
    assert len(rows()) == 1
    counts.prune(clock.now + counts.KEPT + dt.timedelta(hours=1))
    assert rows() == []
