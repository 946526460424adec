"""Lists are made straight of columns, unchecked on their way out: they say what a run's own answer says."""

from __future__ import annotations

import pytest
from django.utils import timezone
from pydantic import TypeAdapter

from dstackweb.accounts.models import Project, User
from dstackweb.api.queue_schemas import QueueItem, QueueOut
from dstackweb.api.run_schemas import RunsOut
from dstackweb.runs import holds
from dstackweb.runs.models import Run, Verdict
from dstackweb.runs.row_fields import RunRow
from dstackweb.scheduler.passes import forecast_pass
from tests.api.conftest import Api
from tests.factories import make_host, make_run, place_all, placed_job, start

pytestmark = pytest.mark.django_db


@pytest.fixture
def runs(project: Project, member: User) -> list[Run]:
    """One of each kind: started, a hold that has begun, waiting for two reasons, and ended."""
    make_host(gpus=2)
    running, hold = (
        make_run(project, member),
        holds.submit_hold(project, member, "member", holds.HoldRequest("2h", gpu="1")),
    )
    place_all()
    for run in (running, hold):
        start(placed_job(run))
    waiting = [make_run(project, member, resources=resources) for resources in ({"cpu": 9}, {"gpu": 2})]
    place_all()
    forecast_pass.refresh()
    ended = make_run(project, member)
    Run.objects.filter(pk=ended.pk).update(status="failed", exit_code=3, ended_at=timezone.now(), status_message="oh")
    return [running, hold, *waiting, ended]


def test_runs_are_listed_as_each_of_them_answers(runs: list[Run], api: Api) -> None:
    answer = api("GET", "projects/main/runs").json()
    assert set(answer) == set(RunsOut.model_fields)
    assert [item["name"] for item in answer["items"]] == [run.name for run in reversed(runs)]
    for item in answer["items"]:
        assert list(item) == list(RunRow.sent_fields())
        TypeAdapter(RunRow).validate_python(item | {"pk": 0, "status_detail": {}, "start_data": {}}, extra="forbid")
        alone = api("GET", f"projects/main/runs/{item['id']}").json()
        assert item == {key: alone[key] for key in item}
    assert sum(item["held_until"] is not None for item in answer["items"]) == 1


def test_the_queue_is_listed_as_each_of_its_runs_answers(runs: list[Run], api: Api) -> None:
    answer = api("GET", "projects/main/queues/default").json()
    assert [item["reason"] for item in answer["items"]] == ["impossible", "waiting_for_capacity"]
    assert list(answer) == list(QueueOut.model_fields)
    assert [item["starts"]["basis"] for item in answer["items"]] == ["impossible", "max_duration"]
    assert [item["starts"]["p90"] is None for item in answer["items"]] == [True, False]
    for item in answer["items"]:
        assert [*item, "folded"] == list(QueueItem.sent_fields())
        TypeAdapter(QueueItem).validate_python(
            item | {"reason_data": {}, "start_data": {}, "shape": ""}, extra="forbid"
        )
        alone = api("GET", f"projects/main/runs/{item['id']}").json()
        assert item == {key: (alone | alone["factors"])[key] for key in item}


def test_runs_are_listed_by_queue_and_time_of_submission(runs: list[Run], project: Project, api: Api) -> None:
    def listed(query: str) -> set[str]:
        return {run["id"] for run in api("GET", f"projects/main/runs?limit=500&{query}").json()["items"]}

    every = {str(run.uid) for run in runs}
    Run.objects.filter(pk=runs[0].pk).update(submitted_at="2025-01-02T12:00Z")
    old = {str(runs[0].uid)}
    assert listed("queue=default") == every
    assert listed("queue=nowhere") == set()
    assert listed("until=2025-01-03") == listed("since=2025-01-02T12:00:00Z&until=2025-01-02T12:00:01%2B00:00") == old
    assert listed("since=2025-01-03") == every - old
    assert api("GET", "projects/main/runs?since=yesterday").status_code == 422


def test_pages_of_runs_join_to_the_whole_list_with_and_without_a_filter(runs: list[Run], api: Api) -> None:
    newest_first = [run.name for run in reversed(runs)]
    for asked in ("", "&user=" + runs[0].user.username):
        seen, cursor = [], ""
        while True:
            page = api("GET", f"projects/main/runs?limit=2{asked}{cursor}").json()
            seen += [item["name"] for item in page["items"]]
            if page["next"] is None:
                break
            cursor = f"&cursor={page['next']}"
        assert seen == newest_first


@pytest.mark.parametrize(("cursor", "found"), [(0, 0), (-1, 0), (-(10**30), 0), (10**30, 5)])
def test_a_cursor_of_any_size_is_a_place_in_the_list(runs: list[Run], api: Api, cursor: int, found: int) -> None:
    assert len(api("GET", f"projects/main/runs?cursor={cursor}").json()["items"]) == found


def test_a_reason_that_holds_up_the_whole_queue_is_shown_for_each_run_that_could_start_without_it(
    runs: list[Run], api: Api, project: Project
) -> None:
    queue = runs[0].queue
    Verdict.objects.create(queue=queue, shape="", reason="queue_limit", data={"code": "max_gpus", "limit": 2})
    items = api("GET", "projects/main/queues/default").json()["items"]
    assert {item["reason"] for item in items} == {"impossible", "queue_limit"}
    type(queue).objects.filter(pk=queue.pk).update(paused=True)
    items = api("GET", "projects/main/queues/default").json()["items"]
    assert {item["reason"] for item in items} == {"impossible", "queue_paused"}
