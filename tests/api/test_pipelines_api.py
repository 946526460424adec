"""A file with several runs over the API: a plan for each, and all or none of them submitted."""

from __future__ import annotations

from typing import Any

import pytest

from dstackweb.accounts.models import Project
from dstackweb.runs.models import Run
from tests.api.conftest import Api
from tests.factories import make_host

pytestmark = pytest.mark.django_db
TASK: dict[str, Any] = {"type": "task", "commands": ["true"]}
CONFIG = [TASK | {"name": "train", "after": ["prepare"]}, TASK | {"name": "prepare"}]


def test_all_runs_are_planned_and_submitted_in_their_order(api: Api, project: Project) -> None:
    make_host()
    plan = api("POST", "projects/main/runs/plan", {"config": CONFIG}).json()
    assert plan["type"] == "pipeline"
    assert [(one["settings"]["name"], one["position"], one["after_detail"]) for one in plan["plans"]] == [
        ("prepare", 1, None), ("train", None, "Enters its queue after: prepare is done."),
    ]  # fmt: skip
    answer = api("POST", "projects/main/runs", {"config": CONFIG}, Idempotency_Key="one")
    assert answer.status_code == 201
    made = answer.json()
    assert made["type"] == "pipeline"
    assert [(run["name"], run["status"]) for run in made["runs"]] == [("prepare", "submitted"), ("train", "pending")]
    assert [run["after"] for run in made["runs"]][1][0]["run"] == "prepare"
    again = api("POST", "projects/main/runs", {"config": CONFIG}, Idempotency_Key="one").json()
    assert sorted(run["id"] for run in again["runs"]) == sorted(run["id"] for run in made["runs"])
    assert Run.objects.count() == 2


@pytest.mark.parametrize(
    ("config", "loc", "msg"),
    [
        ([], ["config"], "the list has no run"),
        ([TASK | {"name": "a", "after": "b"}, TASK | {"name": "b", "after": "a"}], ["after", 0], "a → b → a"),
        ([TASK, TASK | {"name": "b"}], ["name"], "each run of a file with several needs a `name`"),
        ([TASK | {"name": f"r{n}"} for n in range(21)], [], "a file has 20 runs at most"),
    ],
)
@pytest.mark.parametrize("path", ["runs", "runs/plan"])
def test_what_cannot_be_stored_is_refused_as_a_whole(
    api: Api, project: Project, config: list[Any], loc: list[Any], msg: str, path: str
) -> None:
    answer = api("POST", f"projects/main/{path}", {"config": config})
    assert answer.status_code == 422
    [error] = answer.json()["errors"]
    assert error["loc"] == loc
    assert msg in error["msg"] or "b → a → b" in error["msg"]
    assert not Run.objects.exists()


def test_a_single_run_in_a_list_is_a_run(api: Api, project: Project) -> None:
    assert api("POST", "projects/main/runs", {"config": [TASK | {"name": "a"}]}).json()["name"] == "a"
