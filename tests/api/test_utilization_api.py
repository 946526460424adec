"""…/utilization, …/utilization/what-if, …/runs/{name}/keep, and the policy of a run."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.api.utilization import LedgerOut, WhatIfOut
from dstackweb.gpus.models import PolicyStop
from tests.api.conftest import Api
from tests.factories import make_host, make_run, place_all
from tests.gpus.past import past_run

pytestmark = pytest.mark.django_db
POLICY = {"min_gpu_utilization": 10, "time_window": "10m"}


def test_a_simulation_lists_the_runs_that_the_policy_would_have_stopped(
    api: Api, project: Project, member: User
) -> None:
    past_run(project, member, "idle", [[0] * 180])
    past_run(project, member, "busy", [[90] * 180])
    answer = api("POST", "projects/main/utilization/what-if", POLICY)
    found = answer.json()
    assert answer.status_code == 200
    assert found.keys() == WhatIfOut.model_fields.keys()
    assert found["policy"] == {"min_gpu_utilization": 10, "time_window_s": 600, "scope": "any", "warmup_s": 0}
    assert (found["runs"], found["samples"], found["left_out"]) == (2, 360, 0)
    (stop,) = found["stops"]
    assert (stop["run"], stop["user"], stop["gpus"]) == ("idle", "ada", 1)
    assert found["saved_gpu_hours"] == stop["gpu_hours"] == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize(
    ("wrong", "loc"),
    [
        ({"min_gpu_utilization": 101}, "min_gpu_utilization"),
        ({"time_window": "30s"}, "time_window"),
        ({"time_window": "soon"}, "time_window"),
        ({"warmup": "-1m"}, "warmup"),
        ({"scope": "some"}, "scope"),
        ({"action": "notify"}, "action"),
    ],
)
def test_an_invalid_policy_is_refused_with_its_location(
    api: Api, project: Project, wrong: dict[str, Any], loc: str
) -> None:
    answer = api("POST", "projects/main/utilization/what-if", {**POLICY, **wrong})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["loc"] == [loc]


def test_the_ledger_lists_stopped_runs_and_the_run_that_got_their_gpus_next(
    api: Api, project: Project, member: User
) -> None:
    now = timezone.now()
    run, following = make_run(project, member, "idle"), make_run(project, member, "train-7")
    PolicyStop.objects.create(
        project=project, run=run, run_name="idle", user=member, at=now - dt.timedelta(hours=2), min_gpu_utilization=10,
        time_window_s=1800, scope="any", low_since=now - dt.timedelta(hours=3), gpu_index=1, gpus=["GPU-a", "GPU-b"],
        until=now, price=1, next_run=following, next_at=now - dt.timedelta(hours=1),
    )  # fmt: skip
    found = api("GET", "projects/main/utilization").json()
    assert found.keys() == LedgerOut.model_fields.keys()
    assert (found["observe_only"], found["days"]) == (False, 30)
    assert found["stopped"] == {"runs": 1, "gpu_hours": pytest.approx(4), "usd": pytest.approx(2), "unknown": 0}
    (stop,) = found["stops"]
    assert (stop["run"], stop["user"], stop["gpus"], stop["next_run"]) == ("idle", "ada", 2, "train-7")


def test_managers_switch_policies_to_observe_only(api: Api, manager: Api, project: Project) -> None:
    assert api("PATCH", "projects/main/utilization", {"observe_only": True}).status_code == 403
    assert manager("PATCH", "projects/main/utilization", {"observe_only": True}).json()["observe_only"] is True
    assert api("GET", "projects/main/utilization").json()["observe_only"] is True
    assert manager("PATCH", "projects/main/utilization", {}).status_code == 422


def test_a_run_shows_the_status_of_its_utilization_policy(api: Api, project: Project, member: User) -> None:
    make_host(gpus=1)
    make_run(project, member, "asks", resources={"gpu": 1}, utilization_policy={**POLICY, "warmup": "5m"})
    assert api("GET", "projects/main/runs/asks").json()["policy"] is None
    place_all()
    found = api("GET", "projects/main/runs/asks").json()["policy"]
    assert (found["min_gpu_utilization"], found["time_window_s"], found["warmup_s"]) == (10, 600, 300)
    assert (found["source"], found["verdict"], found["stops_at"]) == (
        {"source": "run_file", "line": None},
        "unknown",
        None,
    )
    assert (found["kept_until"], found["keeps_left"], found["observe_only"]) == (None, 3, False)


def test_its_owner_keeps_a_run_with_a_reason(api: Api, manager: Api, project: Project, member: User) -> None:
    past_run(project, member, "idle", [[0] * 10], utilization_policy=POLICY)
    answer = api("POST", "projects/main/runs/idle/keep", {"reason": "debugging the loader"})
    assert answer.status_code == 200
    assert (answer.json()["keeps_left"], answer.json()["reason"]) == (2, "debugging the loader")
    found = manager("GET", "projects/main/runs/idle").json()["policy"]
    assert (found["kept_by"], found["kept_because"], found["keeps_left"]) == ("ada", "debugging the loader", 2)
    assert found["kept_until"] == answer.json()["until"]


def test_an_invalid_keep_is_refused(api: Api, stranger: Api, project: Project, member: User) -> None:
    past_run(project, member, "idle", [[0] * 10], utilization_policy=POLICY)
    past_run(project, member, "free", [[0] * 10])
    assert api("POST", "projects/main/runs/idle/keep", {"reason": " "}).status_code == 422
    assert api("POST", "projects/main/runs/idle/keep", {"reason": "why", "minutes": 0}).status_code == 422
    assert api("POST", "projects/main/runs/free/keep", {"reason": "why"}).status_code == 409
    assert stranger("POST", "projects/main/runs/idle/keep", {"reason": "why"}).status_code == 404


def test_strangers_see_nothing(stranger: Api, project: Project) -> None:
    assert stranger("GET", "projects/main/utilization").status_code == 404
    assert stranger("POST", "projects/main/utilization/what-if", POLICY).status_code == 404
