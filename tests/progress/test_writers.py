"""Many writers of one scope at once, and writers that are killed: nothing is lost, doubled or locked for good."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, transaction

from dstackweb.progress import counters, ingest
from dstackweb.progress.counters import Delta, ensure_scope
from dstackweb.progress.models import Reporter, Scope, Task, TaskFailure, TaskGroup
from dstackweb.progress.recount import differences
from dstackweb.progress.reports import Batch, Count, Event, Failure
from dstackweb.progress.states import TaskState
from tests.factories import make_project

S = TaskState
NOW = 1_800_000_000_000
WRITERS = 8


@pytest.fixture
def scope_id(transactional_db: None) -> int:
    """The scope of some run's first attempt."""
    return ensure_scope(make_project("main").pk, 7, 1)


def lives(reporter: str, tasks: int) -> Iterator[Batch]:
    """A reporter's tasks from waiting to done, in groups that others have tasks in, too, and counts beside them."""
    for seq, state in enumerate((S.WAITING, S.PROCESSING, S.MEMORY)):
        events = (Event(f"{reporter}-{at}", state, seq, f"p{at % 3}", f"g{at % 7}") for at in range(tasks))
        counts = (Count(f"p{at % 3}", f"g{at % 7}", seq, {state: 10}) for at in range(21))
        yield Batch(reporter, tuple(events), tuple(counts))


def at_once(act: Callable[[int], None], number: int = WRITERS) -> None:
    """Run it in so many threads, which begin together; raises what any of them raised."""
    ready, errors = threading.Barrier(number), list[BaseException]()

    def run(index: int) -> None:
        try:
            ready.wait()
            act(index)
        except BaseException as error:
            errors.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_eight_writers_of_the_same_groups_lose_nothing(scope_id: int) -> None:
    def write(index: int) -> None:
        for batch in lives(f"r{index}", 60):
            ingest.ingest_batch(scope_id, batch, NOW)

    at_once(write)
    scope = Scope.objects.get(pk=scope_id)
    assert (scope.memory, scope.total, scope.prefixes, scope.groups) == (WRITERS * 270, WRITERS * 270, 3, 21)
    assert scope.version == WRITERS * 3
    assert list(differences()) == []


def test_eight_writers_of_a_projects_runs_read_what_the_one_before_has_written(transactional_db: None) -> None:
    """Each locks and reads by one message: it waits in the middle of that, for what it then reads."""
    project_id = make_project("main").pk

    def write(index: int) -> None:
        for at in range(12):
            names = [("train", f"train-{at % 3}"), (f"own-{index}", f"own-{index}-{at}")]
            deltas = {name: Delta({S.QUEUED: 1}) for name in names}
            with transaction.atomic():
                counters.shift_project(project_id, deltas, NOW)

    at_once(write)
    scope = Scope.objects.get(project_id=project_id)
    assert (scope.queued, scope.prefixes, scope.groups) == (WRITERS * 24, WRITERS + 1, 3 + WRITERS * 12)
    assert scope.version == WRITERS * 12
    shared = TaskGroup.objects.filter(prefix__name="train").order_by("name")
    assert [group.queued for group in shared] == [WRITERS * 4] * 3


def test_eight_writers_of_the_same_batch_count_it_once(scope_id: int) -> None:
    batches = list(lives("r", 60))

    def write(index: int) -> None:
        for batch in batches:
            ingest.ingest_batch(scope_id, batch, NOW)

    at_once(write)
    assert Scope.objects.get(pk=scope_id).memory == 270
    assert list(differences()) == []


def test_concurrent_writers_create_a_scope_once(transactional_db: None) -> None:
    project, found = make_project("main"), set[int]()
    at_once(lambda _index: found.add(ensure_scope(project.pk, 7, 1)))
    assert len(found) == Scope.objects.filter(run_id=7).count() == 1


class Killed(BaseException):
    """What no product code catches."""


@pytest.mark.django_db(transaction=True)
def test_a_batch_killed_between_any_two_statements_leaves_nothing_and_can_be_resent(scope_id: int) -> None:
    first = Batch("r", (Event("a", S.PROCESSING, 1, "p", "g"), Event("b", S.FORGOTTEN, 1, "p", "g")))
    ingest.ingest_batch(scope_id, first, NOW)
    second = Batch(
        "r",
        (Event("a", S.MEMORY, 2, "p", "g"), Event("c", S.ERRED, 2, "p", "h"), Event("d", S.WAITING, 2, "q", "q")),
        (Count("p", "g", 2, {S.QUEUED: 2}),),
        (Failure("x", "q", "q", 2, "no"),),
        ended_seq=3,
    )
    before = _rows()
    statements = 0

    def until(execute: Callable[..., Any], *rest: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return execute(*rest)

    while True:
        left = statements
        try:
            with connection.execute_wrapper(until):
                receipt = ingest.ingest_batch(scope_id, second, NOW)
        except Killed:
            assert _rows() == before
            statements += 1
        else:
            break
    assert statements > 10
    assert (receipt.applied, receipt.outdated) == (5, 0)
    assert ingest.ingest_batch(scope_id, second, NOW).outdated == 5
    assert list(differences()) == []


def _rows() -> list[object]:
    models = (Scope, Reporter, TaskGroup, Task, TaskFailure)
    return [list(model.objects.order_by("pk").values()) for model in models]
