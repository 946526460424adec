"""Counters of a scope: what a shift makes, changes and deletes."""

from __future__ import annotations

import math

import pytest
from django.db import transaction

from dstackweb.accounts.models import Project
from dstackweb.progress import counters
from dstackweb.progress.counter_rows import lock_scope
from dstackweb.progress.counters import CounterRows, Delta, ensure_scope, shift
from dstackweb.progress.models import Scope, TaskGroup, TaskPrefix
from dstackweb.progress.states import TaskState

S = TaskState
NOW = 1_800_000_000_000

pytestmark = pytest.mark.django_db


@pytest.fixture
def scope_id(project: Project) -> int:
    """The scope of some run's first attempt."""
    return ensure_scope(project.pk, 7, 1)


def shifted(scope_id: int, deltas: dict[tuple[str, str], Delta], now_ms: int = NOW) -> Scope:
    """The scope after a shift."""
    with transaction.atomic():
        scope = lock_scope(scope_id)
        shift(scope, deltas, now_ms)
    return Scope.objects.get(pk=scope_id)


def states(**counts: int) -> Delta:
    """A delta without durations."""
    return Delta({TaskState(name): count for name, count in counts.items()})


def test_a_scope_is_made_once(project: Project) -> None:
    assert ensure_scope(project.pk, 7, 1) == ensure_scope(project.pk, 7, 1)
    assert ensure_scope(project.pk, 7, 2) != ensure_scope(project.pk, 7, 1) != ensure_scope(project.pk)


def test_a_deleted_scope_cannot_be_locked() -> None:
    with pytest.raises(Scope.DoesNotExist), transaction.atomic():
        lock_scope(4711)


def test_missing_prefixes_and_groups_are_made(scope_id: int) -> None:
    scope = shifted(
        scope_id, {("a", "a-1"): states(waiting=2), ("a", "a-2"): states(queued=1), ("b", "b"): states(erred=1)}
    )
    assert (scope.prefixes, scope.groups, scope.total, scope.waiting, scope.version) == (2, 3, 4, 2, 1)
    a = TaskPrefix.objects.get(name="a")
    assert (a.total, a.groups, a.waiting, a.queued, a.version, a.changed_ms, a.first_ms) == (3, 2, 2, 1, 1, NOW, NOW)
    assert list(TaskGroup.objects.filter(prefix=a).values_list("name", "total")) == [("a-1", 2), ("a-2", 1)]


def test_rows_are_written_in_the_order_of_their_names(scope_id: int) -> None:
    places = [(prefix, f"{prefix}-{number}") for prefix in "cab" for number in (2, 3, 1)]
    shifted(scope_id, {place: states(waiting=1) for place in places})
    made = TaskGroup.objects.order_by("pk").values_list("prefix__name", "name")
    assert list(made) == sorted(places)
    assert list(TaskPrefix.objects.order_by("pk").values_list("name", flat=True)) == ["a", "b", "c"]


def test_only_changed_rows_get_the_new_version(scope_id: int) -> None:
    shifted(scope_id, {("a", "a-1"): states(waiting=2), ("b", "b"): states(waiting=1)})
    scope = shifted(scope_id, {("a", "a-1"): states(waiting=-1, memory=1), ("b", "b"): states()})
    assert scope.version == 2
    assert dict(TaskPrefix.objects.values_list("name", "version")) == {"a": 2, "b": 1}
    assert dict(TaskGroup.objects.values_list("name", "version")) == {"a-1": 2, "b": 1}


def test_a_group_stays_when_all_its_tasks_are_forgotten(scope_id: int) -> None:
    shifted(scope_id, {("a", "a-1"): states(memory=2), ("a", "a-2"): states(memory=1)})
    scope = shifted(scope_id, {("a", "a-1"): states(memory=-2, forgotten_done=2), ("a", "a-3"): states(forgotten=1)})
    assert (scope.groups, scope.total, scope.forgotten_done, scope.forgotten) == (3, 4, 2, 1)
    assert list(TaskGroup.objects.order_by("name").values_list("name", "total")) == [("a-1", 2), ("a-2", 1), ("a-3", 1)]
    assert shifted(scope_id, {("a", "a-1"): states(forgotten_done=-2)}).groups == 2


def test_a_group_over_the_limit_is_deleted_with_its_last_task_and_its_prefix_keeps_the_counts(
    scope_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "GROUPS_KEPT", 1)
    shifted(scope_id, {("a", "a-1"): states(memory=2), ("a", "a-2"): states(memory=1)})
    scope = shifted(scope_id, {("a", "a-1"): states(memory=-2, forgotten=2)})
    assert (scope.groups, scope.total, scope.forgotten) == (1, 3, 2)
    assert list(TaskGroup.objects.values_list("name", flat=True)) == ["a-2"]
    prefix = TaskPrefix.objects.get()
    assert (prefix.groups, prefix.total, prefix.forgotten, prefix.memory) == (1, 3, 2, 1)
    scope = shifted(scope_id, {("a", "a-3"): states(forgotten=1), ("a", "a-1"): states(forgotten=-1, waiting=1)})
    assert (scope.groups, scope.total, scope.forgotten) == (2, 4, 2)
    assert dict(TaskGroup.objects.values_list("name", "total")) == {"a-2": 1, "a-1": 1}


def test_shifting_counts_returns_the_ids_of_their_rows(scope_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "GROUPS_KEPT", 0)
    with transaction.atomic():
        deltas = {("a", "a-1"): states(waiting=1), ("a", "a-2"): states(forgotten=1)}
        book = CounterRows(lock_scope(scope_id))
        book.read(deltas)
        book.shift(deltas, NOW)
    prefix, group = TaskPrefix.objects.get(), TaskGroup.objects.get()
    assert book.ids(("a", "a-1")) == (prefix.pk, group.pk)
    assert book.ids(("a", "a-2")) == (prefix.pk, 0)


def rated(scope_id: int) -> list[tuple[float, float, int, int]]:
    """What the scope and its only prefix know of how fast tasks finish."""
    rows = (Scope.objects.get(pk=scope_id), TaskPrefix.objects.get(scope=scope_id))
    return [(row.finished_1m, row.finished_10m, row.rated_ms, row.first_ms) for row in rows]


def test_finishes_fade_by_the_minute(scope_id: int) -> None:
    shifted(scope_id, {("a", "a"): states(waiting=10)})
    shifted(scope_id, {("a", "a"): states(waiting=-8, memory=8)})
    shifted(scope_id, {("a", "a"): states(waiting=-2, erred=1, released=1)}, NOW + 60_000)
    fast, slow = pytest.approx(8 * math.exp(-1) + 2), pytest.approx(8 * math.exp(-0.1) + 2)
    assert rated(scope_id) == [(fast, slow, NOW + 60_000, NOW)] * 2


def test_tasks_finished_before_a_prefixs_first_report_do_not_count_in_its_rate(scope_id: int) -> None:
    shifted(scope_id, {("a", "a"): states(memory=100_000, forgotten=5, waiting=3)})
    assert rated(scope_id) == [(0, 0, NOW, NOW)] * 2
    shifted(scope_id, {("a", "a"): states(waiting=-1, memory=1)})
    assert rated(scope_id) == [(1, 1, NOW, NOW)] * 2
    scope = shifted(scope_id, {("b", "b"): states(memory=100_000), ("a", "a"): states(waiting=-1, memory=1)})
    assert scope.finished_1m == scope.finished_10m == 2


def test_tasks_finished_before_the_first_counts_do_not_count_in_the_rate(scope_id: int) -> None:
    shifted(scope_id, {("a", "a"): states()})
    shifted(scope_id, {("a", "a"): states(memory=100_000)})
    assert rated(scope_id) == [(0, 0, NOW, NOW)] * 2


def test_a_task_that_is_forgotten_after_it_finished_has_not_finished_again(scope_id: int) -> None:
    shifted(scope_id, {("a", "a"): states(waiting=8)})
    shifted(scope_id, {("a", "a"): states(waiting=-8, memory=8)})
    assert shifted(scope_id, {("a", "a"): states(memory=-8, forgotten=8)}).finished_1m == 8


def test_a_restarted_task_does_not_lower_the_finished_count(scope_id: int) -> None:
    shifted(scope_id, {("a", "a"): states(waiting=8)})
    shifted(scope_id, {("a", "a"): states(waiting=-3, memory=3)})
    assert shifted(scope_id, {("a", "a"): states(memory=-2, waiting=2)}).finished_1m == 3


def test_a_clock_that_goes_back_does_not_lower_the_rate(scope_id: int) -> None:
    shifted(scope_id, {("a", "a"): states(waiting=1)})
    shifted(scope_id, {("a", "a"): states(memory=8)})
    assert shifted(scope_id, {("a", "a"): states(memory=1)}, NOW - 3_600_000).finished_1m == 9


def test_each_batch_of_durations_weighs_half(scope_id: int) -> None:
    shifted(scope_id, {("a", "a"): Delta({S.MEMORY: 2}, duration_n=2, duration_s=8.0)})
    scope = shifted(scope_id, {("a", "a"): Delta({S.MEMORY: 1}, duration_n=1, duration_s=2.0)})
    for row in (scope, TaskPrefix.objects.get(), TaskGroup.objects.get()):
        assert (row.duration_n, row.duration_s, row.duration_ewma_s) == (3, 10.0, 3.0)
