"""Several runs of one file are stored in the order in which they wait for each other: all, or none."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Conflict, Invalid
from dstackweb.runs import attempts, dependencies, pipelines, selectors
from dstackweb.runs.models import Dependency, Run
from dstackweb.runs.queue.queues import create_queue
from dstackweb.runs.recount import differences
from dstackweb.runs.services import Submission
from dstackweb.runs.states import Reason
from dstackweb.scheduler.passes import loading
from dstackweb.scheduler.passes.decision import plan_all
from tests.factories import make_host, make_run, place_all, placed_job, start

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]

FILE = """# The pictures, then a model, then its report.
type: task
name: evaluate
commands: [python evaluate.py]
after: train
---
type: task
name: prepare
commands: [python prepare.py]
resources: {cpu: 1}
---
type: task
name: train
commands: [python train.py]
after:
  - run: prepare
  - {run: earlier, on: ended}
"""


@pytest.fixture
def earlier(project: Project, member: User) -> Run:
    make_host()
    return make_run(project, member, "earlier")


def submit(project: Project, user: User, config: Any, key: str = "", **more: Any) -> list[Run]:
    made, _is_new = pipelines.submit(project, user, "member", Submission(config, **more), key)
    assert isinstance(made, list)
    return made


def end(run: Run) -> None:
    place_all()
    start(placed_job(run))
    attempts.end_job(placed_job(run).pk, Reason.DONE_BY_RUNNER, exit_code=0)
    dependencies.settle(timezone.now())


def test_runs_of_a_file_follow_each_other_from_the_first_to_the_last(
    project: Project, member: User, earlier: Run
) -> None:
    runs = submit(project, member, FILE)
    assert [(run.name, run.status) for run in runs] == [
        ("prepare", "submitted"), ("train", "pending"), ("evaluate", "pending"),
    ]  # fmt: skip
    waits = Dependency.objects.order_by("run__name", "name").values_list("run__name", "predecessor__name", "on")
    assert list(waits) == [("evaluate", "train", "done"), ("train", "earlier", "ended"), ("train", "prepare", "done")]
    assert runs[0].config_text == FILE.split("---\n")[1], "each run has its own part of the file"
    for run in (runs[0], earlier):
        end(run)
    assert list(Run.objects.order_by("-id").values_list("name", "status"))[:2] == [
        ("evaluate", "pending"), ("train", "submitted"),
    ]  # fmt: skip
    assert list(differences()) == []


def refused(project: Project, member: User, config: Any, **more: Any) -> tuple[str, list[str | int], int | None]:
    before = Run.objects.count()
    with pytest.raises(Invalid) as found:
        submit(project, member, config, **more)
    with pytest.raises(Invalid) as planned:
        plan_all(project, member, "member", Submission(config, **more))
    assert planned.value.errors == found.value.errors
    assert Run.objects.count() == before, "none of the file is stored"
    [error] = found.value.errors
    return error["msg"], error["loc"], error["line"]


@pytest.mark.parametrize(
    ("old", "new", "msg", "loc", "line"),
    [
        ("resources: {cpu: 1}", "after: evaluate", "wait for each other: ", "after", 5),
        ("after: train", "after: evaluate", "wait for each other: evaluate → evaluate", "after", 5),
        ("run: prepare", "run: prepares", "no run is called 'prepares'", "after", 16),
        ("name: train", "name: prepare", "two runs of the file are named prepare", "name", 13),
        ("name: train\n", "", "each run of a file with several needs a `name`", "name", 12),
        ("resources: {cpu: 1}", "priority: 101", "priority", "priority", 10),
        ("resources: {cpu: 1}", "queue: none", "no queue 'none'", "queue", 10),
        ("  - run: prepare\n", "  - run: prepare\n  - run: prepare\n", "prepare is listed twice", "after", 17),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line_of_the_whole_file(
    project: Project, member: User, earlier: Run, old: str, new: str, msg: str, loc: str, line: int
) -> None:
    found = refused(project, member, FILE.replace(old, new, 1))
    assert msg in found[0]
    assert (found[1][0], found[2]) == (loc, line)


def test_runs_of_a_file_cannot_be_renamed_by_an_override(project: Project, member: User, earlier: Run) -> None:
    assert "can't be renamed" in refused(project, member, FILE, overrides={"name": "other"})[0]
    assert {run.priority for run in submit(project, member, FILE, overrides={"priority": 60})} == {60}


def test_a_name_that_an_active_run_has_stores_none_of_the_file(project: Project, member: User, earlier: Run) -> None:
    make_run(project, member, "evaluate")
    with pytest.raises(Conflict, match=r"'evaluate' is already submitted\. Nothing"):
        submit(project, member, FILE)
    assert set(Run.objects.values_list("name", flat=True)) == {"earlier", "evaluate"}
    assert list(differences()) == []


def test_a_repeated_key_gives_the_same_runs_and_refuses_another_file(
    project: Project, member: User, earlier: Run
) -> None:
    runs = submit(project, member, FILE, "k" * 200)
    again, is_new = pipelines.submit(project, member, "member", Submission(FILE), "k" * 200)
    assert isinstance(again, list)
    assert ({run.pk for run in again}, is_new) == ({run.pk for run in runs}, False)
    with pytest.raises(Conflict, match="used for another submission"):
        submit(project, member, FILE.replace("train.py", "other.py"), "k" * 200)
    with pytest.raises(Conflict, match="used for another submission"):
        submit(project, member, FILE.rpartition("---")[0].replace("after: train\n", ""), "k" * 200)


def test_runs_may_be_objects_and_wait_in_several_queues(project: Project, member: User, earlier: Run) -> None:
    create_queue(project, member, "manager", "night")
    task: dict[str, Any] = {"type": "task", "commands": ["true"]}
    last = task | {"name": "b", "after": "a", "queue": "night"}
    runs = submit(project, member, [last, task | {"name": "a"}, task | {"name": "c"}])
    assert [run.name for run in runs] == ["a", "c", "b"]
    assert [run.queue.name for run in runs] == ["default", "default", "night"]


def test_a_plan_has_each_run_with_its_position_behind_those_of_the_file(
    project: Project, member: User, earlier: Run
) -> None:
    task: dict[str, Any] = {"type": "task", "commands": ["true"]}
    names: dict[str, dict[str, Any]] = {"a": {}, "b": {"priority": 80}, "c": {}, "d": {"after": "a"}}
    config = [task | {"name": name} | more for name, more in names.items()]
    plans = plan_all(project, member, "member", Submission(config))
    assert [(one.spec.name, one.position) for one in plans] == [("a", 3), ("b", 1), ("c", 4), ("d", None)]
    assert plans[3].follows == {"code": "after", "waits": [{"name": "a", "on": "done"}], "unmet": []}
    assert Run.objects.count() == 1
    runs = submit(project, member, config)
    assert [selectors.position(run) for run in runs if run.status == "submitted"] == [3, 1, 4]


def test_the_capacity_is_read_once_for_the_plans_of_a_file(
    project: Project, member: User, earlier: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(wraps=loading.load_capacity)
    monkeypatch.setattr(loading, "load_capacity", read)
    assert len(plan_all(project, member, "member", Submission(FILE))) == 3
    assert read.call_count == 1


def test_one_document_is_a_run_as_before(project: Project, member: User) -> None:
    one = Submission("---\ntype: task\nname: one\ncommands: ['true']\n")
    made, _new = pipelines.submit(project, member, "member", one)
    assert isinstance(made, Run)
    [planned] = plan_all(project, member, "member", Submission("type: task\ncommands: ['true']\n"))
    assert planned.position == 2
