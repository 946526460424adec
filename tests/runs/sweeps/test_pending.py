"""A sweep that waits for others (`after`): none of its runs exists before, and all enter the queue together."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Conflict, Forbidden, Invalid
from dstackweb.runs import attempts, dependencies, pipelines, services
from dstackweb.runs.models import Run, Sweep
from dstackweb.runs.recount import differences
from dstackweb.runs.services import Submission
from dstackweb.runs.states import ACTIVE, Reason, RunStatus
from dstackweb.runs.sweeps import creation, services as sweeps
from dstackweb.runs.sweeps.creation import WAITING_AT_ONCE
from dstackweb.runs.sweeps.selectors import SweepCounts
from dstackweb.scheduler.passes.decision import plan_all
from dstackweb.scheduler.processes.retention import prune
from dstackweb.wording import sweeps as words
from tests.factories import join, make_host, make_run, make_user, place_all, placed_job, start
from tests.runs.sweeps.test_sweeps import fresh, make_sweep

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]


@pytest.fixture
def prepare(project: Project, member: User) -> Run:
    make_host()
    return make_run(project, member, "prepare")


def end(run: Run, reason: str = Reason.DONE_BY_RUNNER) -> None:
    place_all()
    start(placed_job(run))
    attempts.end_job(placed_job(run).pk, reason, exit_code=0 if reason == Reason.DONE_BY_RUNNER else 1)


def settle() -> None:
    creation.settle(timezone.now())
    dependencies.settle(timezone.now())


def test_none_of_ten_thousand_runs_exists_until_the_run_before_is_done(
    project: Project, member: User, prepare: Run
) -> None:
    sweep = make_sweep(project, member, 10_000, after="prepare", priority=80)
    assert (sweep.status, words.state(sweep)) == ("pending", "Enters its queue after: prepare is done.")
    assert (sweep.runs.count(), SweepCounts.of(sweep).left) == (0, 10_000)
    settle()
    assert fresh(sweep).status == RunStatus.PENDING
    end(prepare)
    later = make_run(project, member, "later", priority=80)
    with CaptureQueriesContext(connection) as asked:
        creation.settle_one(sweep.pk, timezone.now())
    sweep = fresh(sweep)
    assert (sweep.status, words.state(sweep)) == ("running", "")
    assert sweep.seniority_us > later.seniority_us, "its waiting counts from its entry"
    runs = list(sweep.runs.all())
    assert len(runs) == WAITING_AT_ONCE
    assert {run.seniority_us for run in runs} == {sweep.seniority_us}
    assert len(asked) < 40, "a fixed number of statements for all of its runs"
    assert not runs[0].spec.get("after")
    assert "after" not in runs[0].config_text
    assert list(differences()) == []


def test_a_pass_that_the_end_requested_places_its_runs(project: Project, member: User, prepare: Run) -> None:
    sweep = make_sweep(project, member, 3, after={"run": "prepare"})
    end(prepare)
    place_all()
    assert sweep.runs.filter(status=RunStatus.PROVISIONING).count() == 3


def test_it_is_canceled_with_all_that_follows_it(project: Project, member: User, prepare: Run) -> None:
    sweep = make_sweep(project, member, 3, after="prepare")
    after = make_run(project, member, "report", after="lr")
    anyway = make_run(project, member, "clean", after={"run": "lr", "on": "ended"})
    end(prepare, Reason.CONTAINER_EXITED_WITH_ERROR)
    settle()
    sweep = fresh(sweep)
    assert (sweep.status, sweep.runs.count()) == ("terminated", 0)
    assert words.state(sweep) == "Canceled: prepare did not end as done."
    assert SweepCounts.of(sweep).dropped == 3
    assert Run.objects.get(pk=after.pk).status == RunStatus.TERMINATED
    assert Run.objects.get(pk=anyway.pk).status == RunStatus.SUBMITTED
    prune(timezone.now() + dt.timedelta(days=3650), budget_s=None)
    assert not Sweep.objects.exists(), "without a run, nothing else would remove it"


def test_a_kept_one_is_released_by_its_owner_or_a_manager(project: Project, member: User, prepare: Run) -> None:
    sweep = make_sweep(project, member, 3, after={"run": "prepare", "otherwise": "keep"})
    end(prepare, Reason.CONTAINER_EXITED_WITH_ERROR)
    settle()
    assert (fresh(sweep).status, words.state(fresh(sweep))) == ("pending", "prepare did not end as done.")
    other = make_user("eve")
    join(project, other, "member")
    with pytest.raises(Forbidden):
        sweeps.release(sweep, other, "member")
    released = sweeps.release(sweep, other, "manager")
    assert (released.status, released.runs.count()) == ("running", 3)
    with pytest.raises(Conflict, match="doesn't wait for other runs"):
        sweeps.release(sweep, member, "member")
    assert list(differences()) == []


def test_it_can_be_stopped_and_keeps_a_changed_priority(project: Project, member: User, prepare: Run) -> None:
    sweep = make_sweep(project, member, 3, after="prepare")
    sweeps.set_priority(sweep, member, "member", 70)
    stopped = make_sweep(project, member, 3, name="no", after="prepare")
    stopped = sweeps.stop(stopped, member, "member")
    assert (stopped.status, words.state(stopped)) == ("terminated", f"Stopped by {member}.")
    end(prepare)
    settle()
    assert set(sweep.runs.values_list("priority", flat=True)) == {70}
    assert not stopped.runs.exists()


def test_it_waits_for_another_sweep_and_for_all_that_it_names(project: Project, member: User, prepare: Run) -> None:
    first = make_sweep(project, member, 2, name="first")
    second = make_sweep(project, member, 2, name="second", after=["prepare", {"run": "first", "on": "ended"}])
    end(prepare)
    settle()
    assert words.state(fresh(second)) == "Enters its queue after: first has ended."
    sweeps.stop(first, member, "member", abort=True)
    for run in Run.objects.filter(sweep=first, status__in=ACTIVE):
        attempts.end_job(placed_job(run).pk, Reason.ABORTED_BY_USER, exit_code=137)
    settle()
    settle()
    assert fresh(second).status == RunStatus.RUNNING


def test_a_predecessor_that_was_removed_cancels_it(project: Project, member: User, prepare: Run) -> None:
    services.stop(prepare, member, "member")
    with pytest.raises(Invalid, match="prepare is terminated, so this run would never start") as refused:
        make_sweep(project, member, 3, after="prepare")
    assert refused.value.errors[0]["loc"] == ["after", 0]
    sweep = make_sweep(project, member, 3, after={"run": "prepare", "on": "failed"})
    assert sweep.runs.count() == 3, "it had ended already"


FILE = """type: task
name: evaluate
commands: [python evaluate.py]
after: lr
---
type: task
name: lr
commands: [python train.py]
array: {matrix: {LR: [0.1, 0.01]}, max_parallel: 1}
after: prepare
---
type: task
name: prepare
commands: [python prepare.py]
"""


def submit(project: Project, user: User, config: Any = FILE, key: str = "") -> list[Run | Sweep]:
    made, _is_new = pipelines.submit(project, user, "member", Submission(config), key)
    assert isinstance(made, list)
    return made


class TestInAFile:
    def test_a_pipeline_goes_through_its_sweep_to_its_end(self, project: Project, member: User) -> None:
        make_host()
        made = submit(project, member)
        assert [(one.name, one.status) for one in made] == [
            ("prepare", "submitted"), ("lr", "pending"), ("evaluate", "pending"),
        ]  # fmt: skip
        for name in ("prepare", "lr-0", "lr-1"):
            place_all()
            assert Run.objects.get(name="evaluate").status == RunStatus.PENDING
            end(Run.objects.get(name=name))
        place_all()
        assert Sweep.objects.get().status == RunStatus.DONE
        assert Run.objects.get(name="evaluate").status == RunStatus.PROVISIONING
        assert list(differences()) == []

    def test_a_failed_beginning_cancels_all_of_it(self, project: Project, member: User) -> None:
        make_host()
        made = submit(project, member)
        end(Run.objects.get(pk=made[0].pk), Reason.CONTAINER_EXITED_WITH_ERROR)
        settle()
        assert Sweep.objects.get().status == RunStatus.TERMINATED
        assert Run.objects.get(name="evaluate").status == RunStatus.TERMINATED

    def test_it_is_planned_as_a_whole(self, project: Project, member: User) -> None:
        plans = plan_all(project, member, "member", Submission(FILE.replace("after: prepare\n", "")))
        found = {one.spec.name: (one.position, one.follows) for one in plans}
        assert found["evaluate"] == (None, {"code": "after", "waits": [{"name": "lr", "on": "done"}], "unmet": []})
        task: dict[str, Any] = {"type": "task", "commands": ["true"]}
        config = [task | {"name": "a", "array": 300}, task | {"name": "b"}]
        positions = {one.spec.name: one.position for one in plan_all(project, member, "member", Submission(config))}
        assert positions == {"a": 1, "b": 101}
        assert not Sweep.objects.exists()

    @pytest.mark.parametrize(
        ("old", "new", "msg", "loc", "line"),
        [
            ("name: evaluate", "name: lr-1", "lr-1 is also the name of a run of the file's sweep lr", "name", 2),
            ("max_parallel: 1", "max_parallel: 0", "should be a whole number of at least 1", "array", 9),
            ("name: prepare", "name: prepare\nschedule: {cron: '0 2 * * *'}\narray: 2", "can't have", "schedule", 14),
        ],
    )
    def test_what_is_wrong_stores_nothing_and_has_its_line(
        self, project: Project, member: User, old: str, new: str, msg: str, loc: str, line: int
    ) -> None:
        with pytest.raises(Invalid) as refused:
            submit(project, member, FILE.replace(old, new, 1))
        [error] = refused.value.errors
        assert (error["loc"][0], error["line"]) == (loc, line)
        assert msg in error["msg"]
        assert not Sweep.objects.exists()
        assert not Run.objects.exists()

    def test_a_cycle_through_a_sweep_is_refused_with_its_path(self, project: Project, member: User) -> None:
        with pytest.raises(Invalid, match="these runs wait for each other: ") as refused:
            submit(project, member, FILE.replace("name: prepare\n", "name: prepare\nafter: evaluate\n"))
        [error] = refused.value.errors
        assert all(name in error["msg"] for name in ("prepare", "lr", "evaluate"))
        assert error["line"] in (4, 10, 14), "of the file, where one of them waits"

    def test_a_taken_name_stores_nothing(self, project: Project, member: User) -> None:
        make_sweep(project, member, 2, name="lr")
        with pytest.raises(Conflict, match=r"a sweep named 'lr' has not ended\. Nothing"):
            submit(project, member)
        assert not Run.objects.filter(name__in=["prepare", "evaluate"]).exists()
        assert list(differences()) == []

    def test_a_repeated_key_gives_the_same(self, project: Project, member: User) -> None:
        made = submit(project, member, key="once")
        again = submit(project, member, key="once")
        assert {one.uid for one in again} == {one.uid for one in made}
        with pytest.raises(Conflict, match="used for another submission"):
            submit(project, member, FILE.replace("0.01", "0.02"), key="once")
