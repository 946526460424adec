"""GET …/runs/{name}/metrics."""

from __future__ import annotations

import datetime as dt
from uuid import uuid4

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.api.utilization import MetricsOut
from tests.api.conftest import Api
from tests.factories import make_run
from tests.gpus.past import past_run

pytestmark = pytest.mark.django_db
PATH = "projects/main/runs/train/metrics"
POLICY = {"min_gpu_utilization": 10, "time_window": "1h"}


def test_each_gpu_has_its_columns_and_its_newest_sample(api: Api, project: Project, member: User) -> None:
    job = past_run(project, member, "train", [[90] * 30, [0] * 30], utilization_policy=POLICY)
    answer = api("GET", f"{PATH}?points=600").json()
    MetricsOut.model_validate(answer)
    (node,) = answer["jobs"]
    busy, idle = node["gpus"]
    assert (answer["run"], answer["attempt"], node["node"], node["where"]) == ("train", 1, 0, "box-1")
    assert (busy["uuid"], busy["index"], idle["index"]) == (job.gpus[0], 0, 1)
    assert (busy["last"]["utilization"], busy["last"]["memory_used_mib"], idle["last"]["utilization"]) == (90, 1024, 0)
    assert len(answer["times"]) == len(busy["utilization"]) == len(idle["power_w"])
    assert {value for value in busy["utilization"] if value is not None} == {90}
    assert None in busy["utilization"]
    assert (answer["policy"]["min_gpu_utilization"], answer["policy"]["source"]["source"]) == (10, "run_file")


def test_the_points_parameter_bounds_the_size_of_the_answer(api: Api, project: Project, member: User) -> None:
    past_run(project, member, "train", [[50] * 360])
    answer = api("GET", f"{PATH}?points=10").json()
    assert 2 <= len(answer["times"]) <= 10
    assert answer["step_s"] >= 360


def test_an_ended_run_is_shown_up_to_its_end(api: Api, project: Project, member: User) -> None:
    past_run(project, member, "train", [[50] * 30], ended_ago_s=7200)
    answer = api("GET", PATH).json()
    assert dt.datetime.fromisoformat(answer["times"][-1]) < timezone.now() - dt.timedelta(hours=1, minutes=59)
    assert any(answer["jobs"][0]["gpus"][0]["utilization"])


def test_a_span_can_be_requested(api: Api, project: Project, member: User) -> None:
    past_run(project, member, "train", [[50] * 30])
    now = timezone.now()
    since = (now - dt.timedelta(minutes=2)).isoformat().replace("+00:00", "Z")
    answer = api("GET", f"{PATH}?from={since}").json()
    assert dt.datetime.fromisoformat(answer["times"][0]) > now - dt.timedelta(minutes=3)


@pytest.mark.parametrize(
    "query",
    [
        "from=2026-01-01T00:00:00Z&to=2026-03-01T00:00:00Z",
        "from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z",
        "to=0001-01-01T00:00:00Z",
        "from=yesterday",
        "points=1",
        "points=100000",
        "attempt=0",
    ],
)
def test_an_invalid_span_is_refused(api: Api, project: Project, member: User, query: str) -> None:
    make_run(project, member, "train")
    assert api("GET", f"{PATH}?{query}").status_code == 422


def test_a_run_that_waits_has_none_and_one_without_samples_has_its_gpus(
    api: Api, project: Project, member: User
) -> None:
    make_run(project, member, "train", resources={"gpu": 1})
    answer = api("GET", PATH).json()
    assert (answer["jobs"], answer["times"], answer["policy"]) == ([], [], None)
    job = past_run(project, member, "unseen", [[1]])
    job.gpu_series.all().delete()
    (gpu,) = api("GET", "projects/main/runs/unseen/metrics").json()["jobs"][0]["gpus"]
    assert (gpu["uuid"], gpu["last"], gpu["utilization"]) == (job.gpus[0], None, [])


def test_strangers_see_nothing(api: Api, stranger: Api, project: Project, member: User) -> None:
    make_run(project, member, "train")
    assert stranger("GET", PATH).status_code == 404
    assert api("GET", "projects/main/runs/none/metrics").status_code == 404


def test_a_node_without_samples_has_a_value_for_each_time(api: Api, project: Project, member: User) -> None:
    job = past_run(project, member, "train", [[50] * 30])
    job.pk, job.node, job.gpus, job._state.adding = uuid4(), 1, ["GPU-unread"], True
    job.save(force_insert=True)
    found = api("GET", f"{PATH}?points=600").json()
    (gpu,) = found["jobs"][1]["gpus"]
    assert gpu["utilization"] == [None] * len(found["times"])
    assert found["times"]
