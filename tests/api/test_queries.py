"""A list costs the same number of queries, however long it is."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import NotFound
from dstackweb.runs.selectors import find_runs
from dstackweb.runs.services import stop
from tests.api.conftest import Api
from tests.factories import join, make_host, make_project, make_run, make_user, place_all


def grow(project: Project, member: User, index: int) -> None:
    """One more of everything, of another user's and in another project."""
    make_host(f"box-{index}", gpus=2)
    join(make_project(f"project-{index}"), member)
    user = join(project, make_user(f"member-{index}"))
    make_run(project, user, f"gang-{index}", nodes=2, resources={"gpu": 1})
    make_run(project, user, f"waits-{index}", resources={"cpu": 1000 + index})
    place_all()


LISTS = (
    "projects",
    "hosts",
    "projects/main/runs",
    "projects/main/runs?status=submitted&status=provisioning",
    "projects/main/queues/default",
    "projects/main/runs/gang-0",
)


def test_a_list_of_seven_costs_no_more_queries_than_a_list_of_one(api: Api, project: Project, member: User) -> None:
    counted: list[dict[str, int]] = []
    api("GET", "projects")  # notes that the token was used
    for index in range(7):
        grow(project, member, index)
        if index in (0, 6):
            counted.append({})
            for path in LISTS:
                with CaptureQueriesContext(connection) as queries:
                    assert api("GET", path).status_code == 200
                counted[-1][path] = len(queries)
    assert counted[0] == counted[1]


def test_a_submit_locks_its_queue_for_few_messages(api: Api, project: Project, member: User) -> None:
    """Other submits to the queue wait for so long; what can be read before or after is."""
    body = {"config": {"type": "task", "name": "train-1", "commands": ["true"]}}
    assert api("POST", "projects/main/runs", body).status_code == 201
    body["config"]["name"] = "train-2"
    with CaptureQueriesContext(connection) as queries:
        assert api("POST", "projects/main/runs", body).status_code == 201
    sent = [query["sql"].split()[0] for query in queries if "savepoint" not in query["sql"].lower()]
    locked = sent.index("UPDATE")
    one_by_one = connection.vendor == "sqlite"
    assert sent[:locked] == ["SELECT"] * 3
    assert sent[locked:].index("SELECT") <= (9 if one_by_one else 5), sent
    assert len(sent) <= (15 if one_by_one else 11), sent


def test_runs_are_found_by_id_and_by_newest_name_in_three_queries(project: Project, member: User) -> None:
    old = make_run(project, member, "again")
    stop(old, member, "manager")
    runs = [make_run(project, member, name) for name in ("again", "b", "c", "d")]
    with CaptureQueriesContext(connection) as queries:
        found = find_runs(project, ["d", str(runs[1].uid), "again", str(old.uid), "c"])
    assert found == [runs[3], runs[1], runs[0], old, runs[2]]
    assert len(queries) == 3
    with pytest.raises(NotFound, match="'nowhere'"):
        find_runs(project, ["b", "nowhere"])
