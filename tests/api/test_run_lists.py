"""However many jobs and events a run has, asking costs the same: the newest come with it, lists have the rest."""

from __future__ import annotations

import uuid

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.backends.hosts.inventory import ensure_embedded_backend
from dstackweb.runs import selectors
from dstackweb.runs.models import Job, Run, RunEvent
from tests.api.conftest import Api
from tests.factories import make_run
from tests.web.conftest import HTMX


@pytest.fixture
def run(project: Project, member: User) -> Run:
    """A run with seven events and three attempts of two nodes."""
    run = make_run(project, member, "long")
    RunEvent.objects.bulk_create(RunEvent(run=run, kind="priority", data={"from": n, "to": n + 1}) for n in range(6))
    backend = ensure_embedded_backend()
    Job.objects.bulk_create(
        Job(id=uuid.uuid4(), run=run, attempt=attempt, node=node, backend=backend)
        for attempt in (1, 2, 3) for node in (0, 1)
    )  # fmt: skip
    return run


def pages(api: Api, path: str, limit: int) -> list[dict]:
    """All items, page by page."""
    items: list[dict] = []
    cursor = ""
    while True:
        page = api("GET", f"{path}?limit={limit}{cursor}").json()
        assert len(page["items"]) <= limit
        items += page["items"]
        if page["next"] is None:
            return items
        cursor = f"&cursor={page['next']}"


def test_a_run_of_ordinary_length_comes_with_all_its_jobs_and_events(api: Api, run: Run) -> None:
    found = api("GET", "projects/main/runs/long").json()
    assert [event["kind"] for event in found["events"]] == ["submitted"] + ["priority"] * 6
    assert [(job["attempt"], job["node"]) for job in found["jobs"]] == [(3, 0), (3, 1), (2, 0), (2, 1), (1, 0), (1, 1)]
    assert (found["jobs_next"], found["events_next"]) == (None, None)


def test_a_long_run_links_to_the_rest_of_its_lists(api: Api, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selectors.jobs_of, "__defaults__", (4, None))
    monkeypatch.setattr(selectors.events_of, "__defaults__", (3, None))
    for page, limit in (("jobs_page", 4), ("events_page", 3)):
        monkeypatch.setattr(f"dstackweb.api.run_schemas.{page}.__defaults__", (limit, "" if limit == 4 else None))
    found = api("GET", "projects/main/runs/long").json()
    assert [event["data"]["to"] for event in found["events"]] == [4, 5, 6]
    rest = api("GET", f"projects/main/runs/long/events?cursor={found['events_next']}").json()
    assert [event["data"].get("to") for event in rest["items"]] == [3, 2, 1, None]
    assert rest["next"] is None
    assert len(found["jobs"]) == 4
    rest = api("GET", f"projects/main/runs/long/jobs?cursor={found['jobs_next']}").json()
    assert [(job["attempt"], job["node"]) for job in rest["items"]] == [(1, 0), (1, 1)]


@pytest.mark.parametrize("limit", [1, 2, 3, 6, 7])
def test_pages_of_jobs_and_events_join_to_all_of_them(api: Api, run: Run, limit: int) -> None:
    jobs = pages(api, "projects/main/runs/long/jobs", limit)
    assert [(job["attempt"], job["node"]) for job in jobs] == [(3, 0), (3, 1), (2, 0), (2, 1), (1, 0), (1, 1)]
    events = pages(api, "projects/main/runs/long/events", limit)
    assert [event["data"].get("to") for event in events] == [6, 5, 4, 3, 2, 1, None]


@pytest.mark.parametrize("path", ["jobs?cursor=x", "jobs?cursor=1", "events?cursor=x", "events?limit=0"])
def test_a_forged_cursor_is_refused(api: Api, run: Run, path: str) -> None:
    assert api("GET", f"projects/main/runs/long/{path}").status_code == 422


def test_the_page_of_a_long_run_states_that_it_shows_the_newest(
    run: Run, api: Api, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstackweb.web.runs.views.SHOWN_AT_ONCE", 4)
    api.client.force_login(member)
    page = api.client.get("/p/main/runs/long/", headers=HTMX).content.decode()
    assert page.count('id="event-') == 4
    assert page.count('id="job-') == 4
    assert f"GET …/runs/{run.uid}/events" in page
    assert f"GET …/runs/{run.uid}/jobs" in page
