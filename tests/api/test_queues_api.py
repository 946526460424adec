"""Queues over the API: the list, settings, moves, previews and undo."""

from __future__ import annotations

from typing import Any

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.runs.models import Move, Queue, QueueEvent, Run
from tests.api.conftest import Api
from tests.factories import join, make_run, make_user

QUEUES = "projects/main/queues"


@pytest.fixture
def line(project: Project, member: User) -> dict[str, Run]:
    """a, c and e are ada's; b and d are bob's."""
    bob = join(project, make_user("bob"))
    return {name: make_run(project, user, name) for name, user in zip("abcde", [member, bob] * 3, strict=False)}


def order(api: Api) -> str:
    return "".join(item["name"] for item in api("GET", f"{QUEUES}/default").json()["items"])


def test_a_queue_is_made_listed_changed_and_used(api: Api, manager: Api, line: dict[str, Run]) -> None:
    made = manager("POST", QUEUES, {"name": "night", "ageing_minutes": None, "max_running": 2})
    assert (made.status_code, made.json()["max_running"], made.json()["ageing_minutes"]) == (201, 2, None)
    assert manager("POST", QUEUES, {"name": "night"}).status_code == 409
    for name in ("not a name", "", "n" * 61, "ü", "a\n"):
        refused = manager("POST", QUEUES, {"name": name})
        assert (refused.status_code, "use letters" in refused.json()["detail"]) == (422, True)
    assert api("POST", QUEUES, {"name": "mine"}).status_code == 403
    listed = {row["name"]: row["submitted"] for row in api("GET", QUEUES).json()["items"]}
    assert listed == {"default": 5, "night": 0}
    changed = manager("PATCH", f"{QUEUES}/night", {"ageing_minutes": 5, "max_running": None, "max_gpus_per_user": 4})
    assert changed.status_code == 200, changed.content
    assert {key: changed.json()[key] for key in ("ageing_minutes", "max_running", "max_gpus_per_user")} == {
        "ageing_minutes": 5,
        "max_running": None,
        "max_gpus_per_user": 4,
    }
    assert api("PATCH", f"{QUEUES}/night", {"paused": True}).status_code == 403
    assert changed.json()["preempt_points"] is None
    shown = QueueEvent.objects.filter(queue__name="night").last()
    assert shown is not None
    assert shown.data == {"ageing_minutes": [None, 5], "max_running": [2, None], "max_gpus_per_user": [None, 4]}
    assert (shown.actor and shown.actor.username) == "grace"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"paused": None},
        {"paused": "yes"},
        {"ageing_minutes": 0},
        {"ageing_minutes": -5},
        {"preempt_points": 0},
        {"preempt_points": 101},
        {"preempt_gpu_hours": 0},
        {"cohort": "no name"},
        {"cohort": None},
        {"reclaim": "always"},
        {"reclaim": None},
        {"borrow_gpus": -1},
        {"ageing_minutes": 10**9},
        {"ageing_minutes": "30"},
        {"max_running": -1},
        {"max_gpus": 10**12},
        {"max_gpus": True},
        {"speed": 9},
    ],
)
def test_an_invalid_setting_is_refused_and_nothing_changes(manager: Api, project: Project, body: Any) -> None:
    before = Queue.objects.filter(project=project).values().get()
    answer = manager("PATCH", f"{QUEUES}/default", body)
    assert answer.status_code == 422, answer.content
    assert Queue.objects.filter(project=project).values().get() == before


def test_a_draining_queue_refuses_new_runs_and_starts_waiting_ones(
    api: Api, manager: Api, line: dict[str, Run]
) -> None:
    manager("PATCH", f"{QUEUES}/default", {"draining": True})
    config = {"type": "task", "commands": ["true"]}
    refused = api("POST", "projects/main/runs", {"config": config})
    assert (refused.status_code, "queue default is draining" in refused.json()["detail"]) == (409, True)
    assert api("POST", "projects/main/runs/plan", {"config": config}).status_code == 409
    manager("POST", QUEUES, {"name": "night"})
    assert api("PATCH", "projects/main/runs/a", {"queue": "night"}).status_code == 200
    assert api("PATCH", "projects/main/runs/a", {"queue": "default"}).status_code == 409
    assert order(api) == "bcde"


@pytest.mark.parametrize("body", [{"runs": [], "top": True}, {"runs": [], "bottom": True, "dry_run": True}])
def test_a_move_without_runs_is_refused_also_with_if_match(
    manager: Api, line: dict[str, Run], body: dict[str, Any]
) -> None:
    for headers in ({}, {"If_Match": '"any"'}):
        refused = manager("POST", f"{QUEUES}/default/move", body, **headers)
        assert (refused.status_code, refused.json()["errors"][0]["loc"]) == (422, ["runs"])


@pytest.mark.parametrize(
    ("body", "after"),
    [
        ({"run": "e", "top": True}, "eabcd"),
        ({"run": "a", "bottom": True}, "bcdea"),
        ({"run": "e", "before": "b"}, "aebcd"),
        ({"runs": ["d", "b"], "after": "e"}, "acebd"),
    ],
)
def test_runs_are_moved_and_the_move_is_undone(
    manager: Api, line: dict[str, Run], body: dict[str, Any], after: str
) -> None:
    shown = manager("POST", f"{QUEUES}/default/move", body | {"dry_run": True})
    assert (shown.status_code, shown.json()["move"], order(manager)) == (200, None, "abcde")
    done = manager("POST", f"{QUEUES}/default/move", body)
    assert (done.status_code, order(manager)) == (200, after)
    assert shown.json() == done.json() | {"move": None}
    for change in done.json()["changes"]:
        assert (change["position_before"], change["position_after"]) == (
            "abcde".index(change["run"]) + 1,
            after.index(change["run"]) + 1,
        )
    items = manager("GET", f"{QUEUES}/default").json()["items"]
    assert {item["name"] for item in items if item["moved_by"] == "grace"} == {c["run"] for c in done.json()["changes"]}
    undone = manager("POST", f"{QUEUES}/default/undo", {"move": done.json()["move"]})
    assert (undone.status_code, order(manager)) == (200, "abcde")
    assert manager("POST", f"{QUEUES}/default/undo", {"move": done.json()["move"]}).status_code == 409
    assert manager("POST", f"{QUEUES}/default/undo").status_code == 409


def test_the_latest_move_is_undone_without_its_number(api: Api, line: dict[str, Run]) -> None:
    assert api("POST", f"{QUEUES}/default/move", {"run": "c", "top": True}).status_code == 200
    assert order(api) == "cbade"
    assert api("POST", f"{QUEUES}/default/undo").status_code == 200
    assert order(api) == "abcde"


def test_a_stale_move_is_refused_with_what_changed(api: Api, manager: Api, line: dict[str, Run]) -> None:
    seen = api("GET", "projects/main/runs/e")["ETag"]
    manager("PATCH", "projects/main/runs/e", {"priority": 40})
    refused = api("POST", f"{QUEUES}/default/move", {"run": "e", "top": True}, If_Match=seen)
    assert refused.status_code == 412
    assert "run e was changed by grace" in refused.json()["detail"]
    assert (refused.json()["priority"], refused.json()["run"]) == (40, "e")
    now = api("GET", "projects/main/runs/e")["ETag"]
    done = api("POST", f"{QUEUES}/default/move", {"run": "e", "top": True}, If_Match=now)
    assert done.status_code == 200
    assert done["ETag"] == api("GET", "projects/main/runs/e")["ETag"] != now


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"run": "a"}, 422),
        ({"top": True}, 422),
        ({"run": "a", "runs": ["b"], "top": True}, 422),
        ({"run": "a", "top": True, "bottom": True}, 422),
        ({"run": "a", "top": False}, 422),
        ({"run": "a", "before": "a"}, 422),
        ({"runs": [], "top": True}, 422),
        ({"run": "nope", "top": True}, 404),
        ({"run": "a", "before": "nope"}, 404),
        ({"run": "b", "top": True}, 403),
        ({"run": "c", "before": "b"}, 403),
    ],
)
def test_impossible_moves_are_refused_with_a_reason_and_change_nothing(
    api: Api, line: dict[str, Run], body: dict[str, Any], status: int
) -> None:
    answer = api("POST", f"{QUEUES}/default/move", body)
    assert answer.status_code == status, answer.content
    assert answer.json()["detail"]
    assert order(api) == "abcde"
    assert not Move.objects.exists()


def test_a_run_that_has_left_the_queue_is_a_conflict(api: Api, line: dict[str, Run]) -> None:
    api("POST", "projects/main/runs/a/stop")
    answer = api("POST", f"{QUEUES}/default/move", {"run": "a", "top": True})
    assert (answer.status_code, "already ended" in answer.json()["detail"]) == (409, True)
    assert api("POST", f"{QUEUES}/default/move", {"run": "c", "before": "a"}).status_code == 409


def test_the_factors_of_a_runs_position_are_returned(api: Api, manager: Api, line: dict[str, Run]) -> None:
    factors = manager("GET", "projects/main/runs/e").json()["factors"]
    assert (factors["priority"], factors["position"], factors["moved_by"]) == (50, 5, None)
    assert 0 <= factors["aged_points"] < 0.1
    assert factors["ahead_of_priority"] == 51
    manager("POST", f"{QUEUES}/default/move", {"run": "e", "top": True})
    assert manager("GET", "projects/main/runs/e").json()["factors"]["moved_by"] == "grace"
    api("POST", "projects/main/runs/e/stop")
    assert api("GET", "projects/main/runs/e").json()["factors"] is None


def test_a_queue_with_fair_share_has_its_members_shares_and_its_runs_their_penalties(
    project: Project, member: User, api: Api, manager: Api
) -> None:
    changed = manager("PATCH", f"{QUEUES}/default", {"fair_share_minutes": 60, "fair_share_half_life_days": 14})
    assert (changed.status_code, changed.json()["shares"]) == (200, [])
    make_run(project, join(project, make_user("bob")), "small", resources={"gpu": 1})
    for name in ("first", "second"):
        make_run(project, member, name, resources={"gpu": 4})
    found = api("GET", f"{QUEUES}/default").json()
    assert (found["fair_share_minutes"], found["fair_share_half_life_days"]) == (60, 14)
    empty = {"used_gpu_hours": 0.0, "held_gpus": 0}
    assert found["shares"] == [
        {"user": "ada", "gpu_hours": 8.0, "queued_gpus": 8, "penalty_s": 3150, **empty},
        {"user": "bob", "gpu_hours": 1.0, "queued_gpus": 1, "penalty_s": 0, **empty},
    ]
    assert {run["name"]: run["penalty_s"] for run in found["items"]} == {"small": 0, "first": 0, "second": 1800}
    factors = api("GET", "projects/main/runs/second").json()["factors"]
    assert factors["penalty_s"] == 1800
    assert factors["penalty_detail"] == "recently used 0 GPU-h, 8 GPUs queued; the median is 4 GPU-h: 30 min behind"
    assert api("GET", "projects/main/runs/small").json()["factors"]["penalty_detail"] == ""
    config = {"type": "task", "commands": ["true"], "resources": {"gpu": 2}}
    planned = api("POST", "projects/main/runs/plan", {"config": config}).json()
    assert (planned["penalty_s"], planned["position"]) == (2880, 4)
    assert planned["penalty_detail"] == "recently used 0 GPU-h, 10 GPUs queued; the median is 2 GPU-h: 48 min behind"
    for body in ({"fair_share_minutes": 0}, {"fair_share_half_life_days": None}, {"fair_share_half_life_days": 91}):
        assert manager("PATCH", f"{QUEUES}/default", body).status_code == 422


def test_runs_go_to_another_queue_with_a_preview(api: Api, manager: Api, line: dict[str, Run]) -> None:
    manager("POST", QUEUES, {"name": "night", "paused": True})
    body = {"runs": ["a", "e"], "queue": "night"}
    shown = api("POST", f"{QUEUES}/default/move", body | {"dry_run": True}).json()
    assert [(one["run"], one["position_before"], one["position_after"]) for one in shown["changes"]] == [
        ("a", 1, 1),
        ("e", 5, 2),
    ]
    assert (shown["queue"]["name"], shown["queue"]["reordered"], shown["move"]) == ("night", False, None)
    assert shown["queue"]["waits"][0]["reason"] == "queue_paused"
    assert order(api) == "abcde"
    moved = api("POST", f"{QUEUES}/default/move", body)
    assert moved.status_code == 200, moved.content
    assert order(api) == "bcd"
    mine = {"member": line["c"].user.username, "queue": "night"}
    assert api("POST", f"{QUEUES}/default/move", mine).status_code == 200
    assert order(api) == "bd"
    assert api("POST", f"{QUEUES}/default/move", mine).status_code == 404
    bobs = {"member": "bob", "queue": "night"}
    assert api("POST", f"{QUEUES}/default/move", bobs).status_code == 403
    wrong = {"member": "bob", "top": True}
    assert manager("POST", f"{QUEUES}/default/move", wrong).status_code == 422
    manager("PATCH", f"{QUEUES}/night", {"draining": True})
    refused = manager("POST", f"{QUEUES}/default/move", bobs | {"dry_run": True})
    assert (refused.status_code, "draining" in refused.json()["detail"]) == (409, True)


def test_a_queue_joins_a_cohort_and_leaves_it(manager: Api, line: dict[str, Run]) -> None:
    body = {"cohort": "team", "max_gpus": 4, "lend_gpus": 1, "reclaim": "lower_priority"}
    joined = manager("PATCH", f"{QUEUES}/default", body).json()
    assert {name: joined[name] for name in body} == body
    assert (joined["borrow_gpus"], joined["borrowed_gpus"]) == (None, 0)
    assert manager("PATCH", f"{QUEUES}/default", {"cohort": ""}).json()["cohort"] == ""
