"""Removing ended runs: nothing else changes, and everything that counts them stays right."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pytest
from django.db import connection
from django.db.models import Q
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.gpus.models import GpuSample, GpuSeries
from dstackweb.lib.errors import Conflict, Forbidden, NotFound
from dstackweb.lib.times import to_ms
from dstackweb.progress import finalize
from dstackweb.progress.counters import ensure_scope
from dstackweb.progress.models import Scope, TaskPrefix
from dstackweb.runs import attempts, logs, removal, services, usage
from dstackweb.runs.models import Job, QueueCount, QueueHour, RemovedRun, Run, RunEvent
from dstackweb.runs.recount import differences
from dstackweb.runs.states import RunStatus
from tests.factories import join, make_host, make_run, make_user, place_all, placed_job, start

pytestmark = pytest.mark.django_db


def done_run(project: Project, user: User, name: str = "train-a", **keys: object) -> Run:
    """A run that was placed, ran and is done; it needs a host."""
    run = make_run(project, user, name, resources={"cpu": 1, "memory": "1GB"}, **keys)
    place_all()
    job = start(placed_job(run))
    logs.append_log(job.pk, 0, b"hello\n")
    attempts.end_job(job.pk, "done_by_runner", exit_code=0, log_size=6)
    run.refresh_from_db()
    assert run.status == RunStatus.DONE
    return run


def test_all_counters_equal_a_recount_after_a_run_was_removed(project: Project, member: User) -> None:
    make_host()
    gone, stays = done_run(project, member), done_run(project, member, "eval-b")
    before = QueueHour.objects.get(placed__gt=0).placed

    assert removal.remove([gone.pk], Q()) == 1

    assert list(differences()) == []
    assert QueueCount.objects.get().done == 1
    assert QueueHour.objects.get(placed__gt=0).placed == before
    assert list(Run.objects.all()) == [stays]
    assert not RunEvent.objects.exclude(run=stays).exists()
    assert list(TaskPrefix.objects.values_list("name", flat=True)) == ["eval-b"]


def test_a_run_of_the_same_name_keeps_its_group(project: Project, member: User) -> None:
    make_host()
    gone, _stays = done_run(project, member), done_run(project, member)
    removal.remove([gone.pk], Q())
    assert list(differences()) == []
    assert Scope.objects.get(run_id=0).memory == 1


def test_many_ended_runs_are_removed_together(project: Project, member: User) -> None:
    make_host()
    runs = [done_run(project, member, f"r-{number}") for number in range(3)]
    cancelled = make_run(project, member)
    services.stop(cancelled, member, "member")
    waiting = make_run(project, member)
    assert removal.remove([run.pk for run in [*runs, cancelled, waiting]], Q()) == 4
    assert list(Run.objects.all()) == [waiting]
    assert list(differences()) == []


def test_a_run_that_has_not_ended_is_not_deleted(project: Project, member: User) -> None:
    run = make_run(project, member)
    with pytest.raises(Conflict, match="only ended runs can be deleted"):
        removal.delete(run, member, "member")
    assert Run.objects.exists()


def test_only_the_owner_or_a_manager_deletes(project: Project, member: User) -> None:
    make_host()
    run = done_run(project, member)
    other, boss = join(project, make_user("other")), join(project, make_user("boss"), "manager")
    with pytest.raises(Forbidden):
        removal.delete(run, other, "member")
    removal.delete(run, boss, "manager")
    with pytest.raises(NotFound):
        removal.delete(run, boss, "manager")


@pytest.mark.django_db(transaction=True)
def test_the_log_is_deleted_with_the_run(project: Project, member: User) -> None:
    make_host()
    run = done_run(project, member)
    job = placed_job(run)
    assert logs.log_size(job.pk)
    removal.remove([run.pk], Q())
    assert not logs.log_size(job.pk)
    assert not RemovedRun.objects.get(uid=run.uid).has_logs


def test_a_log_left_by_an_interrupted_removal_is_deleted_later(project: Project, member: User) -> None:
    make_host()
    run = done_run(project, member)
    job = placed_job(run)
    removal.remove([run.pk], Q())  # the test's transaction never commits
    assert logs.log_size(job.pk)
    assert removal.remove_logs() == 1
    assert not logs.log_size(job.pk)
    assert removal.remove_logs() == 0


def test_samples_of_a_gpu_stay_in_its_own_history(project: Project, member: User) -> None:
    host = make_host(gpus=1)
    gpu = host.gpus.get()
    runs = [done_run(project, member) for _ in range(2)]
    GpuSeries.objects.create(gpu=gpu, uuid=gpu.uuid)
    for run in runs:
        series = GpuSeries.objects.create(job=placed_job(run), gpu=gpu, uuid=gpu.uuid)
        GpuSample.objects.create(series=series, at_ms=1)
    removal.remove([run.pk for run in runs], Q())
    assert GpuSample.objects.filter(series__uuid=gpu.uuid).count() == 2


def test_the_cost_of_a_removed_run_still_counts_as_spent(project: Project, member: User) -> None:
    make_host()
    run = done_run(project, member)
    now = timezone.now()
    begun = max(now - dt.timedelta(hours=2), usage.month_of(now))
    Job.objects.filter(run=run).update(price=Decimal("3"), placed_at=begun, ended_at=now)
    before = usage.spent_this_month(project.pk, now)
    assert before > 0
    removal.remove([run.pk], Q(), now)
    assert usage.spent_this_month(project.pk, now) == pytest.approx(before, abs=Decimal("0.00001"))


def test_the_tasks_of_a_removed_run_are_pruned(project: Project, member: User) -> None:
    make_host()
    run = done_run(project, member)
    scope = ensure_scope(project.pk, run.pk, 1)
    removal.remove([run.pk], Q())
    assert finalize.settle(scope)
    assert finalize.prune(to_ms(timezone.now()))
    assert not Scope.objects.filter(run_id=run.pk).exists()


def test_a_removal_takes_few_statements(project: Project, member: User) -> None:
    make_host()
    few = [done_run(project, member, f"a-{number}").pk for number in range(2)]
    many = [done_run(project, member, f"b-{number}").pk for number in range(8)]
    counts = []
    for ids in (few, many):
        with CountedQueries() as counted:
            removal.remove(ids, Q())
        counts.append(counted.number)
    assert counts[1] - counts[0] <= len(many) - len(few)  # a scope each


class CountedQueries:
    number = 0

    def __enter__(self) -> CountedQueries:
        self.wrapper = connection.execute_wrapper(self)
        self.wrapper.__enter__()
        return self

    def __call__(self, execute: object, sql: str, params: object, many: bool, context: object) -> object:
        self.number += 1
        return execute(sql, params, many, context)  # type: ignore[operator]

    def __exit__(self, *error: object) -> None:
        self.wrapper.__exit__(None, None, None)
