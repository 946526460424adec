"""Sweeps in the database: submitted as one, created a few at a time, changed as one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Membership, Project, User
from dstackweb.lib.errors import Conflict, Forbidden, Invalid
from dstackweb.runs import attempts, launch, removal, services
from dstackweb.runs.models import Queue, Run, RunEvent, Sweep
from dstackweb.runs.queue.queues import change_queue
from dstackweb.runs.recount import differences
from dstackweb.runs.services import Submission
from dstackweb.runs.states import ACTIVE, Reason, RunStatus
from dstackweb.runs.sweeps import creation, selectors, services as sweeps
from dstackweb.runs.sweeps.creation import WAITING_AT_ONCE
from dstackweb.runs.sweeps.selectors import SweepCounts
from tests.factories import join, make_host, make_run, make_user, place_all, placed_job, start

pytestmark = pytest.mark.django_db


def make_sweep(project: Project, user: User, array: Any = 3, name: str | None = "lr", **keys: Any) -> Sweep:
    config = {"type": "task", "commands": ["true"], "array": array, **keys} | ({"name": name} if name else {})
    found, _made = sweeps.submit(project, user, "member", Submission(config))
    assert isinstance(found, Sweep)
    return found


def names(sweep: Sweep, *statuses: RunStatus) -> list[str]:
    runs = Run.objects.filter(sweep=sweep, status__in=statuses or ACTIVE)
    return list(runs.order_by("sweep_index").values_list("name", flat=True))


def end(run_name: str, code: int = 0) -> None:
    """Let a placed run end, well or badly."""
    job = start(placed_job(Run.objects.get(name=run_name, status__in=ACTIVE)))
    reason = Reason.CONTAINER_EXITED_WITH_ERROR if code else Reason.DONE_BY_RUNNER
    attempts.end_job(job.pk, reason, exit_code=code)


def settle() -> int:
    return creation.settle(timezone.now())


def fresh(sweep: Sweep) -> Sweep:
    return selectors.find_sweep(sweep.project, str(sweep.uid))


def test_a_sweep_of_ten_thousand_makes_a_hundred_runs_with_its_seniority(project: Project, member: User) -> None:
    sweep = make_sweep(project, member, 10_000)
    runs = Run.objects.filter(sweep=sweep).order_by("sweep_index")
    assert [run.name for run in runs] == [f"lr-{index}" for index in range(WAITING_AT_ONCE)]
    assert {(run.seniority_us, run.rank) for run in runs} == {(sweep.seniority_us, runs[0].rank)}
    assert SweepCounts.of(sweep).left == 9900
    later = make_run(project, member, "later")
    make_host(cpus=1)
    place_all()
    assert Run.objects.get(sweep=sweep, sweep_index=WAITING_AT_ONCE).rank < Run.objects.get(pk=later.pk).rank
    assert list(differences()) == []


def test_its_runs_follow_as_others_are_placed_and_each_gets_its_parameters(project: Project, member: User) -> None:
    make_host(cpus=250, memory_gib=1000)
    sweep = make_sweep(project, member, {"matrix": {"LR": [0.1, 0.01], "SEED": list(range(150))}}, env={"LR": "9"})
    while place_all():
        assert len(names(sweep, RunStatus.SUBMITTED)) <= WAITING_AT_ONCE
    assert len(names(sweep, RunStatus.PROVISIONING)) == 250
    assert len(names(sweep, RunStatus.SUBMITTED)) == 50
    run = Run.objects.get(name="lr-151")
    assert run.spec["env"] == {"LR": "0.01", "SEED": "1"}
    env = launch.runner_spec(placed_job(run))["env"]
    assert env == {"LR": "0.01", "SEED": "1", "DSTACK_SWEEP": "lr", "DSTACK_SWEEP_INDEX": "151"}
    assert list(differences()) == []


def test_a_run_of_a_sweep_can_be_submitted_again_alone(project: Project, member: User) -> None:
    text = "type: task\nname: lr\ncommands: [x]\nenv: [A=1, TOKEN, LR=9]\narray: {list: [{LR: 0.5}]}\n"
    found, _made = sweeps.submit(project, member, "member", Submission(text, env={"TOKEN": "secret-1"}))
    run = Run.objects.get(name="lr-0")
    env = launch._secrets(
        run, services.prepare(project, member, "member", Submission(text, env={"TOKEN": "x"})).effective.spec
    )
    assert env[1] == {"TOKEN": "secret-1"}
    services.stop(run, member, "member")
    again, _made = services.submit(project, member, "member", Submission(run.config_text, env={"TOKEN": "secret-2"}))
    assert (again.name, again.sweep_id) == ("lr-0", None)
    assert again.spec["env"] == run.spec["env"] == {"A": "1", "LR": "0.5"}
    assert found.name == "lr"


def test_at_most_so_many_are_active_at_once_and_it_ends_with_its_last_run(project: Project, member: User) -> None:
    make_host()
    sweep = make_sweep(project, member, {"count": 5, "max_parallel": 2})
    place_all()
    assert names(sweep) == ["lr-0", "lr-1"]
    end("lr-1", code=1)
    place_all()
    assert names(sweep) == ["lr-0", "lr-2"]
    for name in ("lr-0", "lr-2"):
        end(name)
        place_all()
    end("lr-3")
    end("lr-4")
    assert fresh(sweep).ended_at is None
    settle()
    assert fresh(sweep).ended_at is not None
    assert SweepCounts.of(fresh(sweep)) == SweepCounts(0, 0, 4, 1, 0, 0, 0, 0)
    assert make_sweep(project, member, 2).pk != sweep.pk, "its name is free again"
    assert list(differences()) == []


def test_stopping_a_sweep_stops_its_runs_and_creates_no_more(project: Project, member: User) -> None:
    make_host(cpus=1)
    sweep = make_sweep(project, member, 300)
    place_all()
    start(placed_job(Run.objects.get(name="lr-0")))
    stopped = sweeps.stop(sweep, member, "member")
    assert names(sweep, RunStatus.TERMINATING) == ["lr-0"]
    assert names(sweep, RunStatus.SUBMITTED) == []
    assert (stopped.stopped_by, stopped.is_stopping) == (member, False)
    attempts.end_job(placed_job(Run.objects.get(name="lr-0")).pk, Reason.TERMINATED_BY_USER, exit_code=143)
    settle()
    counts = SweepCounts.of(fresh(sweep))
    assert (counts.terminated, counts.dropped, counts.left) == (101, 199, 0)
    with pytest.raises(Conflict, match="has already ended"):
        sweeps.stop(sweep, member, "member")
    assert list(differences()) == []


def test_a_stop_that_was_interrupted_is_finished_by_the_next_check(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = make_sweep(project, member, {"count": 40, "max_parallel": 30})

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(services, "stop_runs", die)
        with pytest.raises(KeyboardInterrupt):
            sweeps.stop(sweep, member, "member")
    assert len(names(sweep)) == 30
    settle()
    assert names(sweep) == []
    assert (fresh(sweep).is_stopping, fresh(sweep).ended_at is not None) == (False, True)
    assert set(Run.objects.values_list("termination_reason", flat=True)) == {Reason.STOPPED_BY_USER}


def test_a_new_priority_moves_waiting_runs_and_holds_for_those_to_come(project: Project, member: User) -> None:
    make_host(cpus=1)
    sweep = make_sweep(project, member, {"count": 5, "max_parallel": 2})
    services.ensure_queue(project, "night")
    services.set_queue(Run.objects.get(name="lr-1"), member, "member", "night")
    sweeps.set_priority(sweep, member, "member", 70)
    assert set(Run.objects.filter(sweep=sweep).values_list("priority", flat=True)) == {70}
    run = Run.objects.select_related("queue").get(name="lr-0")
    assert run.rank == run.seniority_us - 70 * run.queue.step_us
    assert RunEvent.objects.filter(kind="priority").count() == 2
    services.stop(run, member, "member")
    settle()
    assert Run.objects.get(name="lr-2").priority == 70
    with pytest.raises(Invalid, match="up to 80"):
        sweeps.set_priority(sweep, member, "member", 90)


def test_failed_runs_are_retried_in_place_and_those_that_people_stopped_are_not(project: Project, member: User) -> None:
    make_host()
    sweep = make_sweep(project, member, {"list": [{"LR": 1}, {"LR": 2}, {"LR": 3}]})
    place_all()
    services.stop(Run.objects.get(name="lr-2"), member, "member")
    end("lr-0", code=3)
    end("lr-1")
    settle()
    assert fresh(sweep).ended_at is not None
    before = Run.objects.get(name="lr-0")
    sweeps.retry(sweep, member, "member")
    assert names(sweep) == ["lr-0"]
    again = Run.objects.get(sweep=sweep, sweep_index=0)
    assert (again.spec["env"], again.seniority_us) == ({"LR": "1"}, sweep.seniority_us)
    before.refresh_from_db()
    assert (before.sweep_id, before.events.last().data) == (None, {"next": str(again.uid)})
    assert SweepCounts.of(fresh(sweep)) == SweepCounts(1, 0, 1, 0, 1, 0, 0, 0)
    place_all()
    end("lr-0")
    settle()
    assert (fresh(sweep).retry_before, fresh(sweep).ended_at is not None) == (None, True)
    with pytest.raises(Conflict, match="no run of sweep lr has failed"):
        sweeps.retry(sweep, member, "member")
    assert list(differences()) == []


@pytest.mark.slow
def test_very_many_failed_runs_are_retried_a_few_at_a_time(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host(cpus=40)
    sweep = make_sweep(project, member, {"count": 10, "max_parallel": 10})
    place_all()
    for index in range(10):
        end(f"lr-{index}", code=1)
    Sweep.objects.filter(pk=sweep.pk).update(max_parallel=4)
    sweeps.retry(sweep, member, "member")
    assert names(sweep) == ["lr-0", "lr-1", "lr-2", "lr-3"]
    place_all()
    end("lr-1", code=1)
    place_all()
    assert names(sweep) == ["lr-0", "lr-2", "lr-3", "lr-4"], "one that failed again is not retried for ever"
    assert list(differences()) == []


def test_only_its_owner_and_managers_change_a_sweep(project: Project, member: User) -> None:
    sweep, other = make_sweep(project, member), join(project, make_user("eve"))
    for change in (
        lambda: sweeps.stop(sweep, other, "member"),
        lambda: sweeps.set_priority(sweep, other, "member", 60),
        lambda: sweeps.retry(sweep, other, "member"),
    ):
        with pytest.raises(Forbidden, match="sweep lr belongs to"):
            change()
    assert sweeps.stop(sweep, other, "manager").stopped_by == other


def test_a_name_that_is_taken_holds_up_the_runs_behind_it_until_it_is_free(project: Project, member: User) -> None:
    taken = make_run(project, member, "lr-2")
    sweep = make_sweep(project, member, 5)
    assert (names(sweep), sweep.waits_for_name) == (["lr-0", "lr-1"], "lr-2")
    services.stop(taken, member, "member")
    settle()
    assert (names(sweep), fresh(sweep).waits_for_name) == ([f"lr-{n}" for n in range(5)], "")


def test_a_sweep_ends_when_its_owner_may_submit_no_more(project: Project, member: User) -> None:
    sweep = make_sweep(project, member, {"count": 5, "max_parallel": 1})
    Membership.objects.filter(project=project, user=member).delete()
    services.stop(Run.objects.get(name="lr-0"), member, "manager")
    settle()
    assert (fresh(sweep).stopped_by, fresh(sweep).ended_at is not None) == (None, True)
    assert SweepCounts.of(fresh(sweep)).dropped == 4


def test_the_same_key_submits_once_and_another_file_with_it_is_refused(project: Project, member: User) -> None:
    config = {"type": "task", "commands": ["true"], "array": 3}
    first, made = sweeps.submit(project, member, "member", Submission(config), "key-1")
    second, again = sweeps.submit(project, member, "member", Submission(config), "key-1")
    assert (first.pk, made, again) == (second.pk, True, False)
    with pytest.raises(Conflict, match="another submission"):
        sweeps.submit(project, member, "member", Submission(config | {"array": 4}), "key-1")
    assert Run.objects.count() == 3


def test_names_of_active_sweeps_and_runs_are_refused(project: Project, member: User) -> None:
    make_sweep(project, member)
    with pytest.raises(Conflict, match="a sweep named 'lr' has not ended"):
        make_sweep(project, member)
    make_run(project, member, "solo")
    with pytest.raises(Conflict, match="a run named 'solo' is already"):
        make_sweep(project, member, name="solo")
    assert Sweep.objects.count() == 1


def test_an_active_sweep_keeps_its_name_from_runs_until_it_has_ended(project: Project, member: User) -> None:
    make_host()
    sweep = make_sweep(project, member, 1)
    with pytest.raises(Conflict, match="a sweep named 'lr' has not ended"):
        make_run(project, member, "lr")
    place_all()
    end("lr-0", code=1)
    settle()
    make_run(project, member, "lr")
    with pytest.raises(Conflict, match="a run named 'lr' is active"):
        sweeps.retry(fresh(sweep), member, "member")
    assert fresh(sweep).ended_at


def test_a_run_of_a_sweep_waits_for_a_name_that_another_sweep_has(project: Project, member: User) -> None:
    other = make_sweep(project, member, 1, name="lr-1")
    sweep = make_sweep(project, member, 3)
    assert (names(sweep), sweep.waits_for_name) == (["lr-0"], "lr-1")
    sweeps.stop(other, member, "member")
    settle()
    assert names(sweep) == ["lr-0", "lr-1", "lr-2"]


@pytest.mark.parametrize(
    ("keys", "msg"),
    [
        ({"schedule": {"cron": "0 2 * * *"}}, "can't have a `schedule`"),
        ({"env": ["LR"], "array": {"matrix": {"LR": [1]}}}, "remove the bare LR"),
        ({"name": "x" * 57, "array": 1000}, "more than 60 characters"),
        ({"queue": "other"}, "no queue 'other'"),
        ({"env": {"A": "x" * 20_000}, "array": 100_000}, "put what is large into the code"),
    ],
)
def test_a_sweep_that_could_not_work_is_refused(project: Project, member: User, keys: Any, msg: str) -> None:
    config = {"type": "task", "commands": ["true"], "array": 3, **keys}
    with pytest.raises(Invalid, match=msg):
        sweeps.submit(project, member, "member", Submission(config, env={"LR": "1"}))
    assert not Sweep.objects.exists()


def test_a_paused_queue_keeps_a_full_window_and_a_draining_one_takes_no_sweep(project: Project, member: User) -> None:
    sweep = make_sweep(project, member, 300)
    queue = Queue.objects.get()
    change_queue(queue, member, "manager", draining=True)
    for name in ("lr-0", "lr-1"):
        services.stop(Run.objects.get(name=name), member, "member")
    settle()
    assert len(names(sweep)) == WAITING_AT_ONCE, "what was submitted before goes on"
    with pytest.raises(Conflict, match="draining"):
        make_sweep(project, member, name="more")


def test_fair_share_counts_each_run_of_a_sweep_as_it_enters_the_queue(project: Project, member: User) -> None:
    Queue.objects.update(fair_share_minutes=60)
    sweep = make_sweep(project, member, {"count": 300, "max_parallel": 20}, resources={"gpu": 1})
    penalties = list(Run.objects.filter(sweep=sweep).order_by("sweep_index").values_list("penalty_s", flat=True))
    assert penalties == sorted(penalties)
    assert 0 == penalties[0] < penalties[-1] < 3600


def test_the_table_has_a_row_for_each_index_and_the_counts_add_up(project: Project, member: User) -> None:
    make_host()
    sweep = make_sweep(project, member, {"matrix": {"LR": [1, 2], "SEED": [7, 8]}, "max_parallel": 2})
    place_all()
    end("lr-0", code=1)
    rows = selectors.table(fresh(sweep), 1, 10)
    assert [(row.index, row.name, json.dumps(row.parameters)) for row in rows] == [
        (1, "lr-1", '{"LR": "1", "SEED": "8"}'),
        (2, "lr-2", '{"LR": "2", "SEED": "7"}'),
        (3, "lr-3", '{"LR": "2", "SEED": "8"}'),
    ]
    assert [row.status for row in rows] == ["provisioning", "to_come", "to_come"]
    [failed] = selectors.table_of_status(sweep, [RunStatus.FAILED], 0, 10)
    assert (failed.index, failed.status, failed.duration_s is not None) == (0, "failed", True)
    removal.delete(Run.objects.get(name="lr-0"), member, "member")
    counts = SweepCounts.of(fresh(sweep))
    assert (counts.running, counts.left, counts.removed) == (1, 2, 1)
    assert selectors.table(fresh(sweep), 0, 1)[0].status == "removed"
    assert list(differences()) == []


def test_a_sweep_goes_with_its_last_run(project: Project, member: User) -> None:
    sweep = make_sweep(project, member, 2)
    sweeps.stop(sweep, member, "member")
    for run in Run.objects.all():
        assert Sweep.objects.exists()
        removal.delete(run, member, "member")
    assert not Sweep.objects.exists()
    assert list(differences()) == []


def test_a_full_sweep_costs_a_check_one_statement(
    project: Project, member: User, django_assert_num_queries: Any
) -> None:
    make_sweep(project, member, 300)
    with django_assert_num_queries(1):
        assert settle() == 0


def test_the_uids_of_runs_to_come_are_those_that_they_get(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creation, "WAITING_AT_ONCE", 1)
    sweep = make_sweep(project, member, 3)
    to_come = list(creation.uids_to_come())
    assert len(to_come) == 2
    monkeypatch.setattr(creation, "WAITING_AT_ONCE", 3)
    creation.settle(timezone.now())
    assert (
        list(Run.objects.filter(sweep=sweep, sweep_index__gt=0).order_by("pk").values_list("uid", flat=True)) == to_come
    )
    assert list(creation.uids_to_come()) == []
