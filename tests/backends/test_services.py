"""Backends are set up, changed and deleted: secrets stay in, the same again changes nothing, names become free."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project
from dstackweb.backends import services
from dstackweb.backends.aws.config import secret_of
from dstackweb.backends.kinds import Kind
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.lib.errors import Conflict, Invalid, NotFound
from dstackweb.offers import catalog, sources
from dstackweb.offers.models import Result, SourceRow
from dstackweb.scheduler.processes.retention import keep_house
from tests.offers.cloud_stub import ANY, Cloud

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]

KEY = "AKIAIOSFODNN7EXAMPLE"


def aws(secret: str | None = "hush", **config: Any) -> dict[str, Any]:
    credentials = {"access_key_id": KEY} | ({} if secret is None else {"secret_access_key": secret})
    return {"regions": ["eu-west-1"], "credentials": credentials, **config}


def test_a_secret_is_stored_apart_and_stays_unless_a_new_one_is_given() -> None:
    made, is_new = services.put("cloud", "aws", aws())
    assert (is_new, made.version, "hush" in str(made.config)) == (True, 1, False)
    same, is_new = services.put("cloud", "aws", aws(None))
    assert (is_new, same.version, secret_of(KEY, same.secret)) == (False, 1, "hush")
    assert services.put("cloud", "aws", aws("hush"))[0].version == 1
    changed, _ = services.put("cloud", "aws", aws("other"))
    assert (changed.version, secret_of(KEY, changed.secret)) == (2, "other")


def test_a_stored_token_is_removed_by_null_and_never_sent_to_another_address() -> None:
    def ray(**config: Any) -> Backend:
        config = {"projects": ["main"], "address": "https://ray.test:8265", **config}
        return services.put("ray", "ray", config)[0]

    def token() -> str:
        return Kind.secrets_of(Backend.objects.get().secret).get("token", "")

    ray(token="hush")
    assert (ray(address="https://ray.test:8265/").secret != "", token()) == (True, "hush")
    with pytest.raises(Invalid) as raised:
        ray(address="https://evil.test")
    assert raised.value.errors[0]["loc"] == ["config", "token"]
    assert "https://ray.test:8265" in raised.value.detail
    assert "hush" not in raised.value.detail
    for moved in ({"token": None}, {"token": "new"}):
        ray(address="https://other.test", **moved)
        assert token() == (moved["token"] or "")
    assert (ray(address="https://other.test", token=None).secret, token()) == ("", "")
    assert ray(address="https://other.test").version == ray(address="https://other.test", token="").version


def test_every_change_raises_the_version() -> None:
    services.put("cloud", "aws", aws())
    assert services.put("cloud", "aws", aws(None, families=["g5"]))[0].version == 2
    disabled, _ = services.put("cloud", "aws", aws(None, families=["g5"]), enabled=False)
    assert (disabled.version, disabled.enabled) == (3, False)
    stored = Backend.objects.get()
    assert (stored.version, stored.enabled, stored.config) == (3, False, disabled.config)


@pytest.mark.parametrize(
    ("kind", "config", "places"),
    [
        ("aws", {}, [["config", "regions"]]),
        ("aws", {"regions": ["mars"]}, [["config", "regions"]]),
        ("aws", aws(None), [["config", "credentials", "secret_access_key"]]),
        ("aws", aws(endpoint_url="https://me:hush@aws.test"), [["config", "endpoint_url"]]),
        ("hosts", {"regions": []}, [["config", "regions"]]),
        ("azure", {}, [["type"]]),
    ],
)
def test_each_invalid_key_is_reported_with_its_location(
    kind: str, config: dict[str, Any], places: list[list[str]]
) -> None:
    with pytest.raises(Invalid) as refused:
        services.put("cloud", kind, config)
    assert [error["loc"] for error in refused.value.errors] == places
    assert not Backend.objects.exists()


def test_a_name_belongs_to_one_kind() -> None:
    services.put("hosts", "hosts", {})
    with pytest.raises(Conflict):
        services.put("hosts", "aws", aws())


def test_own_hosts_are_not_deleted_as_a_whole() -> None:
    services.put("hosts", "hosts", {})
    with pytest.raises(Conflict):
        services.delete("hosts")
    with pytest.raises(NotFound):
        services.delete("none")


def test_an_unreferenced_backend_is_deleted_completely() -> None:
    services.put("cloud", "aws", aws())
    services.delete("cloud")
    assert not Backend.with_deleted.exists()


def instance(backend: Backend, project: Project, **fields: Any) -> Instance:
    return Instance.objects.create(backend=backend, project=project, region="eu-west-1", instance_type="g5", **fields)


def test_a_backend_with_past_instances_keeps_its_row_and_frees_its_name(project: Project) -> None:
    old, _ = services.put("cloud", "aws", aws())
    instance(old, project, status=InstanceStatus.GONE)
    services.delete("cloud")
    assert not Backend.objects.exists()
    kept = Backend.with_deleted.get()
    assert (kept.enabled, kept.deleted_at is not None, kept.version) == (False, True, 2)
    new, is_new = services.put("cloud", "aws", aws())
    assert (is_new, new.pk != old.pk) == (True, True)
    services.delete("cloud")
    assert Backend.with_deleted.count() == 1


def test_deleting_a_backend_stops_idle_instances_and_keeps_the_secret_until_then(project: Project) -> None:
    backend, _ = services.put("cloud", "aws", aws())
    idle = instance(backend, project, status=InstanceStatus.RUNNING, idle_since=timezone.now())
    busy = instance(backend, project, status=InstanceStatus.RUNNING, holder="6f0f2f6e-7c52-4a83-9a6e-1b7dd2a1c9ab")
    services.delete("cloud")
    idle.refresh_from_db()
    busy.refresh_from_db()
    assert (idle.status, idle.why, busy.status) == (InstanceStatus.STOPPING, "deleted", InstanceStatus.RUNNING)
    assert secret_of(KEY, Backend.with_deleted.get().secret) == "hush"


def test_the_secret_of_a_deleted_backend_is_removed_once_its_last_instance_ended(project: Project) -> None:
    def secret() -> str:
        backend.refresh_from_db(from_queryset=Backend.with_deleted)
        return backend.secret

    backend, _ = services.put("cloud", "aws", aws())
    last = instance(backend, project, status=InstanceStatus.RUNNING, idle_since=timezone.now())
    services.delete("cloud")
    keep_house()
    assert secret()
    day = dt.timedelta(days=2)
    Backend.with_deleted.update(deleted_at=timezone.now() - day)
    keep_house()
    assert secret(), "its last instance has still to end"
    Instance.objects.filter(pk=last.pk).update(status=InstanceStatus.GONE, ended_at=timezone.now() - day)
    services.put("cloud", "aws", aws("another"))
    keep_house()
    assert not secret()
    assert secret_of(KEY, Backend.objects.get().secret) == "another"


@pytest.mark.django_db(transaction=True)
def test_offers_of_a_deleted_backend_that_keeps_its_row_disappear_at_once(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Cloud(monkeypatch, tmp_path / "asked")
    monkeypatch.setattr(sources, "TICK_S", 60.0)
    backend = Backend.objects.create(name="cloud", kind="aws")
    instance(backend, project, status=InstanceStatus.GONE)
    sources.refresh_due(timezone.now())
    looking = catalog.CachedDriver(backend)
    assert looking.offers(ANY)
    services.delete("cloud")
    with pytest.raises(catalog.NothingKnown):
        looking.offers(ANY)
    assert not SourceRow.objects.exists()
    assert not Result.objects.exists()
    assert sources.refresh_due(timezone.now()) == 0
