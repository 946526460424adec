"""What becomes of an attempt's tasks once it is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dstackweb.accounts.models import Project
from dstackweb.lib.errors import Conflict
from dstackweb.progress import counters, finalize, recount
from dstackweb.progress.ingest import ingest_batch
from dstackweb.progress.models import (
    Reporter,
    ReporterCount,
    Scope,
    Task,
    TaskFailure,
    TaskGroup,
    TaskPrefix,
)
from dstackweb.progress.reports import Batch, Count, Event, Failure
from dstackweb.progress.states import CODES, LIVE, TaskState

S = TaskState
NOW = 1_800_000_000_000
STATES = (S.MEMORY, S.ERRED, S.PROCESSING, S.QUEUED, S.NO_WORKER, S.WAITING, S.FORGOTTEN)

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def nothing_differs() -> Iterator[None]:
    yield
    assert list(recount.differences()) == []


@pytest.fixture
def scope_id(project: Project) -> int:
    """An attempt with tasks in every state, reported one by one and as counts."""
    return filled(counters.ensure_scope(project.pk, 7, 1))


def filled(scope_id: int) -> int:
    events = tuple(
        Event(f"{prefix}-{index}-{state}", state, 1, prefix, f"{prefix}-{index}", message="no luck")
        for prefix in ("load", "train")
        for index in range(3)
        for state in STATES
    )
    ingest_batch(scope_id, Batch("log-0", events), NOW)
    ingest_batch(
        scope_id, Batch("log-0", tuple(Event(e.key, S.FORGOTTEN, 9, e.prefix, e.group) for e in events[:7])), NOW
    )
    counts = tuple(Count("dask", f"dask-{index}", 1, dict.fromkeys(STATES, index + 1)) for index in range(4))
    ingest_batch(scope_id, Batch("scheduler", counts=counts), NOW)
    ingest_batch(scope_id, Batch("scheduler", failures=(Failure("dask-x", "dask", "dask-1", 1, "no luck"),)), NOW)
    assert list(recount.differences()) == []
    return scope_id


def states(row: Scope | TaskPrefix | TaskGroup) -> dict[TaskState, int]:
    return {state: getattr(row, state) for state in TaskState}


def released(counts: dict[TaskState, int]) -> dict[TaskState, int]:
    """The same, once nothing is to come any more."""
    live = sum(counts[state] for state in LIVE)
    return counts | dict.fromkeys(LIVE, 0) | {S.RELEASED: counts[S.RELEASED] + live}


def everything() -> dict[tuple[str, str], dict[TaskState, int]]:
    """All counters."""
    found = {("scope", ""): states(Scope.objects.get())}
    found |= {("prefix", row.name): states(row) for row in TaskPrefix.objects.all()}
    found |= {("group", row.name): states(row) for row in TaskGroup.objects.all()}
    return found


def test_unfinished_tasks_of_an_ended_attempt_are_released_everywhere(scope_id: int) -> None:
    before = everything()
    assert finalize.end([(7, 1)], NOW + 5) == 1
    assert finalize.due() == [scope_id]
    assert finalize.settle(scope_id)
    assert everything() == {key: released(counts) for key, counts in before.items()}
    assert not Task.objects.filter(state__in=[CODES[state] for state in (*LIVE, S.FORGOTTEN)]).exists()
    assert not ReporterCount.objects.exists()
    scope = Scope.objects.get()
    assert (scope.settled, scope.ended_ms, scope.tasks, scope.counted) == (True, NOW + 5, Task.objects.count(), 0)
    assert finalize.due() == []


@pytest.mark.parametrize("state", LIVE, ids=str)
def test_a_group_that_only_had_tasks_of_one_kind_is_released(project: Project, state: TaskState) -> None:
    scope_id = counters.ensure_scope(project.pk, 7, 1)
    ingest_batch(scope_id, Batch("log-0", (Event("a-1", state, 1, "a", "a"),), (Count("b", "b", 1, {state: 3}),)), NOW)
    finalize.end([(7, 1)], NOW + 5)
    assert finalize.settle(scope_id)
    assert states(Scope.objects.get())[S.RELEASED] == 4
    assert list(TaskGroup.objects.order_by("name").values_list("name", "released")) == [("a", 1), ("b", 3)]


def test_settling_raises_the_version_that_pages_poll(project: Project) -> None:
    scope_id = counters.ensure_scope(project.pk, 7, 1)
    ingest_batch(scope_id, Batch("log-0", (Event("a-1", S.MEMORY, 1, "a", "a"),)), NOW)
    finalize.end([(7, 1)], NOW + 5)
    version = Scope.objects.get().version
    assert finalize.settle(scope_id)
    assert Scope.objects.get().version > version


def test_counters_between_the_end_and_settling_are_right_too(scope_id: int) -> None:
    finalize.end([(7, 1)], NOW)
    assert list(recount.differences()) == []


def test_reports_for_an_ended_attempt_are_refused(scope_id: int) -> None:
    finalize.end([(7, 1)], NOW)
    for _ in range(2):
        with pytest.raises(Conflict):
            ingest_batch(scope_id, Batch("log-0", (Event("load-9", S.MEMORY, 5, "load", "load-9"),)), NOW)
        finalize.settle(scope_id)


def test_an_end_is_marked_once_and_settling_again_changes_nothing(scope_id: int) -> None:
    finalize.end([(7, 1)], NOW)
    assert finalize.end([(7, 1), (8, 1)], NOW + 9) == 0
    assert Scope.objects.get().ended_ms == NOW
    finalize.settle(scope_id)
    version, after = Scope.objects.get().version, everything()
    assert finalize.settle(scope_id)
    assert everything() == after
    assert Scope.objects.get().version == version


def test_a_new_attempt_counts_on_its_own_while_the_old_one_settles(
    project: Project, scope_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finalize, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(finalize, "MOST_STEPS", 1)
    finalize.end([(7, 1)], NOW)
    again = counters.ensure_scope(project.pk, 7, 2)
    turns = 0
    while not finalize.settle(scope_id):
        turns += 1
        ingest_batch(again, Batch("log-0", (Event("load-1", S.PROCESSING, turns, "load", "load-1"),)), NOW)
        assert list(recount.differences()) == []
    assert turns > 5
    assert Scope.objects.get(pk=again).processing == 1
    assert not Scope.objects.get(pk=again).settled


def test_a_polling_page_gets_the_released_tasks(scope_id: int) -> None:
    seen = Scope.objects.get().version
    finalize.end([(7, 1)], NOW)
    assert Scope.objects.get().version > seen
    finalize.settle(scope_id)
    assert all(row.version > seen for row in TaskPrefix.objects.all())


def test_tasks_of_a_settled_attempt_are_deleted_after_a_week_and_its_counters_stay(scope_id: int) -> None:
    finalize.end([(7, 1)], NOW)
    finalize.settle(scope_id)
    before = everything()
    finalize.prune(NOW + finalize.TASKS_KEPT_MS)
    assert Task.objects.exists()
    finalize.prune(NOW + finalize.TASKS_KEPT_MS + 1)
    assert not Task.objects.exists()
    assert everything() == before
    assert TaskFailure.objects.exists()


def test_a_retried_attempt_is_deleted_after_a_week_and_the_last_one_after_three_months(
    project: Project, scope_id: int
) -> None:
    last = filled(counters.ensure_scope(project.pk, 7, 2))
    of_project = counters.ensure_scope(project.pk)
    finalize.end([(7, 1), (7, 2)], NOW)
    for pk in (scope_id, last):
        finalize.settle(pk)
    finalize.prune(NOW + finalize.TASKS_KEPT_MS + 1)
    assert set(Scope.objects.values_list("pk", flat=True)) == {last, of_project}
    finalize.prune(NOW + finalize.COUNTERS_KEPT_MS + 1)
    assert list(Scope.objects.values_list("pk", flat=True)) == [of_project]
    for model in (Task, TaskGroup, TaskPrefix, TaskFailure, Reporter, ReporterCount):
        assert not model.objects.exists()


def test_a_running_attempt_is_never_pruned(scope_id: int) -> None:
    finalize.prune(NOW + 10 * finalize.COUNTERS_KEPT_MS)
    assert Task.objects.exists()


@pytest.mark.parametrize("column", ["memory", "waiting", "total", "groups", "forgotten"])
@pytest.mark.parametrize("model", [Scope, TaskPrefix])
def test_a_counter_that_is_wrong_is_named(scope_id: int, model: type[Scope] | type[TaskPrefix], column: str) -> None:
    row = model.objects.first()
    assert row is not None
    right = getattr(row, column)
    model.objects.filter(pk=row.pk).update(**{column: right + 1})
    found = [str(difference) for difference in recount.differences()]
    assert any(f"kept {right + 1}" in each and str(row) in each for each in found), found
    model.objects.filter(pk=row.pk).update(**{column: right})


def test_a_group_that_is_wrong_is_named(scope_id: int) -> None:
    mine = TaskGroup.objects.filter(name="train-1")
    mine.update(memory=5)
    assert "memory of group 'train-1' of main 7/1: kept 5, counted 1" in map(str, recount.differences())
    mine.update(memory=1)
