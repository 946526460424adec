"""Progress over the API: pages of prefixes, groups, tasks and failures, of runs and of projects."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.api.progress import FailuresOut, GroupsOut, ProgressOut, TaskListOut
from dstackweb.progress import selectors
from dstackweb.progress.models import Reporter, Scope, Task, TaskFailure, TaskGroup, TaskPrefix
from dstackweb.progress.states import CODES, TaskState
from dstackweb.runs.models import Run
from tests.api.conftest import Api
from tests.factories import make_run, scraper
from tests.progress.rows import SEEN_S, add_group, make_scope

pytestmark = pytest.mark.django_db
NOTHING = {"memory": 0, "erred": 0, "released": 0, "processing": 0, "queued": 0, "no_worker": 0, "waiting": 0}


def now_ms() -> int:
    return int(timezone.now().timestamp() * 1000)


@pytest.fixture
def run(project: Project, member: User) -> Run:
    return make_run(project, member, "sweep")


@pytest.fixture
def scope(project: Project, run: Run) -> Scope:
    """The tasks of the run's first attempt."""
    scope = make_scope(project, run.pk, 1)
    add_group(scope, "eval", "eval-a", now_ms() - 90_000, memory=1)
    of = add_group(scope, "train", "train-a", now_ms(), memory=30, erred=1, processing=2, waiting=7, forgotten=10)
    add_group(scope, "train", "train-b", now_ms(), processing=1)
    reporter = Reporter.objects.create(scope=scope, name="r")
    for number in range(3):
        Task.objects.create(
            scope=scope, prefix=of.prefix, group=of, reporter=reporter, key=f"train-{number}",
            state=CODES[TaskState.PROCESSING], seq=1, since_ms=now_ms(),
        )  # fmt: skip
        TaskFailure.objects.create(
            scope=scope, prefix=of.prefix, key=f"bad-{number}", group="train-a", message=f"no {number}", seq=1,
            at_ms=now_ms() - 1000 * number,
        )  # fmt: skip
    return scope


def fetch(api: Api, path: str) -> Any:
    answer = api("GET", f"projects/main/{path}")
    assert answer.status_code == 200, answer.content
    return answer.json()


def test_a_runs_tasks_by_prefix_active_ones_first(scope: Scope, api: Api) -> None:
    found = fetch(api, "runs/sweep/progress")
    ProgressOut.model_validate(found, extra="forbid")
    assert (found["run"], found["status"]) == ("sweep", "submitted")
    assert (found["attempt"], found["ended"], found["version"], found["count"]) == (1, False, 3, 2)
    train, evaluation = found["prefixes"]
    assert (train["name"], evaluation["name"]) == ("train", "eval")
    assert train["states"] == {**NOTHING, "memory": 30, "erred": 1, "processing": 3, "waiting": 7}
    assert (train["total"], train["forgotten"], train["finished"], train["groups"]) == (51, 10, 41, 2)
    assert {word: n for word, n in train["outcomes"].items() if n} == {"done": 30, "failed": 1, "forgotten": 10}
    assert train["rate_low"] < train["rate_per_s"] < train["rate_high"]
    assert train["left_s"] == pytest.approx(SEEN_S * 10 / 41, rel=0.2)
    assert train["left_low_s"] < train["left_s"] < train["left_high_s"]
    assert evaluation["left_s"] is None
    assert found["total"]["total"] == 52
    assert found["total"]["name"] == ""


def test_the_outcome_of_forgotten_tasks_is_kept(project: Project, run: Run, api: Api) -> None:
    counts = {"memory": 1, "released_done": 2, "forgotten_done": 3, "erred": 4, "forgotten_failed": 5, "released": 6}
    add_group(make_scope(project, run.pk, 1), "score", "score", **counts)
    [score] = fetch(api, "runs/sweep/progress")["prefixes"]
    assert score["states"] == {**NOTHING, "memory": 1, "erred": 4, "released": 8}
    assert (score["forgotten"], score["finished"], score["total"]) == (8, 21, 21)
    assert score["outcomes"] == {
        "done": 6, "released_done": 2, "forgotten_done": 3, "failed": 9, "released_failed": 0, "forgotten_failed": 5,
        "released": 6, "forgotten": 0,
    }  # fmt: skip
    Task.objects.create(
        scope=Scope.objects.get(run_id=run.pk),
        prefix=TaskPrefix.objects.get(name="score"),
        group=TaskGroup.objects.get(name="score"),
        reporter_id=1,
        key="score-1",
        state=CODES[TaskState.RELEASED_FAILED],
        seq=1,
        since_ms=now_ms(),
    )
    [task] = fetch(api, "runs/sweep/progress/tasks?prefix=score&group=score")["items"]
    assert (task["state"], task["outcome"]) == ("released", "failed")


def test_pages_and_orders(scope: Scope, api: Api) -> None:
    first = fetch(api, "runs/sweep/progress?limit=1&order=name")
    assert [prefix["name"] for prefix in first["prefixes"]] == ["eval"]
    second = fetch(api, f"runs/sweep/progress?limit=1&order=name&cursor={first['next']}")
    assert [prefix["name"] for prefix in second["prefixes"]] == ["train"]
    assert second["next"] is None
    assert [prefix["name"] for prefix in fetch(api, "runs/sweep/progress?find=VAL")["prefixes"]] == ["eval"]


def test_where_nothing_has_finished_for_long_the_range_is_wide(project: Project, run: Run, api: Api) -> None:
    scope = make_scope(project, run.pk, 1)
    add_group(scope, "long", "long", now_ms() - 1_500_000, memory=1, processing=5)
    [prefix] = fetch(api, "runs/sweep/progress")["prefixes"]
    assert prefix["left_s"] is not None
    assert prefix["left_high_s"] > 1000 + prefix["left_s"]
    assert prefix["left_low_s"] < 0.5 * prefix["left_s"]


def test_an_ended_attempt_is_reported_on_request(scope: Scope, project: Project, run: Run, api: Api) -> None:
    Scope.objects.filter(pk=scope.pk).update(ended_ms=1)
    add_group(make_scope(project, run.pk, 2), "train", "train-a", processing=1)
    assert fetch(api, "runs/sweep/progress")["total"]["total"] == 1
    found = fetch(api, "runs/sweep/progress?attempt=1")
    assert (found["attempt"], found["ended"], found["total"]["total"]) == (1, True, 52)


def test_a_run_with_as_many_prefixes_as_are_counted_is_full(
    scope: Scope, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not fetch(api, "runs/sweep/progress")["full"]
    monkeypatch.setattr(selectors, "PREFIXES_MAX", 2)
    assert fetch(api, "runs/sweep/progress")["full"]
    assert not fetch(api, "progress")["full"]


def test_a_run_without_reports_has_empty_progress(run: Run, api: Api) -> None:
    found = fetch(api, "runs/sweep/progress")
    ProgressOut.model_validate(found, extra="forbid")
    assert (found["prefixes"], found["attempt"], found["version"]) == ([], None, 0)
    assert found["total"]["states"] == NOTHING
    assert fetch(api, "runs/sweep/progress/failures") == {"items": [], "next": None}


def test_groups_failures_and_tasks_of_a_prefix(scope: Scope, api: Api) -> None:
    groups = fetch(api, "runs/sweep/progress/groups?prefix=train")
    GroupsOut.model_validate(groups, extra="forbid")
    assert [group["name"] for group in groups["items"]] == ["train-a", "train-b"]
    groups = fetch(api, "runs/sweep/progress/groups?prefix=train&only=failed")
    assert [(group["name"], group["states"]["erred"]) for group in groups["items"]] == [("train-a", 1)]

    failures = fetch(api, "runs/sweep/progress/failures?limit=2")
    FailuresOut.model_validate(failures, extra="forbid")
    rest = fetch(api, f"runs/sweep/progress/failures?limit=2&cursor={failures['next']}&prefix=train")
    messages = [failed["message"] for failed in failures["items"] + rest["items"]]
    assert (messages, rest["next"]) == (["no 0", "no 1", "no 2"], None)
    assert fetch(api, "runs/sweep/progress/failures?prefix=eval")["items"] == []

    tasks = fetch(api, "runs/sweep/progress/tasks?prefix=train&group=train-a")
    TaskListOut.model_validate(tasks, extra="forbid")
    assert [(task["key"], task["state"]) for task in tasks["items"]] == [
        (f"train-{number}", "processing") for number in range(3)
    ]
    assert dt.datetime.fromisoformat(tasks["items"][0]["since"]).utcoffset() == dt.timedelta(0)


def test_a_projects_runs_count_by_the_prefix_of_their_names(project: Project, api: Api) -> None:
    scope, _ = Scope.objects.get_or_create(project=project, run_id=0, attempt=0)
    add_group(scope, "sweep", "sweep-1", processing=1, waiting=1)
    found = fetch(api, "progress")
    ProgressOut.model_validate(found, extra="forbid")
    assert [(prefix["name"], prefix["total"]) for prefix in found["prefixes"]] == [("sweep", 2)]
    assert (found["run"], found["id"], found["status"], found["attempt"]) == (None, None, None, None)
    assert [group["name"] for group in fetch(api, "progress/groups?prefix=sweep")["items"]] == ["sweep-1"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("runs/none/progress", 404),
        ("runs/sweep/progress/groups?prefix=none", 404),
        ("runs/sweep/progress/groups", 422),
        ("runs/sweep/progress/failures?prefix=none", 404),
        ("runs/sweep/progress/tasks?prefix=train&group=none", 404),
        ("progress/groups?prefix=none", 404),
        ("runs/sweep/progress?cursor=1", 422),
        ("runs/sweep/progress?cursor=1.x", 422),
        ("runs/sweep/progress?order=size", 422),
        ("runs/sweep/progress?limit=501", 422),
        ("runs/sweep/progress?attempt=0", 422),
    ],
)
def test_missing_and_invalid_resources_are_refused(scope: Scope, api: Api, path: str, status: int) -> None:
    answer = api("GET", f"projects/main/{path}")
    assert answer.status_code == status
    assert answer.json()["detail"]


@pytest.mark.parametrize("path", ["progress", "runs/sweep/progress", "runs/sweep/progress/failures"])
def test_strangers_see_nothing(scope: Scope, stranger: Api, path: str) -> None:
    assert stranger("GET", f"projects/main/{path}").status_code == 404
    assert Api(None)("GET", f"projects/main/{path}").status_code == 401


def test_it_costs_as_many_queries_with_many_groups_as_with_few(scope: Scope, api: Api) -> None:
    counted = []
    fetch(api, "runs/sweep/progress")  # notes that the token was used
    for number in range(40):
        add_group(scope, f"p{number}", f"g{number}", processing=1)
        if number in (0, 39):
            with CaptureQueriesContext(connection) as queries:
                fetch(api, "runs/sweep/progress")
            counted.append(len(queries))
    assert counted[0] == counted[1]


def scrape() -> dict[str, float]:
    text = scraper().get("/metrics").content.decode()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_metrics_count_tasks_of_running_attempts(scope: Scope, project: Project, member: User) -> None:
    other = make_run(project, member, "over")
    add_group(make_scope(project, other.pk, 1, ended_ms=5), "x", "x", processing=2)
    found = scrape()
    assert found['dstackweb_tasks{project="main",state="processing"}'] == 3
    assert found['dstackweb_tasks{project="main",state="forgotten"}'] == 10
    assert found['dstackweb_tasks_ended{outcome="done",project="main"}'] == 31
    assert found['dstackweb_task_groups{project="main"}'] == 3
    assert not any("sweep" in name or "over" in name for name in found)
    assert found["dstackweb_task_attempts_unsettled"] == 1


def test_a_scrape_costs_no_more_queries_with_many_runs(scope: Scope, project: Project, member: User) -> None:
    counted = []
    for number in range(5):
        add_group(make_scope(project, make_run(project, member).pk, 1), "x", "x", processing=1)
        if number in (0, 4):
            with CaptureQueriesContext(connection) as queries:
                scrape()
            counted.append(len(queries))
    assert counted[0] == counted[1]


@pytest.mark.parametrize(
    "path", ["progress?find=%00", "runs/sweep/progress?find=%00%25", "runs/sweep/progress/groups?prefix=%00"]
)
def test_characters_that_are_invalid_in_names_are_refused_without_an_error(scope: Scope, api: Api, path: str) -> None:
    assert api("GET", f"projects/main/{path}").status_code in (200, 404, 422)
