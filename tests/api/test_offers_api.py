"""Offers over the API: clouds and own hosts, filtered, sorted, paged, with how old each source is; refresh by hand."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.contract import Availability, Offer, SourceFailed
from dstackweb.backends.models import Backend, Instance
from dstackweb.offers import catalog, sources
from tests.api.conftest import Api
from tests.factories import join, make_host, make_project, make_user
from tests.offers.cloud_stub import SPOT, TYPES, TYPES_US, Clock, Cloud

OFFERS = "projects/main/offers"
REFRESH = f"{OFFERS}/refresh"
FIELDS = {
    "backend", "region", "instance_type", "cpus", "memory_mib", "gpu_name", "gpu_count", "gpu_memory_mib", "spot",
    "price", "availability", "detail",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cloud:
    catalog.forget()
    sources.forget()
    made = Cloud(monkeypatch, tmp_path / "asked")
    monkeypatch.setattr(sources, "TICK_S", 60.0)
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def offer(name: str, price: str, **fields: Any) -> Offer:
    return Offer(
        "cluster", name, fields.pop("cpus", 8), 65536, Availability.AVAILABLE, price=Decimal(price),
        detail={"code": "quota", "fits": 2, "limit": 64, "used": 48, "needs": 8}, **fields,
    )  # fmt: skip


@pytest.fixture
def cluster(cloud: Cloud, project: Project) -> Backend:
    """A backend without sources, which says what is put into `cloud.answer`."""
    cloud.answer = (
        offer("g5", "1.006", region="eu", gpu_name="A10G", gpu_count=1, gpu_memory_mib=24576),
        offer("g5", "0.4", region="eu", gpu_name="A10G", gpu_count=1, gpu_memory_mib=24576, spot=True),
        offer("p4d", "32.77", region="us", gpu_name="A100", gpu_count=8, gpu_memory_mib=40960),
    )
    return Backend.objects.create(name="cluster", kind="plain")


def named(answer: Any) -> list[tuple[str, float]]:
    assert answer.status_code == 200, answer.content
    return [(item["instance_type"], item["price"]) for item in answer.json()["items"]]


def test_offers_have_the_documented_fields_and_reasons(api: Api, cluster: Backend) -> None:
    make_host("box-1", cpus=8, gpus=2, labels={"region": "cellar"})
    answer = api("GET", OFFERS).json()
    first, *others = answer["items"]
    assert all(set(item) == FIELDS for item in answer["items"])
    assert (first["backend"], first["region"], first["instance_type"]) == ("hosts", "cellar", "box-1")
    assert (first["price"], first["gpu_count"], first["availability"]) == (0.0, 2, "idle")
    assert others[0]["detail"]["message"] == "Fits 2 more: 48 of 64 vCPUs in use, 8 needed."
    assert (others[0]["detail"]["code"], others[0]["detail"]["fits"]) == ("quota", 2)
    assert (answer["total"], answer["next"]) == (4, None)


def test_offers_are_filtered_and_sorted_by_price(api: Api, cluster: Backend) -> None:
    assert named(api("GET", OFFERS)) == [("g5", 0.4), ("g5", 1.006), ("p4d", 32.77)]
    assert named(api("GET", f"{OFFERS}?spot=true")) == [("g5", 0.4)]
    assert named(api("GET", f"{OFFERS}?spot=false&max_price=1.5")) == [("g5", 1.006)]
    assert named(api("GET", f"{OFFERS}?region=us&region=asia")) == [("p4d", 32.77)]
    assert named(api("GET", f"{OFFERS}?backend=other,hosts")) == []
    assert named(api("GET", f"{OFFERS}?sort=-gpu_memory")) == [("p4d", 32.77), ("g5", 0.4), ("g5", 1.006)]


def test_required_resources_are_passed_to_the_backend(api: Api, cloud: Cloud, cluster: Backend) -> None:
    named(api("GET", f"{OFFERS}?cpu=4.."))
    assert cloud.asked == ["offers 4"]


def test_hosts_that_can_never_fit_are_not_offered(api: Api, project: Project) -> None:
    make_host("small", gpus=1)
    make_host("large", gpus=4)
    assert named(api("GET", f"{OFFERS}?gpu=2..")) == [("large", 0.0)]
    assert named(api("GET", f"{OFFERS}?gpu=2..&backend=hosts")) == [("large", 0.0)]
    Backend.objects.filter(name="hosts").update(enabled=False)
    assert named(api("GET", OFFERS)) == []


def test_idle_instances_of_a_project_are_among_its_offers(api: Api, project: Project, cluster: Backend) -> None:
    now = timezone.now()
    for owner in (project, make_project("other")):
        Instance.objects.create(
            backend=cluster, project=owner, region="eu", instance_type="g5", price=Decimal("0.9"), status="running",
            cpus=4, memory_mib=16384, idle_since=now, idle_until=now + dt.timedelta(minutes=5),
        )  # fmt: skip
    kept, *_ = api("GET", f"{OFFERS}?sort=availability").json()["items"]
    assert (kept["instance_type"], kept["price"], kept["availability"]) == ("g5", 0.9, "idle")
    assert kept["detail"]["instance"] == str(Instance.objects.get(project=project).pk)
    assert kept["detail"]["message"] == "Kept from an earlier run of the project"
    assert len(named(api("GET", OFFERS))) == 4
    assert len(named(api("GET", f"{OFFERS}?region=us"))) == 1


def test_pages_follow_one_another(api: Api, cluster: Backend) -> None:
    first = api("GET", f"{OFFERS}?limit=2").json()
    assert (len(first["items"]), first["total"]) == (2, 3)
    second = api("GET", f"{OFFERS}?limit=2&cursor={first['next']}").json()
    assert [item["instance_type"] for item in second["items"]] == ["p4d"]
    assert second["next"] is None


@pytest.mark.parametrize(
    ("query", "place"),
    [
        ("gpu=A100:x..", "gpu"), ("cpu=-1", "cpu"), ("memory=lots", "memory"), ("spot=maybe", "spot"),
        ("max_price=NaN", "max_price"), ("sort=colour", "sort"), ("cursor=x", "cursor"), ("limit=0", "limit"),
    ],
)  # fmt: skip
def test_an_invalid_query_is_refused_with_the_parameters_location(
    api: Api, project: Project, query: str, place: str
) -> None:
    answer = api("GET", f"{OFFERS}?{query}")
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["loc"] == ["query", place]


def test_only_members_of_the_project_see_its_offers(stranger: Api, project: Project) -> None:
    assert stranger("GET", OFFERS).status_code == 404
    assert Api(None)("GET", OFFERS).status_code == 401


@pytest.mark.django_db(transaction=True)
def test_each_source_shows_its_age_and_its_error(api: Api, cloud: Cloud, project: Project, clock: Clock) -> None:
    Backend.objects.create(name="aws", kind="aws")
    cloud.says[TYPES_US] = SourceFailed("access_denied", action="ec2:DescribeInstanceTypes", region="us")
    sources.refresh_due(clock.now)
    clock.pass_s(90)
    answer = api("GET", f"{OFFERS}?backend=aws").json()
    assert [item["region"] for item in answer["items"]] == ["eu", "eu"]
    found = {(source["source"], source["region"]): source for source in answer["sources"]}
    assert {key: source["state"] for key, source in found.items()} == {
        tuple(TYPES): "fresh", tuple(SPOT): "stale", tuple(TYPES_US): "failed",
    }  # fmt: skip
    assert found[tuple(SPOT)]["fetched_at"] is not None
    error = found[tuple(TYPES_US)]["error"]
    assert (error["code"], "lacks ec2:DescribeInstanceTypes" in error["message"]) == ("access_denied", True)
    eu = api("GET", f"{OFFERS}?region=eu").json()["sources"]
    assert {source["region"] for source in eu} == {"eu"}


def test_an_unavailable_source_is_reported_as_failed_rather_than_as_no_offers(
    api: Api, cloud: Cloud, cluster: Backend
) -> None:
    cloud.answer = RuntimeError("the scheduler is away")
    answer = api("GET", f"{OFFERS}?backend=cluster").json()
    (source,) = answer["sources"]
    assert (answer["items"], source["source"], source["state"]) == ([], "offers", "failed")
    assert source["error"]["message"] == "Its offers cannot be read: the scheduler is away"


def test_each_refresh_expires_the_cache(api: Api, cloud: Cloud, cluster: Backend) -> None:
    named(api("GET", OFFERS))
    for generation in (1, 2):
        assert api("POST", REFRESH).json() == {"items": ["cluster"]}
        cluster.refresh_from_db()
        assert cluster.refresh_generation == generation
    Backend.objects.create(name="second", kind="plain")
    assert api("POST", REFRESH, {"backends": ["second", "second"]}).json() == {"items": ["second"]}


def test_only_members_refresh_and_an_unknown_backend_is_refused(api: Api, project: Project, cluster: Backend) -> None:
    viewer = Api(join(project, make_user("vera"), "viewer"))
    assert viewer("POST", REFRESH).status_code == 403
    refused = api("POST", REFRESH, {"backends": ["cluster", "hosts"]})
    assert (refused.status_code, refused.json()["errors"][0]["loc"]) == (422, ["backends", 1])
    Backend.objects.all().delete()
    assert api("POST", REFRESH).json() == {"items": []}


def test_all_projects_see_the_same_offers(member: User, cluster: Backend) -> None:
    other = join(make_project("other"), make_user("olga"))
    assert named(Api(other)("GET", "projects/other/offers")) == named(Api(member)("GET", OFFERS))
