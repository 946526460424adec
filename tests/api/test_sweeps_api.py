"""Sweeps over the API: submitted as runs are, then read and changed as one."""

from __future__ import annotations

import csv
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project
from dstackweb.runs.models import Run
from tests.api.conftest import Api
from tests.factories import join, make_host, make_user, place_all
from tests.runs.sweeps.test_sweeps import end, settle

pytestmark = pytest.mark.django_db
FILE = """
type: task
name: lr
commands: [python train.py]
array:
  matrix: {LR: [0.1, 0.01], name: [a, b]}
  max_parallel: 2
"""


@pytest.fixture
def sweep(api: Api, project: Project) -> dict[str, Any]:
    answer = api("POST", "projects/main/runs", {"config": FILE}, Idempotency_Key="one")
    assert answer.status_code == 201
    found: dict[str, Any] = answer.json()
    return found


def test_a_file_with_an_array_makes_a_sweep(api: Api, sweep: dict[str, Any]) -> None:
    assert (sweep["type"], sweep["name"], sweep["size"], sweep["max_parallel"]) == ("sweep", "lr", 4, 2)
    assert sweep["counts"] == {
        "waiting": 2, "running": 0, "done": 0, "failed": 0, "terminated": 0, "left": 2, "dropped": 0, "removed": 0,
    }  # fmt: skip
    assert sweep["parameters"] == ["LR", "name"]
    assert sweep["settings"]["array"] == {"matrix": {"LR": ["0.1", "0.01"], "name": ["a", "b"]}, "max_parallel": 2}
    assert api("POST", "projects/main/runs", {"config": FILE}, Idempotency_Key="one").json() == sweep
    assert api("GET", "projects/main/sweeps/lr").json() == sweep
    assert api("GET", f"projects/main/sweeps/{sweep['id']}").json() == sweep
    run = api("GET", "projects/main/runs/lr-1").json()
    assert run["sweep"] == {"name": "lr", "id": sweep["id"], "index": 1}
    assert run["settings"]["env"] == {"LR": "0.1", "name": "b"}
    assert "array" not in run["settings"]


def test_its_plan_says_how_many_runs_it_makes(api: Api, project: Project) -> None:
    plan = api("POST", "projects/main/runs/plan", {"config": FILE}).json()
    assert (plan["runs"], plan["position"]) == (4, 1)
    single = {"config": {"type": "task", "commands": ["true"]}}
    assert api("POST", "projects/main/runs/plan", single).json()["runs"] == 1


def test_its_runs_are_read_page_by_page_with_parameters_and_outcome(api: Api, sweep: dict[str, Any]) -> None:
    make_host()
    place_all()
    end("lr-0", code=7)
    page = api("GET", "projects/main/sweeps/lr/runs?limit=3").json()
    assert page["next"] == "3"
    assert [item["parameters"] for item in page["items"]] == [
        {"LR": "0.1", "name": "a"},
        {"LR": "0.1", "name": "b"},
        {"LR": "0.01", "name": "a"},
    ]
    assert [item["status"] for item in page["items"]] == ["failed", "provisioning", "to_come"]
    assert (page["items"][0]["exit_code"], page["items"][0]["duration_s"] is None) == (7, False)
    last = api("GET", "projects/main/sweeps/lr/runs?cursor=3").json()
    assert ([item["name"] for item in last["items"]], last["next"]) == (["lr-3"], None)
    failed = api("GET", "projects/main/sweeps/lr/runs?status=failed&status=done").json()["items"]
    assert [item["index"] for item in failed] == [0]


def test_its_table_is_a_file_with_a_column_for_each_parameter(api: Api, sweep: dict[str, Any]) -> None:
    answer = api("GET", "projects/main/sweeps/lr/export?format=csv")
    rows = list(csv.DictReader(answer.getvalue().decode().splitlines()))
    assert [(row["name"], row["LR"], row["parameter_name"], row["status"]) for row in rows] == [
        ("lr-0", "0.1", "a", "submitted"),
        ("lr-1", "0.1", "b", "submitted"),
        ("lr-2", "0.01", "a", "to_come"),
        ("lr-3", "0.01", "b", "to_come"),
    ]


def test_priority_stop_and_retry_are_of_the_whole_sweep(api: Api, sweep: dict[str, Any]) -> None:
    make_host()
    changed = api("PATCH", "projects/main/sweeps/lr", {"priority": 70}).json()
    assert (changed["priority"], changed["settings"]["priority"]) == (70, 70)
    assert set(Run.objects.values_list("priority", flat=True)) == {70}
    assert api("PATCH", "projects/main/sweeps/lr", {"priority": 99}).status_code == 422
    assert api("POST", "projects/main/sweeps/lr/retry").status_code == 409
    place_all()
    end("lr-0", code=1)
    stopped = api("POST", "projects/main/sweeps/lr/stop", {"abort": True}).json()
    assert (stopped["counts"]["dropped"], stopped["stopped_by"]) == (2, stopped["user"])
    settle()
    again = api("POST", "projects/main/sweeps/lr/retry")
    assert (again.status_code, again.json()["counts"]["waiting"]) == (200, 1)


def test_sweeps_are_listed_newest_first_and_active_ones_alone(api: Api, sweep: dict[str, Any]) -> None:
    for name in ("b", "c"):
        api("POST", "projects/main/runs", {"config": {"type": "task", "name": name, "commands": ["x"], "array": 2}})
    api("POST", "projects/main/sweeps/b/stop")
    settle()
    page = api("GET", "projects/main/sweeps?limit=2").json()
    assert [item["name"] for item in page["items"]] == ["c", "b"]
    more = api("GET", f"projects/main/sweeps?cursor={page['next']}").json()
    assert ([item["name"] for item in more["items"]], more["next"]) == (["lr"], None)
    assert [one["name"] for one in api("GET", "projects/main/sweeps?active=true").json()["items"]] == ["c", "lr"]
    assert timezone.now().isoformat() > page["items"][1]["ended_at"]


def test_another_member_sees_a_sweep_and_changes_nothing_of_it(sweep: dict[str, Any], project: Project) -> None:
    other = Api(join(project, make_user("zoe")))
    assert other("GET", "projects/main/sweeps/lr").status_code == 200
    for method, path, body in (("PATCH", "", {"priority": 60}), ("POST", "/stop", None), ("POST", "/retry", None)):
        assert other(method, f"projects/main/sweeps/lr{path}", body).status_code == 403
    assert other("GET", "projects/main/sweeps/none").status_code == 404


def test_an_invalid_array_is_refused_with_its_line(api: Api, project: Project) -> None:
    answer = api("POST", "projects/main/runs", {"config": FILE.replace("max_parallel: 2", "max_parallel: no")})
    assert (answer.status_code, answer.json()["errors"][0]["line"]) == (422, 7)


def test_a_sweep_waits_for_a_run_and_is_released(api: Api, project: Project) -> None:
    task: dict[str, Any] = {"type": "task", "commands": ["true"]}
    config = [task | {"name": "lr", "array": 2, "after": "prepare"}, task | {"name": "prepare"}]
    made = api("POST", "projects/main/runs", {"config": config}, Idempotency_Key="one").json()
    assert [(one.get("type"), one["name"], one["status"]) for one in made["runs"]] == [
        (None, "prepare", "submitted"), ("sweep", "lr", "pending"),
    ]  # fmt: skip
    again = api("POST", "projects/main/runs", {"config": config}, Idempotency_Key="one").json()
    assert {one["id"] for one in again["runs"]} == {one["id"] for one in made["runs"]}
    sweep = api("GET", "projects/main/sweeps/lr").json()
    assert sweep["status_message"] == "Enters its queue after: prepare is done."
    assert [(one["run"], one["status"], one["outcome"]) for one in sweep["after"]] == [
        ("prepare", "submitted", "waiting"),
    ]  # fmt: skip
    assert (sweep["settings"]["after"], sweep["counts"]["left"]) == (["prepare"], 2)
    released = api("POST", "projects/main/sweeps/lr/release").json()
    assert (released["status"], released["counts"]["waiting"], released["status_message"]) == ("running", 2, "")
    assert released["after"][0]["outcome"] == "released"
    assert api("POST", "projects/main/sweeps/lr/release").status_code == 409


def test_a_folded_queue_has_a_sweep_as_one_item(api: Api, project: Project) -> None:
    for config in ({"name": "first"}, {"name": "lr", "array": 300}, {"name": "last"}):
        api("POST", "projects/main/runs", {"config": {"type": "task", "commands": ["x"], **config}})
    page = api("GET", "projects/main/queues/default?folded=true&limit=2").json()
    first, fold = page["items"]
    assert (first["name"], first["folded"]) == ("first", None)
    assert (fold["name"], fold["position"]) == ("lr-0", 2)
    assert (fold["folded"]["sweep"], fold["folded"]["runs"], fold["folded"]["size"]) == ("lr", 100, 300)
    assert fold["folded"]["counts"]["left"] == 200
    rest = api("GET", f"projects/main/queues/default?folded=true&cursor={page['next']}").json()
    assert [(item["name"], item["position"]) for item in rest["items"]] == [("last", 102)]
    plain = api("GET", "projects/main/queues/default?limit=1000").json()["items"]
    assert len(plain) == 102
    assert "folded" not in plain[0], "what scripts read is as before"
