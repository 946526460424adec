"""GET …/queues/{q}/history and GET …/history."""

from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs import history, services, start_estimates
from dstackweb.runs.models import Run
from tests.api.conftest import Api

pytestmark = pytest.mark.django_db


def placed(project: Project, user: User, *waits: int, queue: str = "default", priority: int = 50) -> None:
    """Runs that start now after waiting so many seconds."""
    now, found = timezone.now(), services.ensure_queue(project, queue)
    history.count_placed(
        [
            Run(queue=found, user=user, priority=priority, queued_at=now - dt.timedelta(seconds=waited))
            for waited in waits
        ],
        now,
    )


def test_a_queues_history_has_one_series_and_total_per_priority_band(api: Api, project: Project, member: User) -> None:
    placed(project, member, 30, 30, 300)
    placed(project, member, 5000, priority=100)
    body = api("GET", "projects/main/queues/default/history").json()
    assert (body["queue"], body["days"], body["step"], body["zone"]) == ("default", 7, "hour", "UTC")
    assert [(band["low"], band["high"]) for band in body["bands"]] == [(0, 24), (25, 49), (50, 74), (75, 100)]
    assert all(len(band[name]) == len(body["times"]) for band in body["bands"] for name in ("placed", "wait_p90_s"))
    assert body["bands"][0]["total"] == {
        "placed": 0, "wait_median_s": None, "wait_p90_s": None, "wait_max_s": None, "length": None, "length_max": None,
    }  # fmt: skip
    assert 0 <= body["bands"][2]["total"]["wait_median_s"] <= 60
    assert body["bands"][3]["wait_max_s"][-1] == 5000
    assert (body["total"]["placed"], body["total"]["wait_max_s"]) == (4, 5000)
    assert body["all"]["placed"][-1] == 4


def test_days_and_steps_are_as_requested(api: Api, project: Project, member: User) -> None:
    placed(project, member, 30)
    path = "projects/main/queues/default/history"
    assert api("GET", f"{path}?days=30").json()["step"] == "day"
    assert len(api("GET", f"{path}?days=30").json()["times"]) == 30
    assert len(api("GET", f"{path}?days=7&step=day&tz=Europe/Berlin").json()["times"]) == 7
    assert api("GET", f"{path}?days=30&step=hour").json()["step"] == "hour"


@pytest.mark.parametrize(
    ("query", "loc"),
    [
        ("days=0", ["query", "days"]),
        ("days=91", ["query", "days"]),
        ("days=x", ["query", "days"]),
        ("step=week", ["query", "step"]),
        ("days=60&step=hour", ["step"]),
        ("tz=Nowhere", ["tz"]),
        ("tz=../../etc/passwd", ["tz"]),
        ("tz=Europe", ["tz"]),
    ],
)
def test_an_invalid_query_is_refused_with_the_parameters_location(
    api: Api, project: Project, query: str, loc: list[str]
) -> None:
    answer = api("GET", f"projects/main/queues/default/history?{query}")
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["loc"][-len(loc) :] == loc
    if loc == ["tz"]:
        assert answer.json()["detail"].startswith("no time zone is called")


def test_a_projects_history_is_the_sum_of_its_queues_and_names_each(api: Api, project: Project, member: User) -> None:
    placed(project, member, 30)
    placed(project, member, 30, 90, queue="night")
    body = api("GET", "projects/main/history?days=30").json()
    assert body["total"]["placed"] == 3
    assert [(each["queue"], each["total"]["placed"]) for each in body["queues"]] == [("default", 1), ("night", 2)]


def test_users_outside_the_project_get_404(stranger: Api, project: Project) -> None:
    assert stranger("GET", "projects/main/history").status_code == 404
    assert stranger("GET", "projects/main/queues/default/history").status_code == 404


@pytest.mark.xdist_group("openapi")
def test_the_openapi_description_has_the_history(api: Api) -> None:
    paths = api("GET", "openapi.json").json()["paths"]
    asked = paths["/api/v1/projects/{project}/queues/{name}/history"]["get"]["parameters"]
    assert {parameter["name"] for parameter in asked} == {"project", "name", "days", "step", "tz"}


def test_the_history_of_all_queues_has_the_record_of_expected_starts(api: Api, project: Project) -> None:
    assert api("GET", "projects/main/history").json()["expected_starts"] == []
    shown = start_estimates.ShownEstimate(1000.0, 600.0, 900.0, 1620.0, 1920.0)
    start_estimates.score([(shown, 1500.0), (shown, 1700.0)])
    assert api("GET", "projects/main/history").json()["expected_starts"] == [
        {"ahead_s": 900, "starts": 2, "by_p50": 0.5, "by_p90": 1.0, "factor_p50": 1.0, "factor_p90": 1.0}
    ]
