"""When more tasks of a prefix fail than before: the decision alone, and through batches to events and notifications."""

from __future__ import annotations

import random

import pytest
from pytest_django import DjangoCaptureOnCommitCallbacks

from dstackweb.accounts.models import Project, User
from dstackweb.notifications.models import Delivery
from dstackweb.progress import counters, finalize
from dstackweb.progress.failing import ENDED_MIN, SPACING_MS, WINDOW_MS, Counts, Rise, Watch, advance
from dstackweb.progress.ingest import ingest_batch
from dstackweb.progress.models import Scope, TaskPrefix
from dstackweb.progress.reports import Batch, Count, Event
from dstackweb.progress.states import TaskState
from dstackweb.runs import task_failures
from dstackweb.runs.models import Run, RunEvent
from tests.factories import make_run

START_MS = 1_800_000_000_000
MINUTE_MS = 60_000


class Prefix:
    """A prefix whose tasks end, with the watch over it."""

    def __init__(self) -> None:
        self.watch, self.counts, self.now_ms = Watch(), Counts(0, 0), START_MS

    def end(self, done: int = 0, failed: int = 0, *, after_ms: int = 1000, is_recent: bool = True) -> Rise | None:
        self.now_ms += after_ms
        before, self.counts = self.counts, Counts(self.counts.ended + done + failed, self.counts.failed + failed)
        watch = Watch.parse(self.watch.text)
        self.watch, rise = advance(watch, before, self.counts, self.now_ms, is_recent=is_recent)
        return rise


def test_a_rise_by_twenty_points_within_five_minutes_is_told_once() -> None:
    prefix = Prefix()
    assert prefix.end(done=80) is None
    assert prefix.end(failed=19) is None, "19 of 99"
    assert prefix.end(failed=1) == Rise(0, 20, 20, 100)
    assert [prefix.end(failed=3) for _second in range(30)] == [None] * 30


def test_a_prefix_with_fewer_than_fifty_ended_tasks_is_not_judged() -> None:
    prefix = Prefix()
    assert prefix.end(failed=ENDED_MIN - 1) is None
    assert prefix.end(failed=1) == Rise(0, 100, 50, 50)


def test_what_rises_over_more_than_five_minutes_is_not_told() -> None:
    prefix = Prefix()
    prefix.end(done=10_000, is_recent=False)
    failed = [prefix.end(done=100, failed=failed, after_ms=MINUTE_MS) for failed in range(60)]
    assert failed == [None] * 60
    assert prefix.counts.failed / prefix.counts.ended < 0.25


def test_a_large_prefix_whose_newest_tasks_all_fail_is_told_at_once() -> None:
    """Of all its tasks, far fewer than 20 % have failed yet."""
    prefix = Prefix()
    prefix.end(done=100_000, is_recent=False)
    assert prefix.end(failed=49, after_ms=MINUTE_MS) is None
    assert prefix.end(failed=1) == Rise(0, 100, 50, 50)


def test_it_is_told_again_once_it_has_calmed() -> None:
    prefix = Prefix()
    prefix.end(done=50)
    assert prefix.end(failed=50) is not None
    assert [prefix.end(done=20, after_ms=MINUTE_MS) for _minute in range(10)] == [None] * 10
    assert prefix.end(failed=100) is not None


def test_a_share_that_stays_high_is_no_rise() -> None:
    prefix = Prefix()
    prefix.end(done=500, failed=500, is_recent=False)
    assert [prefix.end(done=10, failed=10, after_ms=20_000) for _twenty_s in range(60)] == [None] * 60


def test_a_change_of_unknown_time_is_no_rise_and_begins_anew() -> None:
    prefix = Prefix()
    prefix.end(done=1000)
    assert prefix.end(failed=1000, after_ms=WINDOW_MS * 10, is_recent=False) is None
    assert prefix.end(done=1, failed=1) is None


def test_an_hour_without_ended_tasks_changes_nothing() -> None:
    prefix = Prefix()
    prefix.end(done=100)
    assert prefix.end(failed=10, after_ms=60 * MINUTE_MS) is None
    assert prefix.end(failed=10, after_ms=60 * MINUTE_MS) is None
    assert prefix.end(failed=5, after_ms=60 * MINUTE_MS) is None, "20 %, over three hours"


def test_samples_are_few() -> None:
    prefix, numbers = Prefix(), random.Random(1)
    for _change in range(2000):
        prefix.end(done=numbers.randrange(3), failed=numbers.randrange(2), after_ms=numbers.randrange(5000))
        assert len(prefix.watch.samples) <= 2 * WINDOW_MS // SPACING_MS + 1


# -- through batches ----------------------------------------------------------------------------------------------


@pytest.fixture
def run(project: Project, member: User) -> Run:
    return make_run(project, member, "sweep")


def report(run: Run, now_ms: int, done: int = 0, failed: int = 0, name: str = "load", **count: int) -> None:
    """Single tasks that end now, or the counts of a scheduler."""
    scope_id = counters.ensure_scope(run.project_id, run.pk, run.attempt)
    states = [TaskState.MEMORY] * done + [TaskState.ERRED] * failed
    events = [Event(f"{name}-{now_ms}-{n}", state, now_ms * 1000, name, name) for n, state in enumerate(states)]
    totals = {TaskState(state): number for state, number in count.items()}
    counts = (Count(name, name, now_ms * 1000, totals),) if count else ()
    ingest_batch(scope_id, Batch("job-0", tuple(events), counts), now_ms)


def told(run: Run) -> list[dict[str, object]]:
    return [event.data for event in RunEvent.objects.filter(run=run, kind="tasks_fail")]


@pytest.mark.django_db
def test_failing_tasks_are_an_event_of_their_run_and_a_notification_to_its_owner(
    run: Run, member: User, django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks
) -> None:
    version = Run.objects.get(pk=run.pk).version
    report(run, START_MS, done=80)
    with django_capture_on_commit_callbacks(execute=True):
        report(run, START_MS + 1000, failed=20)
    assert told(run) == [{"prefix": "load", "was": 0, "now": 20, "failed": 20, "ended": 100}]
    delivery = Delivery.objects.get(event="tasks_fail")
    assert (delivery.channel.user, delivery.run_uid) == (member, run.uid)
    assert Run.objects.get(pk=run.pk).version > version, "so that open pages show it"
    report(run, START_MS + 2000, failed=20)
    assert len(told(run)) == 1


@pytest.mark.django_db
def test_counts_of_a_scheduler_that_was_not_heard_for_long_are_no_rise(run: Run) -> None:
    report(run, START_MS, memory=1000, erred=600)
    report(run, START_MS + 1000, memory=1000, erred=601)
    later_ms = START_MS + 2 * WINDOW_MS
    report(run, later_ms, memory=1000, erred=3000)
    assert told(run) == []
    report(run, later_ms + 1000, memory=1000, erred=3100)
    assert [data["was"] for data in told(run)] == [75]


@pytest.mark.django_db
def test_an_end_of_the_attempt_is_no_rise_and_the_timeline_has_few_of_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_failures, "ALERTS_MAX", 2)
    for number in range(4):
        report(run, START_MS + number, failed=50, name=f"load-{'abcd'[number]}")
    assert len(told(run)) == 2
    scope = Scope.objects.get(run_id=run.pk)
    finalize.end([(run.pk, run.attempt)], START_MS + MINUTE_MS)
    finalize.settle(scope.pk)
    assert len(told(run)) == 2
    assert {len(row.failing["samples"]) for row in TaskPrefix.objects.filter(scope=scope)} == {1}
