"""The usage page and exports: what they add up, and for whom."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs import services
from dstackweb.runs.models import Run, UsageDay
from tests.factories import join, make_host, make_project, make_run, make_user, place_all

SignIn = Callable[[User], Client]
pytestmark = pytest.mark.django_db
HOUR_MS = 3_600_000


def used(project: Project, user: User, hours: float, *, days_ago: int = 0, queue: str = "", **numbers: int) -> None:
    UsageDay.objects.create(
        project=project, user=user, queue=services.ensure_queue(project, queue or "default"),
        day=timezone.now().date() - dt.timedelta(days=days_ago), gpu_ms=int(hours * HOUR_MS), **numbers,
    )  # fmt: skip


def saved(client: Client, address: str) -> list[dict[str, str]]:
    answer: Any = client.get(address)
    assert answer.status_code == 200
    assert "attachment" in answer["Content-Disposition"]
    return list(csv.DictReader(io.StringIO(answer.getvalue().decode(), newline="")))


def lines(page: str) -> list[str]:
    """The first columns of the table."""
    found = re.findall(r'<span class="pg-name pg-c\d">([^<]*)</span></th><td class="num">([^<]*)</td>', page)
    return [f"{name} {hours}" for name, hours in found]


def test_usage_is_added_up_by_member_or_queue_within_the_range(
    project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    used(project, ann, 2, queue="night", done=1)
    used(project, ann, 1.5, days_ago=3)
    used(project, mia, 10, days_ago=20, micro_usd=12_340_000, failed=2)
    client = as_user(ann)
    page = client.get("/p/main/usage/?days=7").content.decode()
    assert lines(page) == ["ann 3.5"]
    page = client.get("/p/main/usage/").content.decode()
    assert lines(page) == ["mia 10.0", "ann 3.5"]
    assert "$12.34" in page
    assert "1 done, 2 failed, 0 terminated" in page
    page = client.get("/p/main/usage/?by=queue").content.decode()
    assert lines(page) == ["default 11.5", "night 2.0"]
    page = client.get("/p/main/usage/?sort=name").content.decode()
    assert lines(page) == ["ann 3.5", "mia 10.0"]
    assert 'aria-sort="ascending"><a href="?days=30&amp;by=member&amp;sort=-name">' in page


def test_a_month_is_picked_among_those_with_data(project: Project, ann: User, as_user: SignIn) -> None:
    used(project, ann, 7, days_ago=70)
    month = (timezone.now() - dt.timedelta(days=70)).strftime("%Y-%m")
    page = as_user(ann).get("/p/main/usage/").content.decode()
    assert lines(page) == []
    assert f'<option value="{month}">' in page
    page = as_user(ann).get(f"/p/main/usage/?month={month}").content.decode()
    assert lines(page) == ["ann 7.0"]
    assert f'<option value="{month}" selected>' in page


@pytest.mark.parametrize("query", ["?days=x", "?month=2026-13", "?month=0000-01", "?by=x&sort=x", "?days=-1&all=yes"])
def test_any_address_has_a_page(project: Project, ann: User, as_user: SignIn, query: str) -> None:
    used(project, ann, 1)
    assert lines(as_user(ann).get(f"/p/main/usage/{query}").content.decode()) == ["ann 1.0"]


def test_the_last_month_that_there_is_has_a_page_and_a_file(project: Project, ann: User, as_user: SignIn) -> None:
    used(project, ann, 1)
    assert lines(as_user(ann).get("/p/main/usage/?month=9999-12").content.decode()) == []
    assert saved(as_user(ann), "/p/main/usage/usage.csv?month=9999-12") == []


def test_idle_is_a_share_of_what_was_measured_and_the_rest_is_unknown(
    project: Project, ann: User, as_user: SignIn
) -> None:
    used(project, ann, 10, measured_ms=5 * HOUR_MS, idle_ms=HOUR_MS)
    page = as_user(ann).get("/p/main/usage/").content.decode()
    assert "20 %" in page
    assert "50 % unknown" in page


def test_gpu_time_without_samples_has_no_idle_share(project: Project, ann: User, as_user: SignIn) -> None:
    used(project, ann, 10)
    assert "no GPU samples" in as_user(ann).get("/p/main/usage/").content.decode()


def test_the_bars_of_a_day_add_up_and_the_least_used_are_one(project: Project, ann: User, as_user: SignIn) -> None:
    for number in range(12):
        used(project, join(project, make_user(f"u{number:02}")), 12 - number)
    page = as_user(ann).get("/p/main/usage/?days=7").content.decode()
    heights = [float(text) for text in re.findall(r'<rect class="pg-c\d"[^>]*height="([\d.]+)"', page)]
    assert len(heights) == 8
    assert sum(heights) == pytest.approx(100, abs=0.1)
    assert "others 15.0" in page


def test_members_see_their_project_and_deployment_admins_all(project: Project, ann: User, as_user: SignIn) -> None:
    elsewhere = make_project("elsewhere")
    eve = join(elsewhere, make_user("eve"))
    used(project, ann, 1)
    used(elsewhere, eve, 5)
    for query in ("", "?all=yes&by=project"):
        page = as_user(ann).get(f"/p/main/usage/{query}").content.decode()
        assert lines(page) == ["ann 1.0"]
        assert "eve" not in page
        assert [row["member"] for row in saved(as_user(ann), f"/p/main/usage/usage.csv{query}")] == ["ann"]
    assert as_user(ann).get("/p/elsewhere/usage/").status_code == 404
    root = make_user("root", is_superuser=True)
    assert lines(as_user(root).get("/p/main/usage/?all=yes&by=project").content.decode()) == [
        "elsewhere 5.0",
        "main 1.0",
    ]
    assert lines(as_user(root).get("/p/main/usage/?all=yes&by=queue").content.decode())[0] == "elsewhere/default 5.0"
    rows = saved(as_user(root), "/p/main/usage/usage.csv?all=yes&by=project")
    assert {row["project"]: row["gpu_hours"] for row in rows} == {"elsewhere": "5.0", "main": "1.0"}


def test_usage_is_exported_per_month(project: Project, ann: User, as_user: SignIn) -> None:
    used(project, ann, 1.5)
    used(project, ann, 2, days_ago=85, micro_usd=1_500_000)
    rows = saved(as_user(ann), "/p/main/usage/usage.csv?days=90")
    assert [(row["member"], row["gpu_hours"], row["usd"]) for row in rows] == [
        ("ann", "2.0", "1.5"),
        ("ann", "1.5", "0.0"),
    ]
    assert rows[0]["period"] < rows[1]["period"]
    answer: Any = as_user(ann).get("/p/main/usage/usage.json?days=90")
    assert [row["period"] for row in json.loads(answer.getvalue())] == [row["period"] for row in rows]


def test_runs_are_exported_with_the_filters_of_the_list(
    project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    make_host(gpus=1)
    make_run(project, ann, "train-1", resources={"gpu": 1})
    make_run(project, mia, "eval-1", role="manager")
    place_all()
    rows = saved(as_user(ann), "/p/main/runs/runs.csv")
    assert [row["name"] for row in rows] == ["eval-1", "train-1"]
    assert rows[1]["status"] == "provisioning"
    assert [row["name"] for row in saved(as_user(ann), "/p/main/runs/runs.csv?member=mia")] == ["eval-1"]
    assert [row["name"] for row in saved(as_user(ann), "/p/main/runs/runs.csv?q=train&sort=oldest")] == ["train-1"]
    assert saved(as_user(ann), "/p/main/runs/runs.csv?status=failed") == []
    assert as_user(ann).get("/p/main/runs/runs.xml").status_code == 404


def test_a_queue_is_exported_in_order_beyond_one_page(
    project: Project, ann: User, as_user: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstackweb.wording.tables.AT_ONCE", 2)
    for number in range(5):
        make_run(project, ann, f"run-{number}", priority=10 + number)
    rows = saved(as_user(ann), "/p/main/queues/default/queue.csv")
    assert [(row["position"], row["name"]) for row in rows] == [(str(5 - n), f"run-{n}") for n in (4, 3, 2, 1, 0)]
    assert all(row["reason_detail"] for row in rows)


def test_history_is_exported(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    make_run(project, ann, "train-1")
    place_all()
    for query in ("", "?queue=default", "?days=30"):
        rows = saved(as_user(ann), f"/p/main/history/history.csv{query}")
        assert [(row["queue"], row["placed"], row["priority_low"]) for row in rows] == [("default", "1", "50")]
    assert as_user(ann).get("/p/main/history/history.csv?queue=none").status_code == 404


def test_an_export_of_many_runs_asks_the_same_for_each_page_of_them(
    project: Project, ann: User, as_user: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstackweb.wording.tables.AT_ONCE", 50)
    first = make_run(project, ann, "train-0")

    def more(number: int) -> None:
        names = (f"train-{number}-{place}" for place in range(number))
        Run.objects.bulk_create(
            Run(
                project=project, queue=first.queue, user=ann, name=name, status="done", shape=first.shape,
                spec=first.spec, seniority_us=1, rank=1,
            )
            for name in names
        )  # fmt: skip

    def queries(rows: int) -> int:
        with CaptureQueriesContext(connection) as asked:
            assert len(saved(as_user(ann), "/p/main/runs/runs.csv")) == rows
        return len(asked)

    more(99)
    two_pages = queries(100)
    more(100)
    four_pages = queries(200)
    more(200)
    eight_pages = queries(400)
    assert eight_pages - four_pages == 2 * (four_pages - two_pages)
    assert (four_pages - two_pages) / 2 <= 3
