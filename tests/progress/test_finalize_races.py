"""Reporters that go on while their run's attempt ends: all that was taken is settled, and nothing is taken after."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, transaction

from dstackweb.lib.errors import Conflict
from dstackweb.progress import counters, finalize
from dstackweb.progress.ingest import ingest_batch
from dstackweb.progress.models import Scope, Task
from dstackweb.progress.recount import differences
from dstackweb.progress.reports import Batch, Event
from dstackweb.progress.states import CODES, TaskState
from tests.factories import make_project

pytestmark = pytest.mark.django_db(transaction=True)

REPORTERS = 4
STATES = (TaskState.PROCESSING, TaskState.MEMORY, TaskState.WAITING, TaskState.FORGOTTEN)


def in_a_thread(act: Callable[..., int | None], *args: object) -> int | None:
    try:
        return act(*args)
    finally:
        connection.close()


def test_an_end_between_batches_of_several_reporters_leaves_nothing_unsettled() -> None:
    scope_id = counters.ensure_scope(make_project("main").pk, 7, 1)
    under_way = threading.Barrier(REPORTERS + 1)

    def report(number: int) -> int:
        for seq in range(1, 10_000):
            if seq == 3:
                under_way.wait(60)
            events = tuple(
                Event(f"{number}-{seq}-{index}", STATES[index % 4], seq, "load", f"load-{index % 7}")
                for index in range(20)
            )
            try:
                ingest_batch(scope_id, Batch(f"reporter-{number}", events), seq)
            except Conflict:
                return seq - 1
        raise AssertionError("the attempt never ended")

    def end() -> int:
        under_way.wait(60)
        with transaction.atomic():
            return finalize.end([(7, 1)], 1)

    with ThreadPoolExecutor(REPORTERS + 1) as pool:
        reporters = [pool.submit(in_a_thread, report, number) for number in range(REPORTERS)]
        ends = pool.submit(in_a_thread, end)
        taken = 20 * sum(each.result(60) or 0 for each in reporters)
        assert ends.result(60) == 1
        settled = [pool.submit(in_a_thread, finalize.settle, scope_id) for _ in range(2)]
        assert [each.result(60) for each in settled] == [True, True]
    scope = Scope.objects.get(pk=scope_id)
    assert (scope.total, scope.memory, scope.forgotten, scope.released) == (taken, taken // 4, taken // 4, taken // 2)
    left = (CODES[TaskState.MEMORY], CODES[TaskState.RELEASED])
    assert set(Task.objects.values_list("state", flat=True)) == set(left)
    assert scope.tasks == Task.objects.count() == taken - taken // 4
    assert list(differences()) == []
