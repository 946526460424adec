"""Holds over the API."""

from __future__ import annotations

from typing import Any

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.runs.models import Run
from tests.api.conftest import Api
from tests.factories import make_host, make_run, make_user, place_all, placed_job, start

pytestmark = pytest.mark.django_db
HOLDS, RUNS = "projects/main/holds", "projects/main/runs"


def test_a_hold_is_created_queued_and_shows_how_to_connect_once_it_started(
    project: Project, member: User, api: Api
) -> None:
    make_host(gpus=2, address="10.0.0.5")
    answer = api("POST", HOLDS, {"gpu": "A100:2", "for": "3h", "name": "mine", "priority": 60})
    assert answer.status_code == 201
    run = answer.json()
    assert (run["name"], run["status"], run["priority"], run["position"]) == ("mine", "submitted", 60, 1)
    assert (run["hold"], run["held_until"], run["max_duration_s"]) == (None, None, 10800)
    place_all()
    start(placed_job(Run.objects.get()))
    run = api("GET", f"{RUNS}/mine").json()
    assert run["hold"] == {
        "host": "box-1",
        "address": "10.0.0.5",
        "here": False,
        "gpus": ["GPU-box-1-0", "GPU-box-1-1"],
        "lines": ["ssh 10.0.0.5", "export CUDA_VISIBLE_DEVICES=GPU-box-1-0,GPU-box-1-1"],
    }
    assert run["held_until"] > run["started_at"]
    assert api("GET", RUNS).json()["items"][0]["held_until"] == run["held_until"]


def test_a_hold_gets_more_time(project: Project, member: User, api: Api) -> None:
    make_host(gpus=1)
    name = api("POST", HOLDS, {"gpu": "1", "for": "1h"}).json()["name"]
    early = api("POST", f"{RUNS}/{name}/extend", {"for": "1h"})
    assert (early.status_code, "can be extended" in early.json()["detail"]) == (409, True)
    place_all()
    start(placed_job(Run.objects.get()))
    before = api("GET", f"{RUNS}/{name}").json()["held_until"]
    longer = api("POST", f"{RUNS}/{name}/extend", {"for": "90m"})
    assert (longer.status_code, longer.json()["max_duration_s"]) == (200, 9000)
    assert longer.json()["held_until"] > before
    assert longer.json()["events"][-1]["data"] == {"by_s": 5400, "total_s": 9000}
    refused = api("POST", f"{RUNS}/{name}/extend", {"for": "8d"})
    assert (refused.status_code, refused.json()["errors"][0]["loc"]) == (422, ["for"])


@pytest.mark.parametrize("body", [{}, {"gpu": "1"}, {"for": "3h"}, {"gpu": "1", "for": "x"}, {"gpus": 1, "for": "1h"}])
def test_an_invalid_hold_is_refused(project: Project, member: User, api: Api, body: dict[str, Any]) -> None:
    answer = api("POST", HOLDS, body)
    assert answer.status_code == 422
    assert answer.json()["detail"]
    assert not Run.objects.exists()


def test_members_cannot_extend_the_run_of_another_member(project: Project, member: User, api: Api) -> None:
    make_host()
    run = make_run(project, make_user("bob"), max_duration="1h")
    place_all()
    start(placed_job(run))
    assert api("POST", f"{RUNS}/{run.name}/extend", {"for": "1h"}).status_code == 403


def test_a_scheduled_run_shows_its_next_time(project: Project, member: User, api: Api) -> None:
    run = make_run(project, member, schedule={"cron": "0 2 * * *"})
    assert api("GET", f"{RUNS}/{run.name}").json()["next_at"][11:16] == "02:00"
