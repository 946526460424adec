"""What changes many rows at once is killed at each of its statements: all of it is there afterwards, or nothing."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from django.db import connections
from django.db.models import F

from dstackweb.accounts.models import Project, User
from dstackweb.runs.models import Allocation, Job, Move, Queue, QueueCount, QueueEvent, Run, RunEvent
from dstackweb.runs.queue import ordering, queues, reorder
from dstackweb.runs.queue.move_preview import MoveTarget
from dstackweb.runs.recount import differences
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.models import PassRequest, PassState
from dstackweb.scheduler.passes.placement_pass import run_passes
from tests.factories import count_runs_anew, join, make_host, make_project, make_run, make_user
from tests.faults.killing import killed_at_each_statement

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def main() -> Project:
    return make_project("main")


@pytest.fixture
def boss(main: Project) -> User:
    return join(main, make_user("boss"), "manager")


def placed() -> dict[int, tuple[int, int]]:
    """Jobs and allocated GPUs of each run that has left its queue, and that it is as its spec says."""
    found = {}
    for run in Run.objects.exclude(status=RunStatus.SUBMITTED):
        assert run.status == RunStatus.PROVISIONING
        jobs = Job.objects.filter(run=run).count()
        gpus = Allocation.objects.filter(job__run=run, gpu__isnull=False).count()
        assert jobs == run.spec["nodes"]
        assert gpus == run.spec["nodes"] * run.spec["requirements"]["gpu_count_min"]
        assert run.events.filter(kind="provisioning").count() == 1
        found[run.pk] = jobs, gpus
    assert Job.objects.exclude(run__in=found).count() == 0
    return found


def take_back() -> None:
    """As if no pass had been: what was placed waits again."""
    for host in {allocation.host for allocation in Allocation.objects.select_related("host")}:
        type(host).objects.filter(pk=host.pk).update(cpus_used=0, memory_used_mib=0)
    Allocation.objects.all().delete()
    Job.objects.all().delete()
    RunEvent.objects.filter(kind="provisioning").delete()
    Queue.objects.get().queuehours.all().delete()
    count = Run.objects.filter(status=RunStatus.PROVISIONING).update(status=RunStatus.SUBMITTED)
    QueueCount.objects.update(submitted=F("submitted") + count, provisioning=F("provisioning") - count)
    PassState.objects.update(expires_at=None)
    PassRequest.take()
    count_runs_anew()


@pytest.mark.nightly
def test_a_pass_killed_within_a_batch_placed_whole_runs_and_the_next_continues(
    main: Project, boss: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PassState, "EXPIRES_S", 0.0)  # what a killed pass leaves is taken over at once
    for box in (1, 2):
        make_host(f"box-{box}", cpus=8, gpus=4)
    for gpus, nodes in [(1, 1), (2, 2), (1, 1), (4, 2), (0, 1), (1, 1)]:
        make_run(main, boss, role="manager", resources={"cpu": 1, "gpu": gpus}, nodes=nodes)
    run_passes()
    without_kill = placed()
    assert len(without_kill) == 5
    take_back()
    kills = 0
    for moment, number in killed_at_each_statement(run_passes):
        kills += 1
        moment_of_kill = f"killed {moment} statement {number}"
        assert list(differences()) == [], moment_of_kill
        assert placed().items() <= without_kill.items(), moment_of_kill
        run_passes()
        assert placed() == without_kill, moment_of_kill
        assert list(differences()) == [], moment_of_kill
        take_back()
    assert placed() == without_kill
    assert kills >= 40


def waiting(project: Project, user: User, count: int) -> Queue:
    """A queue of so many runs as if they had been submitted."""
    pattern = make_run(project, user, role="manager", resources={"gpu": 1})
    queue, now = pattern.queue, queues.now_us()
    Run.objects.bulk_create(
        (
            Run(
                project=project, queue=queue, user=user, name=f"train-{index}", shape=pattern.shape, spec=pattern.spec,
                priority=index % 101, seniority_us=now + index * ordering.MIN_GAP_US,
                rank=ordering.rank(now + index * ordering.MIN_GAP_US, index % 101, queue.step_us),
            )
            for index in range(count - 1)
        ),
        batch_size=2000,
    )  # fmt: skip
    QueueCount.objects.filter(queue=queue).update(submitted=count)
    Queue.objects.filter(pk=queue.pk).update(last_seniority_us=now + count * ordering.MIN_GAP_US)
    count_runs_anew()
    return queue


def assert_ranked_whole(queue: Queue) -> int | None:
    """Every rank is that of the queue's ageing step, and a change of it is written down; returns the minutes."""
    queue.refresh_from_db()
    rows = Run.objects.filter(queue=queue).values_list("rank", "seniority_us", "priority")
    wrong = [row for row in rows if row[0] != ordering.rank(row[1], row[2], queue.step_us)]
    assert wrong == []
    events = [event.data["ageing_minutes"] for event in QueueEvent.objects.filter(queue=queue).order_by("pk")]
    assert [event[1] for event in events][-1:] in ([], [queue.ageing_minutes])
    return queue.ageing_minutes


@pytest.mark.nightly
def test_a_worker_killed_during_reranking_of_a_queue_ranked_all_of_it_or_none(main: Project, boss: User) -> None:
    queue = waiting(main, boss, 10_000)

    def rank_anew() -> None:
        queues.change_queue(queue, boss, "manager", ageing_minutes=7)

    steps = [assert_ranked_whole(queue) for _ in killed_at_each_statement(rank_anew)]
    assert steps == sorted(steps, reverse=True)  # 30 as long as it is killed before it commits
    assert steps[0] == 30
    assert assert_ranked_whole(queue) == 7


@pytest.mark.nightly
def test_a_worker_killed_at_any_moment_of_ranking_ten_thousand_runs_leaves_no_rank_behind(
    main: Project, boss: User
) -> None:
    """In the midst of statements too, of which the database then has half."""
    queue = waiting(main, boss, 10_000)
    began = time.monotonic()
    queues.change_queue(queue, boss, "manager", ageing_minutes=1)
    takes_s, killed = time.monotonic() - began, 0
    for part in range(1, 11):
        connections.close_all()
        pid = os.fork()
        if pid == 0:
            queues.change_queue(queue, boss, "manager", ageing_minutes=1 + part)
            os._exit(0)
        time.sleep(takes_s * part / 10)
        os.kill(pid, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        assert_ranked_whole(queue)
    assert killed >= 5


def standing(queue: Queue) -> list[tuple[Any, ...]]:
    fields = ("pk", "rank", "seniority_us", "priority", "moved_by")
    return list(Run.objects.filter(queue=queue).order_by("rank", "pk").values_list(*fields))


@pytest.mark.parametrize(
    ("role", "name"), [("manager", "boss"), pytest.param("member", "ada", marks=pytest.mark.nightly)]
)
def test_a_web_worker_killed_in_a_move_has_moved_all_runs_and_can_undo_it_or_has_moved_none(
    main: Project, boss: User, role: str, name: str
) -> None:
    ada = join(main, make_user("ada"), "member")
    runs = [make_run(main, user, role="manager", priority=40 + index)
            for index, user in enumerate([ada, boss, ada, boss, ada, ada])]  # fmt: skip
    user, queue = (boss if name == "boss" else ada), runs[0].queue
    moved = [runs[0], runs[2]]
    before = standing(queue)

    def move() -> None:
        reorder.move(moved, user, role, MoveTarget("before", runs[5]))

    for moment, number in killed_at_each_statement(move):
        moment_of_kill = f"killed {moment} statement {number}"
        if Move.objects.exists():
            assert standing(queue) != before, moment_of_kill
            assert {event.kind for event in runs[0].events.all()} == {"submitted", "moved"}, moment_of_kill
            reorder.undo(Move.objects.get().pk, user)
            RunEvent.objects.filter(kind__in=("moved", "move_undone", "priority")).delete()
            Move.objects.all().delete()
        else:
            assert {event.kind for event in RunEvent.objects.all()} == {"submitted"}, moment_of_kill
        assert standing(queue) == before, moment_of_kill
    assert standing(queue) != before
    assert Move.objects.count() == 1
