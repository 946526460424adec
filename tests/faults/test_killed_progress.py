"""Who ends an attempt, or settles its tasks, is killed at each of its statements: the next one comes to the same."""

from __future__ import annotations

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.progress import counters, finalize
from dstackweb.progress.models import Scope, Task
from dstackweb.runs import attempts
from dstackweb.runs.models import Run
from dstackweb.runs.recount import differences
from dstackweb.runs.states import Reason, RunStatus
from dstackweb.scheduler import watch
from tests.factories import join, make_host, make_project, make_run, make_user, place_all, placed_job, start
from tests.faults.killing import killed_at_each_statement
from tests.progress.test_finalize import everything, filled, released

pytestmark = [pytest.mark.nightly, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def main() -> Project:
    return make_project("main")


@pytest.fixture
def ada(main: Project) -> User:
    return join(main, make_user("ada"))


def test_settling_that_is_killed_anywhere_is_finished_by_the_next(
    main: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finalize, "ROWS_AT_ONCE", 4)
    scope_id = filled(counters.ensure_scope(main.pk, 7, 1))
    wanted = {key: released(counts) for key, counts in everything().items()}
    finalize.end([(7, 1)], 0)
    kills = 0
    for moment, number in killed_at_each_statement(lambda: finalize.settle(scope_id), every=2):
        kills += 1
        moment_of_kill = f"killed {moment} statement {number}"
        assert list(differences()) == [], moment_of_kill
        assert {key: released(counts) for key, counts in everything().items()} == wanted, moment_of_kill
    assert kills > 5
    assert Scope.objects.get().settled
    assert everything() == wanted


def test_pruning_that_is_killed_anywhere_is_finished_by_the_next(
    main: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finalize, "ROWS_AT_ONCE", 4)
    scope_id = filled(counters.ensure_scope(main.pk, 7, 1))
    finalize.end([(7, 1)], 0)
    finalize.settle(scope_id)
    for _ in killed_at_each_statement(lambda: finalize.prune(finalize.TASKS_KEPT_MS + 1)):
        assert list(differences()) == []
    assert not Task.objects.exists()
    for _ in killed_at_each_statement(lambda: finalize.prune(finalize.COUNTERS_KEPT_MS + 1)):
        pass
    assert not Scope.objects.exists()


def test_a_run_whose_end_is_killed_anywhere_has_ended_with_its_tasks_or_not_at_all(main: Project, ada: User) -> None:
    make_host()
    run = make_run(main, ada, "train-1")
    place_all()
    job = start(placed_job(run))
    scope_id = filled(counters.ensure_scope(main.pk, run.pk, 1))
    seen = set()
    for moment, number in killed_at_each_statement(
        lambda: attempts.end_job(job.pk, Reason.DONE_BY_RUNNER, exit_code=0), every=2
    ):
        over = Run.objects.get(pk=run.pk).status == RunStatus.DONE
        seen.add(over)
        moment_of_kill = f"killed {moment} statement {number}"
        assert (Scope.objects.get(pk=scope_id).ended_ms is not None) == over, moment_of_kill
        assert Scope.objects.get(run_id=0).memory == over, moment_of_kill
        assert list(differences()) == [], moment_of_kill
    assert False in seen
    watch.settle_tasks(timezone.now())
    assert Scope.objects.get(pk=scope_id).settled
