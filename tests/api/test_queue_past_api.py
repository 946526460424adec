"""GET …/queues/{q}/at."""

from __future__ import annotations

import datetime as dt
from urllib.parse import urlencode

import pytest
from django.http import HttpResponse
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs import services
from tests.api.conftest import Api
from tests.factories import make_host, make_run, place_all

pytestmark = pytest.mark.django_db
AT = "projects/main/queues/default/at"


def get(api: Api, path: str, **query: object) -> HttpResponse:
    return api("GET", f"{path}?{urlencode(query)}")


def test_a_queue_is_shown_as_it_was(api: Api, project: Project, member: User) -> None:
    make_host(cpus=2)
    for name in "abc":
        make_run(project, member, name, resources={"cpu": 2})
    before = timezone.now()
    place_all()
    after = timezone.now()
    services.stop(make_run(project, member, "d"), member, "member")

    found = get(api, AT, t=before.isoformat()).json()
    assert [(row["name"], row["position"], row["reason"], row["then"]) for row in found["items"]] == [
        ("a", 1, "starting", "provisioning"), ("b", 2, "starting", None), ("c", 3, "starting", None),
    ]  # fmt: skip
    assert (found["waiting"], found["deleted"], found["placed"], found["paused"], found["next"]) == (
        3,
        0,
        [],
        False,
        None,
    )
    assert found["items"][0]["then_detail"] == "placed"

    found = get(api, AT, t=after.isoformat(), limit=1).json()
    assert [(row["name"], row["reason"]) for row in found["items"]] == [("b", "waiting_for_capacity")]
    assert "0 of 2" in found["items"][0]["reason_detail"] or "2 CPUs" in found["items"][0]["reason_detail"]
    assert [(row["name"], row["where"], row["until"]) for row in found["placed"]] == [("a", "box-1", None)]
    assert (found["placed_total"], found["next"]) == (1, "1")
    assert [row["name"] for row in get(api, AT, t=after.isoformat(), limit=1, cursor=1).json()["items"]] == ["c"]

    [one] = get(api, AT, t=after.isoformat(), run="c").json()["items"]
    assert (one["name"], one["position"]) == ("c", 2)
    assert get(api, AT, t=after.isoformat(), run="a").json()["items"] == []
    assert [row["name"] for row in get(api, AT).json()["items"]] == ["b", "c"]


def test_a_moment_without_a_zone_is_in_the_one_that_is_given(api: Api, project: Project) -> None:
    now = timezone.now()
    local = (now - dt.timedelta(hours=2)).astimezone(dt.timezone(dt.timedelta(hours=5, minutes=30)))
    found = get(api, AT, t=f"{local:%Y-%m-%dT%H:%M}", tz="Asia/Kolkata").json()
    assert found["at"] == f"{now - dt.timedelta(hours=2):%Y-%m-%dT%H:%M}:00Z"


@pytest.mark.parametrize("query", [{"t": "x"}, {"t": "2020-01-01"}, {"t": "2999-01-01"}, {"t": "2026", "tz": "x"}])
def test_other_moments_are_refused(api: Api, project: Project, query: dict[str, str]) -> None:
    refused = get(api, AT, **query)
    assert refused.status_code == 422
    assert refused.json()["detail"]


def test_an_unknown_queue_or_run_is_not_found(api: Api, project: Project) -> None:
    now = timezone.now().isoformat()
    assert get(api, "projects/main/queues/nope/at", t=now).status_code == 404
    assert get(api, AT, t=now, run="nope").status_code == 404
