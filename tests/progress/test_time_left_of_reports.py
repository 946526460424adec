"""The time left of a run as its reporters' batches change it: silence is no time of work, and a burst no speed."""

from __future__ import annotations

import pytest

from bench.replay.workloads import Counts, Report
from bench.time_left import START_MS, Replay
from dstackweb.accounts.models import Project
from dstackweb.progress import ingest, selectors
from dstackweb.progress.counters import ensure_scope
from dstackweb.progress.models import Scope, TaskPrefix
from dstackweb.progress.pace import Pace
from dstackweb.progress.reports import Batch, Count, Event
from dstackweb.progress.states import TaskState
from dstackweb.progress.time_left import Left

pytestmark = pytest.mark.django_db
RUN = 7
S = TaskState


@pytest.fixture
def scope_id(project: Project) -> int:
    return ensure_scope(project.pk, RUN, 1)


def report(scope_id: int, at_s: float, done: int, total: int = 10_000, *, running: int = 10, name: str = "r") -> None:
    """Counts of a prefix of tasks that take five seconds, by a reporter that promises a heartbeat each ten seconds."""
    states = {S.MEMORY: done, S.PROCESSING: running, S.QUEUED: total - done - running}
    counts = (Count("fit", name, round(at_s * 1000) + 1, states, done, 5.0 * done),)
    ingest.ingest_batch(scope_id, Batch(name, counts=counts, heartbeat_s=10), START_MS + round(at_s * 1000))


def states_of(counts: Counts) -> dict[TaskState, int]:
    queued = counts.total - counts.done - counts.processing
    return {S.MEMORY: counts.done, S.PROCESSING: counts.processing, S.QUEUED: queued}


def shown(at_s: float) -> Left:
    totals = selectors.of_run(RUN, START_MS + round(at_s * 1000))
    assert totals is not None
    assert totals.bar.left is not None
    return totals.bar.left


def test_steady_work_has_its_time_left_on_the_totals_and_the_prefix(scope_id: int) -> None:
    for second in range(60):
        report(scope_id, second, 2 * second)
    totals, [bar], _next = selectors.prefixes(scope_id, START_MS + 60_000)
    assert totals is not None
    for left in (totals.bar.left, bar.left):
        assert left is not None
        assert left.seconds == pytest.approx(4940, rel=0.05)
        assert left.low < 4940 < left.high
    assert shown(60) == totals.bar.left


@pytest.mark.parametrize("done_meanwhile", [0, 2000])
def test_a_silence_is_no_time_of_work_and_what_was_done_in_it_no_speed(scope_id: int, done_meanwhile: int) -> None:
    for second in range(60):
        report(scope_id, second, 2 * second)
    for second in range(10):
        report(scope_id, 3600 + second, 118 + done_meanwhile + 2 * second)
    assert shown(3610).seconds == pytest.approx((10_000 - 138 - done_meanwhile) / 2, rel=0.12)
    [prefix] = TaskPrefix.objects.all()
    assert Pace(*prefix.pace).seconds == 68
    assert Pace(*prefix.pace).rate == pytest.approx(2, rel=0.01)


def test_a_task_that_runs_through_several_reports_counts_as_running_all_the_time(scope_id: int) -> None:
    """One worker alternates between two prefixes, as a training does between epochs and evaluations."""
    for second in range(420):
        epoch, since_s = divmod(second, 14)
        is_training = since_s < 10
        prefixes = {
            "fit": Counts(60, int(is_training), epoch + (not is_training), 0, 0.0),
            "evaluate": Counts(60, int(not is_training), epoch, 0, 0.0),
        }
        counts = tuple(Count(name, "r", second + 1, states_of(each), 0, 0.0) for name, each in prefixes.items())
        ingest.ingest_batch(scope_id, Batch("r", counts=counts, heartbeat_s=10), START_MS + 1000 * second)
    # A pace's clock stands still while none of its tasks runs; a change happened between two reports.
    means = {prefix.name: Pace(*prefix.pace).mean_running for prefix in TaskPrefix.objects.all()}
    assert means == pytest.approx({"fit": 9.5 / 10, "evaluate": 3.5 / 4}, rel=0.01)


def test_what_a_new_reporter_had_done_before_is_no_speed(scope_id: int) -> None:
    for second in range(30):
        report(scope_id, second, 2 * second)
    report(scope_id, 29.5, 4000, 5000, name="late")
    for second in range(30, 60):
        report(scope_id, second, 2 * second)
    [prefix] = TaskPrefix.objects.all()
    assert Pace(*prefix.pace).rate == pytest.approx(2, rel=0.1)
    assert prefix.finished_1m < 130


def test_a_process_for_each_task_makes_progress(scope_id: int) -> None:
    """What it reports at once was timed, and short."""
    for number in range(60):
        now_ms = START_MS + 1000 * number
        event = Event(f"fit-{number}", S.MEMORY, 1, "fit", "fit", duration_s=0.8)
        ingest.ingest_batch(scope_id, Batch(f"r{number}", (event,), heartbeat_s=10), now_ms)
    [prefix] = TaskPrefix.objects.all()
    assert Pace(*prefix.pace).rate == pytest.approx(1, rel=0.1)


def test_the_first_report_after_a_restart_of_all_reporters_ends_a_silence(scope_id: int) -> None:
    report(scope_id, 0, 0)
    report(scope_id, 1, 2)
    report(scope_id, 5000, 0, 100, name="again")
    assert Scope.objects.get().quiet_ms == START_MS + 5_000_000


def test_reports_give_what_the_benchmark_replays(scope_id: int) -> None:
    """Two stages, the second behind the first."""
    replay = Replay()
    for second in range(40):
        read, fit = min(200, 10 * second), max(0, 3 * (second - 20))
        prefixes = {
            "read": Counts(200, 8 if read < 200 else 0, read, read, 0.8 * read),
            "fit": Counts(300, 8 if second >= 20 else 0, fit, fit, 2.5 * fit),
        }
        replay.add(Report(second, prefixes))
        counts = [
            Count(name, name, second + 1, states_of(each), each.duration_n, each.duration_s)
            for name, each in prefixes.items()
        ]
        ingest.ingest_batch(scope_id, Batch("r", counts=tuple(counts), heartbeat_s=10), START_MS + 1000 * second)
    stored = Scope.objects.get()
    assert stored.pace == pytest.approx(list(Pace.of(replay.scope.pace)), rel=1e-4)
    assert str(stored.time_left).replace(" ", "") == replay.scope.time_left.replace(" ", "")
