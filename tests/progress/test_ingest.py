"""Applying batches: which entries count, are outdated or are rejected."""

from __future__ import annotations

import pytest
from django.db import transaction

from dstackweb.accounts.models import Project
from dstackweb.lib.errors import Conflict, TooLarge
from dstackweb.progress import counters as limits, group_counts, ingest, task_events
from dstackweb.progress.counters import ensure_scope
from dstackweb.progress.models import Reporter, ReporterCount, Scope, Task, TaskFailure, TaskGroup, TaskPrefix
from dstackweb.progress.recount import differences
from dstackweb.progress.reports import Batch, Count, Event, Failure, Receipt
from dstackweb.progress.states import TaskState

S = TaskState
NOW = 1_800_000_000_000

pytestmark = pytest.mark.django_db


@pytest.fixture
def scope_id(project: Project) -> int:
    """The scope of some run's first attempt."""
    return ensure_scope(project.pk, 7, 1)


def event(key: str, state: TaskState, seq: int, **more: object) -> Event:
    """An event of a task whose group is its key up to the last dash, and whose prefix is up to the first."""
    return Event(key, state, seq, key.split("-")[0], key.rpartition("-")[0], **more)


def count(group: str, seq: int, duration_n: int = 0, duration_s: float = 0.0, **states: int) -> Count:
    """Counts of a group whose prefix is its name up to the first dash."""
    tasks = {TaskState(name): number for name, number in states.items()}
    return Count(group.split("-")[0], group, seq, tasks, duration_n, duration_s)


def ingest_entries(
    scope_id: int, *entries: Event | Count | Failure, reporter: str = "r", ended: int | None = None, now_ms: int = NOW
) -> Receipt:
    """What becomes of these entries."""
    return ingest.ingest_batch(
        scope_id,
        Batch(
            reporter,
            tuple(entry for entry in entries if isinstance(entry, Event)),
            tuple(entry for entry in entries if isinstance(entry, Count)),
            tuple(entry for entry in entries if isinstance(entry, Failure)),
            ended,
        ),
        now_ms,
    )


def states_of(row: Scope | TaskPrefix | TaskGroup) -> dict[str, int]:
    """Its counters that are not 0."""
    return {state.value: getattr(row, state) for state in TaskState if getattr(row, state)}


def counted(scope_id: int) -> dict[str, int]:
    """The scope's counters that are not 0."""
    return states_of(Scope.objects.get(pk=scope_id))


def outcome(receipt: Receipt) -> tuple[int, int, list[tuple[int, str]]]:
    """Applied, outdated, and refused with why."""
    return receipt.applied, receipt.outdated, [(refusal.index, refusal.reason) for refusal in receipt.rejected]


def test_new_tasks_are_counted_in_group_prefix_and_scope(scope_id: int) -> None:
    receipt = ingest_entries(
        scope_id, event("a-1-x", S.WAITING, 1), event("a-1-y", S.PROCESSING, 1), event("b-1-x", S.ERRED, 1)
    )
    assert outcome(receipt) == (3, 0, [])
    assert counted(scope_id) == {"erred": 1, "processing": 1, "waiting": 1}
    assert states_of(TaskPrefix.objects.get(name="a")) == {"processing": 1, "waiting": 1}
    assert states_of(TaskGroup.objects.get(name="b-1")) == {"erred": 1}
    assert Scope.objects.get(pk=scope_id).tasks == 3


def test_a_task_moves_from_state_to_state(scope_id: int) -> None:
    for seq, state in enumerate((S.WAITING, S.QUEUED, S.PROCESSING, S.MEMORY)):
        ingest_entries(scope_id, event("a-1", state, seq))
        assert counted(scope_id) == {state: 1}


def test_a_batch_sent_again_changes_nothing(scope_id: int) -> None:
    batch = [event("a-1", S.MEMORY, 2), count("b", 2, memory=3, waiting=1), Failure("x", "b", "b", 2, "no")]
    ingest_entries(scope_id, *batch)
    before = Scope.objects.values().get(pk=scope_id)
    assert outcome(ingest_entries(scope_id, *batch)) == (0, 3, [])
    assert Scope.objects.values().get(pk=scope_id) == before | {"version": 2}


def test_outdated_reports_change_nothing(scope_id: int) -> None:
    ingest_entries(scope_id, event("a-1", S.MEMORY, 5), count("b", 5, memory=2))
    assert outcome(ingest_entries(scope_id, event("a-1", S.PROCESSING, 4), count("b", 4, waiting=2))) == (0, 2, [])
    assert counted(scope_id) == {"memory": 3}


def test_of_two_reporters_with_one_sequence_the_later_name_counts(scope_id: int) -> None:
    ingest_entries(scope_id, event("a-1", S.MEMORY, 5), reporter="b")
    assert outcome(ingest_entries(scope_id, event("a-1", S.ERRED, 5), reporter="a")) == (0, 1, [])
    assert outcome(ingest_entries(scope_id, event("a-1", S.ERRED, 5), reporter="c")) == (1, 0, [])


def test_within_a_batch_the_last_event_of_a_task_counts(scope_id: int) -> None:
    receipt = ingest_entries(
        scope_id, event("a-1", S.PROCESSING, 1), event("a-1", S.MEMORY, 1), event("a-1", S.WAITING, 0)
    )
    assert outcome(receipt) == (1, 2, [])
    assert counted(scope_id) == {"memory": 1}


def test_a_forgotten_task_stays_forgotten(scope_id: int) -> None:
    ingest_entries(scope_id, event("a-1", S.MEMORY, 9))
    assert outcome(ingest_entries(scope_id, event("a-1", S.FORGOTTEN, 5))) == (1, 0, [])
    assert counted(scope_id) == {"forgotten_done": 1}
    assert outcome(ingest_entries(scope_id, event("a-1", S.PROCESSING, 6))) == (0, 0, [(0, "forgotten")])
    assert outcome(ingest_entries(scope_id, event("a-1", S.PROCESSING, 4), event("a-1", S.FORGOTTEN, 8))) == (0, 2, [])
    assert counted(scope_id) == {"forgotten_done": 1}


def test_within_a_batch_nothing_follows_forgotten(scope_id: int) -> None:
    receipt = ingest_entries(
        scope_id, event("a-1", S.FORGOTTEN, 2), event("a-1", S.WAITING, 3), event("a-1", S.WAITING, 1)
    )
    assert outcome(receipt) == (1, 1, [(1, "forgotten")])
    assert counted(scope_id) == {"forgotten": 1}


def test_a_task_stays_in_the_group_that_named_it_first(scope_id: int) -> None:
    ingest_entries(scope_id, Event("k", S.WAITING, 1, "a", "a-1"))
    ingest_entries(scope_id, Event("k", S.MEMORY, 2, "b", "b-1"))
    assert list(TaskGroup.objects.values_list("prefix__name", "name", "memory")) == [("a", "a-1", 1)]
    assert list(TaskPrefix.objects.values_list("name", flat=True)) == ["a"]


def test_the_difference_of_counts_is_counted(scope_id: int) -> None:
    ingest_entries(scope_id, count("a", 1, waiting=100))
    ingest_entries(scope_id, count("a", 2, 10, 5.0, waiting=80, processing=10, memory=10))
    ingest_entries(scope_id, count("a", 3, 60, 20.0, waiting=40, memory=50, erred=10))
    assert counted(scope_id) == {"memory": 50, "erred": 10, "waiting": 40}
    group = TaskGroup.objects.get()
    assert (group.duration_n, group.duration_s, group.duration_ewma_s) == (60, 20.0, 0.4)


def test_shrinking_durations_are_ignored(scope_id: int) -> None:
    ingest_entries(scope_id, count("a", 1, 10, 5.0, memory=10))
    ingest_entries(scope_id, count("a", 2, 12, 1.0, memory=12))
    ingest_entries(scope_id, count("a", 3, 4, 9.0, memory=12))
    group = TaskGroup.objects.get()
    assert (group.duration_n, group.duration_s) == (12, 5.0)


def test_counts_of_several_reporters_add_up(scope_id: int) -> None:
    for reporter in ("r", "s"):
        ingest_entries(scope_id, count("a", 1, memory=2), reporter=reporter)
    ingest_entries(scope_id, count("a", 2, memory=1), reporter="s")
    assert counted(scope_id) == {"memory": 3}


def test_within_a_batch_the_newest_counts_of_a_group_count(scope_id: int) -> None:
    receipt = ingest_entries(scope_id, count("a", 3, memory=2), count("a", 1, waiting=2), count("a", 2, waiting=1))
    assert outcome(receipt) == (1, 2, [])
    assert counted(scope_id) == {"memory": 2}


def test_a_deleted_group_is_created_again_with_the_difference(scope_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GROUPS_KEPT", 0)
    ingest_entries(scope_id, count("a", 1, memory=5))
    ingest_entries(scope_id, count("a", 2, forgotten=5))
    assert not TaskGroup.objects.exists()
    assert outcome(ingest_entries(scope_id, count("a", 1, memory=5))) == (0, 1, [])
    ingest_entries(scope_id, count("a", 3, forgotten=5, waiting=2))
    assert counted(scope_id) == {"waiting": 2, "forgotten": 5}
    assert states_of(TaskGroup.objects.get()) == {"waiting": 2}


def test_fewer_forgotten_tasks_leave_no_group_with_a_negative_count(
    scope_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GROUPS_KEPT", 0)
    ingest_entries(scope_id, count("a", 1, memory=1, forgotten=10))
    ingest_entries(scope_id, count("a", 2, forgotten=11))
    ingest_entries(scope_id, count("a", 3, memory=5, forgotten=3))
    group = TaskGroup.objects.get()
    assert (states_of(group), group.total) == ({"memory": 5}, 5)
    assert counted(scope_id) == {"memory": 5, "forgotten": 3}
    assert list(differences()) == []


def test_the_end_of_a_reporter_releases_its_unfinished_tasks(scope_id: int) -> None:
    ingest_entries(
        scope_id, event("a-1", S.PROCESSING, 1), event("a-2", S.MEMORY, 1), count("b", 1, waiting=3, memory=1)
    )
    ingest_entries(scope_id, event("a-3", S.PROCESSING, 1), reporter="other")
    ingest_entries(scope_id, ended=2)
    assert counted(scope_id) == {"memory": 2, "released": 4, "processing": 1}


def test_late_reports_from_before_a_reporters_end_are_released(scope_id: int) -> None:
    ingest_entries(scope_id, ended=5)
    ingest_entries(scope_id, event("a-1", S.PROCESSING, 4), event("a-2", S.ERRED, 4), count("b", 4, queued=3, memory=1))
    assert counted(scope_id) == {"released": 4, "erred": 1, "memory": 1}


def test_reports_of_a_reporter_after_its_end_are_stored(scope_id: int) -> None:
    ingest_entries(scope_id, event("a-1", S.PROCESSING, 1), count("b", 1, queued=3), ended=5)
    ingest_entries(scope_id, event("a-1", S.PROCESSING, 6), count("b", 6, queued=1, memory=2))
    assert counted(scope_id) == {"processing": 1, "queued": 1, "memory": 2}


def test_a_late_earlier_end_of_a_reporter_does_not_replace_the_first(scope_id: int) -> None:
    ingest_entries(scope_id, ended=5)
    ingest_entries(scope_id, ended=3)
    ingest_entries(scope_id, event("a-1", S.PROCESSING, 4))
    assert counted(scope_id) == {"released": 1}


def test_processing_time_is_the_reported_one_or_measured(scope_id: int) -> None:
    ingest_entries(scope_id, event("a-1", S.PROCESSING, 1), event("a-2", S.PROCESSING, 1))
    ingest_entries(scope_id, event("a-1", S.PROCESSING, 2), now_ms=NOW + 1_000)
    ingest_entries(scope_id, event("a-1", S.MEMORY, 3), event("a-2", S.ERRED, 3, duration_s=0.5), now_ms=NOW + 2_500)
    ingest_entries(scope_id, event("a-3", S.MEMORY, 3), event("a-2", S.ERRED, 4, duration_s=9.0), now_ms=NOW + 9_000)
    scope = Scope.objects.get(pk=scope_id)
    assert (scope.duration_n, scope.duration_s) == (2, 3.0)


def test_failures_are_kept_until_their_task_is_done(scope_id: int) -> None:
    ingest_entries(
        scope_id, event("a-1-x", S.ERRED, 1, message="no luck"), event("a-1-y", S.ERRED, 1, message="nor here")
    )
    assert list(TaskFailure.objects.order_by("key").values_list("key", "group", "message", "prefix__name")) == [
        ("a-1-x", "a-1", "no luck", "a"),
        ("a-1-y", "a-1", "nor here", "a"),
    ]
    ingest_entries(scope_id, event("a-1-x", S.PROCESSING, 2))
    ingest_entries(scope_id, event("a-1-x", S.MEMORY, 3), event("a-1-y", S.ERRED, 3, message="worse"))
    assert list(TaskFailure.objects.values_list("key", "message")) == [("a-1-y", "worse")]


def test_failures_reported_beside_counts_are_kept_by_sequence(scope_id: int) -> None:
    assert outcome(ingest_entries(scope_id, Failure("x", "a", "a-1", 2, "second"))) == (1, 0, [])
    assert outcome(ingest_entries(scope_id, Failure("x", "a", "a-1", 1, "first"))) == (0, 1, [])
    assert outcome(ingest_entries(scope_id, Failure("x", "a", "a-1", 3, "3"), Failure("x", "a", "a-1", 4, "4"))) == (
        1,
        1,
        [],
    )
    assert TaskFailure.objects.get().message == "4"
    assert counted(scope_id) == {}


def test_of_two_messages_of_a_task_in_one_batch_the_newer_is_kept(scope_id: int) -> None:
    ingest_entries(scope_id, event("a-1", S.ERRED, 3, message="older"), Failure("a-1", "a", "a", 5, "newer"))
    assert TaskFailure.objects.get().message == "newer"


def test_only_the_newest_failures_of_a_prefix_are_kept(scope_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "FAILURES_KEPT", 3)
    ingest_entries(scope_id, *(event(f"a-{at}", S.ERRED, 1) for at in range(3)), event("b-0", S.ERRED, 1))
    ingest_entries(scope_id, *(event(f"a-{at}", S.ERRED, 1) for at in range(3, 5)), now_ms=NOW + 1)
    assert list(TaskFailure.objects.order_by("pk").values_list("key", flat=True)) == ["a-2", "b-0", "a-3", "a-4"]


def test_reports_after_the_end_of_the_attempt_are_refused(scope_id: int) -> None:
    Scope.objects.filter(pk=scope_id).update(ended_ms=NOW)
    with pytest.raises(Conflict):
        ingest_entries(scope_id, event("a-1", S.MEMORY, 1))
    assert not Task.objects.exists()
    assert not Reporter.objects.exists()


def test_there_are_only_so_many_reporters(scope_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "REPORTERS_MAX", 1)
    ingest_entries(scope_id, event("a-1", S.WAITING, 1))
    with pytest.raises(TooLarge), transaction.atomic():
        ingest_entries(scope_id, event("a-1", S.MEMORY, 2), reporter="other")
    assert outcome(ingest_entries(scope_id, event("a-1", S.MEMORY, 2))) == (1, 0, [])


@pytest.mark.parametrize(
    ("limit", "reason"),
    [("TASKS_MAX", "too_many_tasks"), ("GROUPS_MAX", "too_many_groups"), ("PREFIXES_MAX", "too_many_prefixes")],
)
def test_entries_over_the_limit_are_refused_and_the_rest_stored(
    scope_id: int, monkeypatch: pytest.MonkeyPatch, limit: str, reason: str
) -> None:
    monkeypatch.setattr(limits, limit, 2)
    monkeypatch.setattr(task_events, "TASKS_MAX", limits.TASKS_MAX)
    ingest_entries(scope_id, event("a-1", S.WAITING, 1), event("b-1", S.WAITING, 1))
    assert outcome(ingest_entries(scope_id, event("c-1", S.WAITING, 2), event("a-1", S.MEMORY, 2))) == (
        1,
        0,
        [(0, reason)],
    )
    assert counted(scope_id) == {"memory": 1, "waiting": 1}


@pytest.mark.parametrize("limit", ["GROUPS_MAX", "PREFIXES_MAX"])
def test_the_last_place_has_room_for_many_tasks(scope_id: int, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(limits, limit, 1)
    receipt = ingest_entries(
        scope_id, event("a-1", S.WAITING, 1), event("a-2", S.WAITING, 1), event("a-3", S.WAITING, 1)
    )
    assert outcome(receipt) == (3, 0, [])


@pytest.mark.parametrize(
    ("limit", "reason"),
    [("TASKS_MAX", "too_many_groups"), ("GROUPS_MAX", "too_many_groups"), ("PREFIXES_MAX", "too_many_prefixes")],
)
def test_counts_of_too_many_groups_are_refused_and_the_rest_stored(
    scope_id: int, monkeypatch: pytest.MonkeyPatch, limit: str, reason: str
) -> None:
    monkeypatch.setattr(limits, limit, 2)
    monkeypatch.setattr(group_counts, "TASKS_MAX", limits.TASKS_MAX)
    ingest_entries(scope_id, count("a", 1, waiting=1), count("b", 1, waiting=1))
    receipt = ingest_entries(scope_id, count("c", 2, waiting=9), count("a", 2, memory=1))
    assert outcome(receipt) == (1, 0, [(0, reason)])
    assert (receipt.rejected[0].list, receipt.rejected[0].key) == ("counts", "c")
    assert counted(scope_id) == {"memory": 1, "waiting": 1}
    assert Scope.objects.get(pk=scope_id).counted == ReporterCount.objects.count() == 2


def test_how_a_task_ended_is_kept_when_it_is_released_and_forgotten(scope_id: int) -> None:
    for seq, state in enumerate((S.MEMORY, S.RELEASED)):
        ingest_entries(scope_id, event("a-1", state, seq))
    for seq, state in enumerate((S.PROCESSING, S.ERRED, S.RELEASED, S.FORGOTTEN)):
        ingest_entries(scope_id, event("a-2", state, seq))
    ingest_entries(scope_id, event("a-3", S.PROCESSING, 1), event("a-3", S.FORGOTTEN, 2), event("a-4", S.RELEASED, 1))
    assert counted(scope_id) == {"released_done": 1, "forgotten_failed": 1, "forgotten": 1, "released": 1}
    group = TaskGroup.objects.get()
    assert states_of(group) == counted(scope_id)
    assert list(differences()) == []


def test_a_task_that_ran_again_before_it_was_released_was_not_done(scope_id: int) -> None:
    for seq, state in enumerate((S.MEMORY, S.RELEASED, S.WAITING, S.RELEASED)):
        ingest_entries(scope_id, event("a-1", state, seq))
    assert counted(scope_id) == {"released": 1}
    assert Task.objects.get().before == 2 << 2


def test_in_one_request_a_task_may_end_and_be_forgotten(scope_id: int) -> None:
    ingest_entries(scope_id, event("a-1", S.MEMORY, 5), event("a-1", S.FORGOTTEN, 5), event("a-2", S.ERRED, 5))
    ingest_entries(scope_id, event("a-2", S.RELEASED, 6))
    assert counted(scope_id) == {"forgotten_done": 1, "released_failed": 1}


@pytest.mark.parametrize("gone", [S.RELEASED, S.FORGOTTEN])
def test_a_late_outcome_of_a_forgotten_task_counts_too(scope_id: int, gone: TaskState) -> None:
    ingest_entries(scope_id, event("a-1", S.PROCESSING, 1), event("a-2", S.PROCESSING, 1))
    ingest_entries(scope_id, event("a-1", gone, 5))
    assert counted(scope_id) == {gone: 1, "processing": 1}
    assert outcome(ingest_entries(scope_id, event("a-1", S.ERRED, 3), event("a-1", S.MEMORY, 2))) == (0, 2, [])
    assert counted(scope_id) == {f"{gone}_failed": 1, "processing": 1}
    ingest_entries(scope_id, event("a-1", S.MEMORY, 4), reporter="another")
    assert counted(scope_id) == states_of(TaskGroup.objects.get()) == {f"{gone}_done": 1, "processing": 1}
    assert list(differences()) == []


def test_a_task_live_at_its_reporters_end_is_released_and_not_done(scope_id: int) -> None:
    ingest_entries(scope_id, event("a-1", S.MEMORY, 1), event("a-2", S.PROCESSING, 1))
    ingest_entries(scope_id, event("a-1", S.PROCESSING, 2), ended=3)
    assert counted(scope_id) == {"released": 2}


def test_counts_include_how_tasks_ended(scope_id: int) -> None:
    ingest_entries(scope_id, count("a-1", 1, memory=4, erred=1))
    ingest_entries(scope_id, count("a-1", 2, forgotten_done=4, forgotten_failed=1))
    assert counted(scope_id) == states_of(TaskGroup.objects.get()) == {"forgotten_done": 4, "forgotten_failed": 1}
    assert list(differences()) == []


def test_each_reporter_knows_how_many_of_its_tasks_are_unfinished(scope_id: int) -> None:
    def unfinished() -> dict[str, int]:
        assert list(differences()) == []
        return dict(Reporter.objects.values_list("name", "unfinished"))

    ingest_entries(scope_id, event("a-1", S.WAITING, 1), event("a-2", S.PROCESSING, 1), count("b", 1, waiting=3))
    assert unfinished() == {"r": 5}
    ingest_entries(scope_id, event("a-1", S.PROCESSING, 2), event("a-3", S.MEMORY, 2), reporter="s")
    assert unfinished() == {"r": 4, "s": 1}
    ingest_entries(scope_id, event("a-2", S.MEMORY, 2), count("b", 2, waiting=1, memory=2))
    assert unfinished() == {"r": 1, "s": 1}
    ingest_entries(scope_id, ended=9)
    ingest_entries(scope_id, reporter="s", ended=9)
    assert unfinished() == {"r": 0, "s": 0}
    Reporter.objects.filter(name="r").update(unfinished=7)
    (wrong,) = differences()
    assert str(wrong).startswith("unfinished tasks of reporter 'r'")


def test_the_latest_message_of_a_task_is_kept(scope_id: int) -> None:
    ingest_entries(scope_id, event("a-1", S.PROCESSING, 1, message="epoch 1"), event("a-2", S.PROCESSING, 1))
    ingest_entries(scope_id, event("a-1", S.PROCESSING, 3, message="epoch 3"), event("a-2", S.MEMORY, 2, message="ok"))
    ingest_entries(scope_id, event("a-1", S.PROCESSING, 2, message="epoch 2"))
    ingest_entries(scope_id, event("a-1", S.MEMORY, 4))
    ingest_entries(scope_id, event("a-2", S.ERRED, 4, message="broken"))
    assert dict(Task.objects.values_list("key", "message")) == {"a-1": "epoch 3", "a-2": "ok"}
    assert TaskFailure.objects.get().message == "broken"


def test_batches_stored_together_count_as_if_stored_one_by_one(scope_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "REPORTERS_MAX", 2)
    batches = [Batch(name, (event(f"a-{name}", S.WAITING, 1), event("a-1", S.WAITING, 1))) for name in "rst"]
    first, second, third = ingest.ingest_batches(scope_id, [*batches[:2], batches[2]], NOW)
    assert isinstance(first, Receipt)
    assert isinstance(second, Receipt)
    assert (first.applied, second.applied) == (2, 2)
    assert isinstance(third, TooLarge)
    assert counted(scope_id) == {"waiting": 3}
    assert list(differences()) == []


def test_a_full_scope_has_room_for_the_prefix_of_all_further_ones(
    scope_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PREFIXES_MAX", 1)
    receipt = ingest_entries(scope_id, count("a", 1, waiting=1), count(limits.OTHERS, 1, waiting=2), count("b", 1))
    assert outcome(receipt) == (2, 0, [(2, "too_many_prefixes")])
    assert counted(scope_id) == {"waiting": 3}
