"""/metrics of clouds: their cache, how old each source is, machines and money."""

from __future__ import annotations

import datetime as dt
import hashlib
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.contract import SourceFailed
from dstackweb.backends.models import Backend, Instance
from dstackweb.lib.models import Bucket, Circuit
from dstackweb.offers import catalog, sources
from dstackweb.offers.models import CacheCount
from dstackweb.runs import artifacts
from tests.factories import make_host, scraper
from tests.offers.cloud_stub import TYPES_US, Clock, Cloud
from tests.runs.test_removal import done_run

pytestmark = pytest.mark.django_db


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cloud:
    return Cloud(monkeypatch, tmp_path / "asked")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def scrape() -> dict[str, float]:
    text = scraper().get("/metrics").content.decode()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_cache_statistics_since_midnight_are_exported(cloud: Cloud, clock: Clock) -> None:
    clock.now = dt.datetime(2026, 5, 4, 13, 30, tzinfo=dt.UTC)
    backend = Backend.objects.create(name="aws", kind="aws")
    for day, hour, hits in ((4, 13, 5), (4, 0, 2), (3, 23, 100)):
        at = dt.datetime(2026, 5, day, hour, tzinfo=dt.UTC)
        CacheCount.objects.create(backend=backend, hour=at, hits=hits, uncached=4 * hits, calls=3, throttles=1)
    found = scrape()
    assert found['dstackweb_offers_hits_total{backend="aws"}'] == 7
    assert found['dstackweb_offers_calls_total{backend="aws"}'] == 6
    assert found['dstackweb_offers_throttles_total{backend="aws"}'] == 2
    assert found['dstackweb_offers_calls_saved{backend="aws"}'] == 22


@pytest.mark.django_db(transaction=True)
def test_each_source_has_its_age_and_state(cloud: Cloud, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog.forget()
    sources.forget()
    monkeypatch.setattr(sources, "TICK_S", 60.0)
    Backend.objects.create(name="aws", kind="aws")
    cloud.says[TYPES_US] = SourceFailed("unreachable", endpoint="https://ec2")
    sources.refresh_due(clock.now)
    clock.pass_s(90)
    found = scrape()
    spot = ",".join(f'{key}="{value}"' for key, value in (("backend", "aws"), ("region", "eu"), ("source", "spot")))
    assert found[f"dstackweb_source_age_seconds{{{spot}}}"] == 90
    states = {name: value for name, value in found.items() if name.startswith("dstackweb_source_state") and value}
    assert sorted(name.split('state="')[1].rstrip('"}') for name in states) == ["failed", "fresh", "stale"]
    assert not any(TYPES_US.region in name for name in found if "age_seconds" in name)


def test_calls_left_of_each_api_are_exported_for_the_account_nearest_its_limit(clock: Clock) -> None:
    now_us = round(clock.now.timestamp() * 1e6)
    for account, calls in (("1", 2), ("2", 5)):
        for _ in range(calls):
            Bucket.reserve(f"aws:{account}:eu:ec2.RunInstances", 1, 3, 30, now_us)
    Bucket.reserve("refresh:7", 1, 1, 0, now_us)
    Circuit.throttled("aws:1:eu:ec2.RunInstances", clock.now, rnd=lambda: 1.0)
    found = {name.split("{")[0]: value for name, value in scrape().items() if name.startswith("dstackweb_api_")}
    assert found == {
        "dstackweb_api_calls_left": -2, "dstackweb_api_calls_at_once": 3, "dstackweb_api_left_alone_seconds": 2,
    }  # fmt: skip
    clock.pass_s(3)
    names = '{api="ec2.RunInstances",region="eu"}'
    found = scrape()
    assert found[f"dstackweb_api_calls_left{names}"] == 1
    assert found[f"dstackweb_api_left_alone_seconds{names}"] == 0


def test_instances_are_counted_by_status_and_spending_by_project(project: Project, clock: Clock) -> None:
    clock.now = dt.datetime(2026, 5, 4, 13, 30, tzinfo=dt.UTC)
    backend = Backend.objects.create(name="aws", kind="aws")
    for status, hours, holder in (("running", 2, uuid4()), ("running", 1, None), ("gone", 3, None)):
        began = timezone.now() - dt.timedelta(hours=hours)
        ended = timezone.now() if status == "gone" else None
        Instance.objects.create(
            backend=backend, project=project, region="eu", instance_type="g5", status=status, holder=holder,
            price=Decimal("1.5"), launched_at=began, ended_at=ended,
        )  # fmt: skip
    Project.objects.update(monthly_budget=100)
    found = scrape()
    assert found['dstackweb_instances{backend="aws",status="running"}'] == 1
    assert found['dstackweb_instances{backend="aws",status="idle"}'] == 1
    assert not any("gone" in name for name in found)
    assert (found['dstackweb_spent_usd{project="main"}'], found['dstackweb_budget_usd{project="main"}']) == (9.0, 100.0)


def test_artifacts_are_exported_with_their_bytes(project: Project, member: User) -> None:
    make_host()
    job = done_run(project, member).jobs.get()
    offered = artifacts.Offered("a.txt", 5, hashlib.sha256(b"hello").hexdigest())
    assert artifacts.take(job.pk, offered, 0, b"hello").done
    found = scrape()
    assert found['dstackweb_artifacts_bytes{project="main"}'] == 5
    assert found["dstackweb_artifacts"] == 1
