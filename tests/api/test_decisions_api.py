from __future__ import annotations

import pytest

from dstackweb.accounts.models import Project, User
from tests.api.conftest import Api
from tests.factories import make_host, make_run, place_all

pytestmark = pytest.mark.django_db


def test_a_decision_names_each_place_with_its_code_and_words(api: Api, project: Project, member: User) -> None:
    """R27."""
    make_host(cpus=2)
    make_run(project, member, "wide", resources={"cpu": 4})
    place_all()
    answer = api("GET", f"projects/{project.name}/runs/wide/decision")
    assert answer.status_code == 200
    found = answer.json()
    assert found["outcome"] == "impossible"
    assert "at most 2 CPUs on one host" in found["detail"]
    assert [(tried["where"], tried["code"]) for tried in found["tried"]] == [("box-1", "too_small")]
    assert (found["limits"], found["budget"], found["reservation"]) == ([], None, None)


def test_limits_that_block_a_run_have_their_numbers(api: Api, project: Project, member: User) -> None:
    make_host()
    project.queues.update(max_running=0)
    make_run(project, member, "mine")
    found = api("GET", f"projects/{project.name}/runs/mine/decision").json()
    assert found["outcome"] == "queue_limit"
    assert found["limits"] == [{"reason": "queue_limit", "code": "max_running", "limit": 0, "used": 0, "asked": 1}]


def test_all_that_holds_a_run_up_is_listed_the_most_permanent_first(api: Api, project: Project, member: User) -> None:
    make_host(cpus=2)
    project.queues.update(paused=True)
    make_run(project, member, "wide", resources={"cpu": 4})
    found = api("GET", f"projects/{project.name}/runs/wide/decision").json()
    assert [one["reason"] for one in found["blockers"]] == ["impossible", "queue_paused"]
    assert (found["outcome"], found["detail"]) == ("impossible", found["blockers"][0]["detail"])


def test_whom_it_displaces_is_listed_with_what_they_lose(api: Api, project: Project, member: User) -> None:
    make_host(gpus=1)
    project.queues.update(preempt_points=20)
    make_run(project, member, "low", resources={"gpu": 1}, preemptible=True, priority=10)
    place_all()
    make_run(project, member, "urgent", resources={"gpu": 1}, priority=60)
    found = api("GET", f"projects/{project.name}/runs/urgent/decision").json()["displaces"]
    assert [(one["run"], one["user"]) for one in found["runs"]] == [("low", member.username)]
    assert found["work_s"] < 60
    assert f"it displaces 1 run of {member.username}" in found["detail"]
    config = {"type": "task", "commands": ["true"], "resources": {"gpu": 1}, "priority": 60}
    plan = api("POST", f"projects/{project.name}/runs/plan", {"config": config}).json()
    assert plan["displaces"]["runs"] == found["runs"]
    assert api("GET", f"projects/{project.name}/runs/low/decision").json()["displaces"] is None


def test_people_outside_the_project_find_nothing(stranger: Api, project: Project, member: User) -> None:
    make_run(project, member, "mine")
    assert stranger("GET", f"projects/{project.name}/runs/mine/decision").status_code == 404
