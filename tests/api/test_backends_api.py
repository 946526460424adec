"""Backends over the API: set up and deleted by deployment admins, secrets never shown; quotas and figures for all."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project
from dstackweb.backends.aws.kind import AwsBackend
from dstackweb.backends.contract import SourceFailed, SourceKey
from dstackweb.backends.models import Backend
from dstackweb.offers import catalog, sources
from dstackweb.offers.models import CacheCount
from tests.api.conftest import Api
from tests.backends.kinds import use_driver
from tests.factories import make_user

pytestmark = pytest.mark.django_db

KEY = "AKIAIOSFODNN7EXAMPLE"
CLOUD = "backends/cloud"


def body(secret: str | None = "hush-hush", **config: Any) -> dict[str, Any]:
    credentials = {"access_key_id": KEY} | ({} if secret is None else {"secret_access_key": secret})
    return {"type": "aws", "config": {"regions": ["eu-west-1"], "credentials": credentials, **config}}


@pytest.fixture
def root(project: Project) -> Api:
    return Api(make_user("root", is_superuser=True))


@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
def test_backends_are_for_deployment_admins(api: Api, manager: Api, method: str) -> None:
    Backend.objects.create(name="cloud", kind="aws")
    given = body() if method == "PUT" else None
    assert api(method, CLOUD, given).status_code == 403
    assert manager(method, CLOUD, given).status_code == 403
    assert Api(None)(method, CLOUD, given).status_code == 401
    assert api("GET", "backends").status_code == 403


def test_a_backend_is_set_up_changed_and_deleted(root: Api) -> None:
    made = root("PUT", CLOUD, body())
    assert (made.status_code, made.json()["type"], made.json()["has_secret"]) == (201, "aws", True)
    changed = root("PUT", CLOUD, body(None, families=["g5"]))
    assert (changed.status_code, changed.json()["version"], changed.json()["enabled"]) == (200, 2, True)
    assert root("GET", "backends").json()["items"] == [changed.json()] == [root("GET", CLOUD).json()]
    assert root("DELETE", CLOUD).status_code == 204
    assert root("GET", CLOUD).status_code == 404
    assert root("DELETE", CLOUD).status_code == 404


def test_no_answer_has_a_secret_in_it(root: Api) -> None:
    root("PUT", CLOUD, body())
    kept = Backend.objects.get().secret
    wrong = body()
    wrong["config"]["credentials"]["profile"] = "default"
    for answer in (root("PUT", CLOUD, body()), root("GET", CLOUD), root("GET", "backends"), root("PUT", CLOUD, wrong)):
        assert b"hush" not in answer.content
        assert kept.encode() not in answer.content


@pytest.mark.parametrize(
    ("name", "given", "place"),
    [
        ("cloud", body(regions=["mars"]), ["config", "regions"]),
        ("cloud", body(colour="red"), ["config", "colour"]),
        ("cloud", body(None), ["config", "credentials", "secret_access_key"]),
        ("cloud", body() | {"type": "azure"}, ["type"]),
        ("cloud", body() | {"enabled": "yes"}, ["enabled"]),
        ("cloud", body() | {"name": "other"}, ["name"]),
        ("cloud", {"config": {}}, ["type"]),
        ("a.b", body(), ["path", "name"]),
        ("n" * 61, body(), ["path", "name"]),
    ],
)
def test_each_invalid_key_is_reported_with_its_location(
    root: Api, name: str, given: dict[str, Any], place: list[str]
) -> None:
    refused = root("PUT", f"backends/{name}", given)
    assert (refused.status_code, refused.json()["errors"][0]["loc"]) == (422, place)
    assert not Backend.objects.exists()


def test_own_hosts_can_be_disabled_and_not_deleted(root: Api) -> None:
    assert root("PUT", "backends/hosts", {"type": "hosts", "enabled": False}).json()["enabled"] is False
    assert root("DELETE", "backends/hosts").status_code == 409
    assert root("PUT", "backends/hosts", body()).status_code == 409


def test_who_is_in_no_project_sees_neither_quotas_nor_figures(stranger: Api, root: Api) -> None:
    for figures in ("quotas", "cache"):
        assert stranger("GET", f"backends/hosts/{figures}").status_code == 403
        assert root("GET", f"backends/none/{figures}").status_code == 404


@pytest.mark.django_db(transaction=True)
def test_every_user_sees_the_quotas_and_their_age(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    says: dict[str, Any] = {
        "eu-west-1": {"L-DB2E81BA": 64},
        "us-east-1": SourceFailed("throttled", api="ListServiceQuotas", region="us-east-1"),
    }

    use: Any = {"L-DB2E81BA": 48}

    class Stub(AwsBackend):
        def fetch(self, key: SourceKey) -> Any:
            found = says[key.region] if key.source == "quotas" else use if key.source == "quota_use" else {}
            if isinstance(found, Exception):
                raise found
            return found

    use_driver(monkeypatch, "aws", Stub)
    monkeypatch.setattr(sources, "TICK_S", 60.0)
    catalog.forget()
    sources.forget()
    Backend.objects.create(name="cloud", kind="aws", config={"regions": sorted(says)})
    sources.refresh_due(timezone.now())
    eu, us = api("GET", f"{CLOUD}/quotas").json()["items"]
    assert eu["items"] == [
        {"code": "L-DB2E81BA", "name": "Running On-Demand G and VT instances", "limit": 64, "used": 48}
    ]
    assert (eu["region"], eu["source"]["state"], eu["source"]["error"]) == ("eu-west-1", "fresh", None)
    assert (us["items"], us["source"]["state"], us["source"]["error"]["code"]) == ([], "failed", "throttled")
    assert us["source"]["error"]["message"].startswith("ListServiceQuotas is throttled")
    assert (eu["use"]["source"], eu["use"]["state"]) == ("quota_use", "fresh")


@pytest.mark.django_db(transaction=True)
def test_an_unknown_use_of_a_quota_is_null_and_not_zero(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stub(AwsBackend):
        def fetch(self, key: SourceKey) -> Any:
            if key.source == "quotas":
                return {"L-DB2E81BA": 64}
            raise SourceFailed("access_denied", action="ec2:DescribeInstances", region=key.region)

    use_driver(monkeypatch, "aws", Stub)
    monkeypatch.setattr(sources, "TICK_S", 60.0)
    Backend.objects.create(name="cloud", kind="aws", config={"regions": ["eu-west-1"]})
    sources.refresh_due(timezone.now())
    (region,) = api("GET", f"{CLOUD}/quotas").json()["items"]
    assert [(quota["limit"], quota["used"]) for quota in region["items"]] == [(64, None)]
    assert "DescribeInstances" in region["use"]["error"]["message"]


def test_own_hosts_have_no_quotas(root: Api) -> None:
    root("PUT", "backends/hosts", {"type": "hosts"})
    assert root("GET", "backends/hosts/quotas").json()["items"] == []
    assert root("GET", "backends/none/quotas").status_code == 404


def test_every_user_sees_the_statistics_of_the_cache(api: Api) -> None:
    backend = Backend.objects.create(name="cloud", kind="aws")
    hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    for ago, numbers in enumerate([{"hits": 5, "uncached": 20, "calls": 3}, {"hits": 1, "uncached": 4}, {"hits": 9}]):
        CacheCount.objects.create(backend=backend, hour=hour - dt.timedelta(hours=15 * ago), **numbers)
    result = api("GET", f"{CLOUD}/cache").json()
    assert [item["hits"] for item in result["items"]] == [5, 1]
    assert (result["total"]["hits"], result["total"]["calls"], result["total"]["saved"]) == (6, 3, 21)
    assert len(api("GET", f"{CLOUD}/cache?hours=31").json()["items"]) == 3
