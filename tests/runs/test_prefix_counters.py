"""A project's runs as tasks: counted in the transactions that write their statuses."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from django.db import DatabaseError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.progress.models import Scope, TaskGroup, TaskPrefix
from dstackweb.progress.states import TaskState
from dstackweb.runs import attempts, history, recurrence, services
from dstackweb.runs.models import Run
from dstackweb.runs.recount import differences
from dstackweb.runs.states import Reason, RunStatus
from dstackweb.runs.transitions import move_run
from dstackweb.scheduler.passes import placement_pass
from tests.factories import make_host, make_project, make_run, make_user, place_all, placed_job, start

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def nothing_differs() -> Iterator[None]:
    yield
    assert list(differences()) == []


def shown(project: Project, prefix: str) -> dict[str, int]:
    """The states of a prefix that runs are in."""
    row = TaskPrefix.objects.get(scope__project=project, scope__run_id=0, name=prefix)
    counts = {state.value: getattr(row, state) for state in TaskState if getattr(row, state)}
    assert row.total == sum(counts.values())
    return counts


def test_submitted_runs_are_queued_in_the_prefix_of_their_names(project: Project, member: User) -> None:
    for name in ("train-1", "train-2", "eval-baseline-7"):
        make_run(project, member, name)
    assert shown(project, "train") == {"queued": 2}
    assert shown(project, "eval-baseline") == {"queued": 1}
    scope = Scope.objects.get(project=project, run_id=0)
    assert (scope.total, scope.prefixes, scope.groups) == (3, 2, 3)


def test_a_run_goes_through_running_to_done_with_its_duration(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member, "train-1")
    place_all()
    assert shown(project, "train") == {"processing": 1}
    job = start(placed_job(run))
    Run.objects.filter(pk=run.pk).update(started_at=timezone.now() - dt.timedelta(seconds=90))
    attempts.end_job(job.pk, Reason.DONE_BY_RUNNER, exit_code=0)
    assert shown(project, "train") == {"memory": 1}
    scope = Scope.objects.get(project=project, run_id=0)
    assert scope.duration_n == 1
    assert scope.duration_s == pytest.approx(90, abs=5)
    assert scope.finished_1m == pytest.approx(1, abs=0.1)


def test_a_run_that_is_retried_waits_again_and_counts_once(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member, "train-1", retry=True)
    place_all()
    attempts.end_job(start(placed_job(run)).pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=1)
    assert Run.objects.get(pk=run.pk).attempt == 2
    assert shown(project, "train") == {"waiting": 1}
    attempts.requeue_due(timezone.now() + dt.timedelta(days=1))
    assert shown(project, "train") == {"queued": 1}


def test_runs_that_fail_are_failed_and_runs_that_were_stopped_released(project: Project, member: User) -> None:
    make_host()
    failed, stopped, waiting = (make_run(project, member, f"train-{index}", priority=50 - index) for index in range(3))
    place_all()
    attempts.end_job(start(placed_job(failed)).pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=1)
    for run in (stopped, waiting):
        services.stop(run, member, "member", abort=True)
    attempts.end_job(placed_job(stopped).pk, Reason.ABORTED_BY_USER)
    assert shown(project, "train") == {"erred": 1, "released": 2}
    assert Scope.objects.get(project=project, run_id=0).duration_n == 1


def test_starting_and_stopping_are_running_and_write_no_counter(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member, "train-1")
    place_all()
    version = Scope.objects.get(project=project, run_id=0).version
    start(placed_job(run))
    services.stop(run, member, "member")
    assert Run.objects.get(pk=run.pk).status == RunStatus.TERMINATING
    assert Scope.objects.get(project=project, run_id=0).version == version


def test_moving_to_another_queue_changes_no_state_counter(project: Project, member: User) -> None:
    services.ensure_queue(project, "night")
    services.set_queue(make_run(project, member, "train-1"), member, "member", "night")
    assert shown(project, "train") == {"queued": 1}


def test_the_next_occurrence_waits_in_the_same_group(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member, "nightly", schedule={"cron": "0 3 * * *"})
    assert shown(project, "nightly") == {"waiting": 1}
    attempts.requeue_due(timezone.now() + dt.timedelta(days=2))
    place_all()
    attempts.end_job(start(placed_job(run)).pk, Reason.DONE_BY_RUNNER, exit_code=0)
    assert recurrence.create_occurrences(timezone.now()) == 1
    assert shown(project, "nightly") == {"memory": 1, "waiting": 1}
    assert TaskGroup.objects.get().name == "nightly"


def test_each_project_counts_its_own(project: Project, member: User) -> None:
    other = make_project()
    boss = make_user(is_superuser=True)
    make_host()
    make_run(project, member, "train-1")
    make_run(other, boss, "train-1", role="admin")
    place_all()
    assert shown(project, "train") == shown(other, "train") == {"processing": 1}


def test_a_move_that_fails_after_counting_counts_nothing(project: Project, member: User) -> None:
    run = make_run(project, member, "train-1")
    failing = patch.object(history, "count_placed", side_effect=DatabaseError)
    with failing, pytest.raises(DatabaseError), transaction.atomic():
        move_run(run, RunStatus.PROVISIONING, now=timezone.now())
    assert shown(project, "train") == {"queued": 1}


def test_fifty_placements_of_a_pass_shift_counters_in_as_many_statements_as_two(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_pass, "WRITE_EVERY_S", 60.0)
    make_host(cpus=64)
    numbers = []
    for count in (2, 50):
        for index in range(count):
            make_run(project, member, f"train-{count}-{index}", resources={"cpu": 1})
        with CaptureQueriesContext(connection) as asked:
            place_all()
        numbers.append(sum("progress_" in query["sql"] and "INSERT" not in query["sql"] for query in asked))
    assert shown(project, "train") == {"processing": 52}
    # One row after the other is one statement to SQLite's driver, and many to Django's log of it.
    assert numbers[1] <= numbers[0] + (0 if connection.vendor == "postgresql" else 50)


def first_locks(asked: CaptureQueriesContext) -> list[str]:
    """The rows that everybody takes in one order, each when it was taken first; of hosts only the first one."""
    locks = {
        "hosts": r'UPDATE "backends_host"()',
        "queue ": r"UPDATE runs_queuecount .*? WHERE queue_id = (\d+)",
        "progress": r"UPDATE progress_scope SET version()",
    }
    found: list[tuple[int, str]] = []
    sent = "; ".join(query["sql"] for query in asked)
    for name, pattern in locks.items():
        found += [(match.start(), name + match[1]) for match in re.finditer(pattern, sent)]
    return list(dict.fromkeys(name for _at, name in sorted(found)))


def test_stopping_runs_of_two_queues_locks_both_queues_counters_before_shared_ones(
    project: Project, member: User
) -> None:
    """Else whoever ends a run of the second queue would wait for ever for them, and they for it."""
    make_host()
    services.ensure_queue(project, "night")
    runs = [make_run(project, member, f"train-{queue}", queue=queue) for queue in ("default", "night")]
    lines = [f"queue {run.queue_id}" for run in runs]
    place_all()
    with CaptureQueriesContext(connection) as asked:
        services.stop_all(runs, member, "member")
    assert first_locks(asked) == ["hosts", *lines, "progress"]


def test_a_pass_locks_the_counters_of_waiting_queues_before_shared_ones(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_pass, "WRITE_EVERY_S", 60.0)  # in one transaction, also where it takes long
    make_host(cpus=1)
    services.ensure_queue(project, "night")
    runs = [make_run(project, member, f"train-{queue}", queue=queue) for queue in ("default", "night")]
    lines = [f"queue {run.queue_id}" for run in runs]
    with CaptureQueriesContext(connection) as asked:
        assert place_all() == 1
    assert first_locks(asked) == ["hosts", *lines, "progress"]


def test_a_run_that_ends_takes_what_all_share_once_and_last(project: Project, member: User) -> None:
    """All others who start or end a run of the queue, or submit one, wait for these rows until it has committed."""
    make_host()
    run = make_run(project, member, "train-1")
    place_all()
    job = start(placed_job(run))
    with CaptureQueriesContext(connection) as asked:
        attempts.end_job(job.pk, Reason.DONE_BY_RUNNER, exit_code=0)
    sent = "; ".join(query["sql"] for query in asked)
    tables = re.findall(r'(?:^|; )(?:UPDATE|INSERT INTO|DELETE FROM) "?(\w+)', sent)
    assert tables.count("runs_queuecount") == 1
    behind = tables[tables.index("runs_queuecount") + 1 :]
    *progress, learned, used = dict.fromkeys(behind)
    assert all(table.startswith("progress_") for table in progress)
    assert (learned, used) == ("runs_learnedduration", "runs_usageday")


def test_wrong_counters_are_named_with_stored_and_counted_values(project: Project, member: User) -> None:
    run = make_run(project, member, "train-1")
    Run.objects.filter(pk=run.pk).update(status=RunStatus.DONE)
    assert [str(found) for found in differences() if "runs called" in found.what] == [
        "memory among runs called 'train-1': kept 0, counted 1",
        "queued among runs called 'train-1': kept 1, counted 0",
    ]
    Run.objects.filter(pk=run.pk).update(status=RunStatus.SUBMITTED)
