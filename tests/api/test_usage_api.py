"""Usage and exports over the API."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.accounts.services import create_token
from dstackweb.runs import services
from dstackweb.runs.models import UsageDay
from tests.factories import join, make_host, make_project, make_run, make_user, place_all

pytestmark = pytest.mark.django_db
HOUR_MS = 3_600_000


def api(user: User) -> Client:
    return Client(headers={"Authorization": f"Bearer {create_token(user, 'test')[1]}"})


@pytest.fixture
def ann() -> User:
    project = make_project("main")
    user = join(project, make_user("ann"), "viewer")
    other = make_project("other")
    for of_project, who, hours in ((project, user, 2), (other, join(other, make_user("eve")), 3)):
        UsageDay.objects.create(
            project=of_project, user=who, queue=services.ensure_queue(of_project), day=timezone.now().date(),
            gpu_ms=hours * HOUR_MS, measured_ms=HOUR_MS, idle_ms=HOUR_MS // 2, micro_usd=1_250_000, done=1,
        )  # fmt: skip
    return user


def test_a_projects_usage_has_totals_and_days(ann: User) -> None:
    found = api(ann).get("/api/v1/projects/main/usage?days=3").json()
    assert found["total"] == {
        "gpu_hours": 2, "measured_gpu_hours": 1, "idle_gpu_hours": 0.5, "idle_share": 0.5, "cpu_hours": 0, "usd": 1.25,
        "done": 1, "failed": 0, "terminated": 0,
    }  # fmt: skip
    assert [(item["name"], item["gpu_hours_by_day"]) for item in found["items"]] == [("ann", [0, 0, 2])]
    assert found["last"] == timezone.now().date().isoformat()


def test_all_projects_are_for_deployment_admins(ann: User) -> None:
    for path in ("/api/v1/usage", "/api/v1/usage/export"):
        assert api(ann).get(path).status_code == 403
    assert api(ann).get("/api/v1/projects/other/usage").status_code == 404
    root: Any = api(make_user("root", is_superuser=True))
    assert [item["name"] for item in root.get("/api/v1/usage").json()["items"]] == ["other", "main"]
    rows = json.loads(root.get("/api/v1/usage/export?by=member").getvalue())
    assert [(row["project"], row["member"]) for row in rows] == [("main", "ann"), ("other", "eve")]


@pytest.mark.parametrize("query", ["month=2026-13", "month=0000-01", "days=0", "by=project", "format=xml"])
def test_a_wrong_query_is_refused_with_its_place(ann: User, query: str) -> None:
    answer = api(ann).get(f"/api/v1/projects/main/exports/usage?{query}")
    assert answer.status_code == 422
    assert answer.json()["errors"]


def test_exports_have_the_rows_of_the_lists(ann: User) -> None:
    project = Project.objects.get(name="main")
    member = join(project, make_user("bob"))
    make_host(cpus=2)
    make_run(project, member, "train-1", resources={"cpu": 2, "memory": "1GB"})
    place_all()
    make_run(project, member, "waits", resources={"cpu": 2, "memory": "1GB"})
    client: Any = api(ann)

    def table(path: str) -> list[dict[str, str]]:
        answer = client.get(f"/api/v1/projects/main/exports/{path}")
        assert answer["Content-Type"] == "text/csv; charset=utf-8"
        return list(csv.DictReader(io.StringIO(answer.getvalue().decode(), newline="")))

    assert [row["name"] for row in table("runs?format=csv")] == ["waits", "train-1"]
    assert [row["name"] for row in table("runs?format=csv&status=submitted&user=bob&q=wai")] == ["waits"]
    assert table("runs?format=csv&until=2020-01-01T00:00:00Z") == []
    assert table("runs?format=csv&since=2020-01-01T00:00:00") != []
    assert [(row["name"], row["position"], row["user"]) for row in table("queues/default?format=csv")] == [
        ("waits", "1", "bob")
    ]
    assert [row["placed"] for row in table("history?format=csv")] == ["1"]
    listed = client.get("/api/v1/projects/main/runs").json()["items"]
    exported = json.loads(client.get("/api/v1/projects/main/exports/runs").getvalue())
    for run, row in zip(listed, exported, strict=True):
        starts = run.pop("starts")
        assert run.items() <= row.items()
        assert row["starts_basis"] == (starts and starts["basis"])
    assert client.get("/api/v1/projects/other/exports/runs").status_code == 404
    assert client.get("/api/v1/projects/main/exports/queues/none").status_code == 404
