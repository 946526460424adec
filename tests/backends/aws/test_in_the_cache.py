"""The backend behind the cache of offers: one look at AWS for all who ask."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.backends.aws import client
from dstackweb.backends.aws.kind import AwsBackend
from dstackweb.backends.contract import Availability, SourceKey, SourceState
from dstackweb.backends.models import Backend
from dstackweb.offers import catalog, sources
from dstackweb.spec.effective import Requirements
from standins.aws import Cloud
from tests.backends.kinds import use_driver
from tests.offers.cloud_stub import read

REGIONS = ["us-east-1", "eu-west-1"]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.both_sides]


@pytest.fixture
def backend(cloud: Cloud, transactional_db: None, monkeypatch: pytest.MonkeyPatch, settings: Any) -> Backend:
    settings.DSTACKWEB_PUBLIC_URL = "https://gpus.example.org"
    for name, value in cloud.env.items():
        monkeypatch.setenv(name, value)
    use_driver(monkeypatch, "aws", AwsBackend)
    monkeypatch.setattr(sources, "TICK_S", 60.0)
    # botocore's own repeats, which wait for seconds, are not what these tests are of.
    monkeypatch.setattr(client, "Aws", partial(client.Aws, patience=client.PROBE))
    sources.forget()
    return Backend.objects.create(name="cloud", kind="aws", config={"regions": REGIONS, "families": ["g5", "p5"]})


def states(backend: Backend) -> Counter[str]:
    return Counter(str(read(backend, key).state) for key in AwsBackend(backend).wanted())


def test_twenty_offer_queries_cost_one_fetch_per_source_and_region(backend: Backend, cloud: Cloud) -> None:
    assert sources.refresh_due(timezone.now()) == 8
    assert states(backend) == {"fresh": 8}
    firsts = Counter((call["action"], call["region"]) for call in cloud.calls())
    for region in REGIONS:
        assert firsts["DescribeInstances", region] == 1
        assert firsts["DescribeInstanceTypes", region] == 1
    cloud.forget_calls()
    for count in range(20):
        offers = catalog.CachedDriver(backend).offers(Requirements(gpu_count_min=1 + count % 4))
        assert {offer.region for offer in offers} == set(REGIONS)
    assert cloud.calls() == []


def test_throttled_quotas_keep_their_last_values_and_unknown_is_not_zero(backend: Backend, cloud: Cloud) -> None:
    cloud.throttle("servicequotas", region="eu-west-1")
    sources.refresh_due(timezone.now())
    assert states(backend) == {"fresh": 7, "failed": 1}
    cloud.throttle("servicequotas")
    sources.refresh_now(backend)
    backend.refresh_from_db()
    quotas = SourceKey("quotas", "us-east-1")
    reading = sources.refresh(backend, quotas)
    assert (reading.state, (reading.error or {})["code"]) == (SourceState.STALE, "throttled")
    offers = catalog.CachedDriver(backend).offers(Requirements(gpu_count_min=1))
    found = {offer.region: offer.availability for offer in offers if offer.instance_type == "g5.xlarge"}
    assert found == {"us-east-1": Availability.AVAILABLE, "eu-west-1": Availability.UNKNOWN}
