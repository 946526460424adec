"""The backend behind the cache of offers: one look at AWS for all who ask."""

from __future__ import annotations

import uuid
from collections import Counter
from functools import partial
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.backends.aws import client
from dstackweb.backends.aws.instances import INSTANCE_TAG
from dstackweb.backends.aws.kind import AwsBackend
from dstackweb.backends.aws.quotas import code_of
from dstackweb.backends.contract import Availability, SourceKey, SourceState
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.offers import catalog, source_rows, sources
from dstackweb.spec.effective import Requirements
from standins.aws import Cloud
from tests.backends.kinds import use_driver
from tests.factories import make_project
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
    assert sources.refresh_due(timezone.now()) == 10
    assert states(backend) == {"fresh": 10}
    firsts = Counter((call["action"], call["region"]) for call in cloud.calls())
    for region in REGIONS:
        assert firsts["DescribeInstances", region] == 1
        assert firsts["DescribeInstanceTypes", region] == 1
    cloud.forget_calls()
    for count in range(20):
        offers = catalog.CachedDriver(backend).offers(Requirements(gpu_count_min=1 + count % 4))
        assert {offer.region for offer in offers} == set(REGIONS)
    assert cloud.calls() == []


def test_throttled_quotas_keep_their_last_values_and_unknown_is_not_zero(
    backend: Backend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_rows, "REFRESH_EVERY_S", 0.0)
    cloud.throttle("servicequotas", region="eu-west-1")
    sources.refresh_due(timezone.now())
    assert states(backend) == {"fresh": 9, "failed": 1}
    cloud.throttle("servicequotas")
    sources.refresh_now(backend)
    backend.refresh_from_db()
    quotas = SourceKey("quotas", "us-east-1")
    reading = sources.refresh(backend, quotas)
    assert (reading.state, (reading.error or {})["code"]) == (SourceState.FRESH, "throttled")
    offers = catalog.CachedDriver(backend).offers(Requirements(gpu_count_min=1))
    found = {offer.region: offer.availability for offer in offers if offer.instance_type == "g5.xlarge"}
    assert found == {"us-east-1": Availability.AVAILABLE, "eu-west-1": Availability.UNKNOWN}


def test_own_instances_count_against_quotas_at_once_without_a_call(backend: Backend, cloud: Cloud) -> None:
    def used() -> tuple[int, int]:
        offers = catalog.CachedDriver(backend).offers(Requirements(gpu_count_min=1))
        (offer,) = [
            one for one in offers if (one.instance_type, one.region, one.spot) == ("g5.xlarge", "us-east-1", False)
        ]
        return offer.detail["used"], offer.detail["fits"]

    sources.refresh_due(timezone.now())
    cloud.forget_calls()
    assert used() == (0, 16)
    fields = {"backend": backend, "region": "us-east-1", "instance_type": "g5.2xlarge", "cpus": 8}
    ordered = Instance.objects.create(project=make_project(), **fields)
    other = Instance.objects.create(project=ordered.project, **fields)
    assert used() == (16, 12)
    Instance.objects.filter(pk=other.pk).update(status=InstanceStatus.STOPPING)
    assert used() == (8, 14)
    Instance.objects.filter(pk=ordered.pk).update(status=InstanceStatus.GONE)
    assert used() == (0, 16)
    assert cloud.calls() == []


def test_what_others_use_is_read_without_own_instances(backend: Backend, cloud: Cloud) -> None:
    own = Instance.objects.create(
        backend=backend, project=make_project(), region="us-east-1", instance_type="g5.2xlarge", cpus=8
    )
    for order in (str(own.pk), str(uuid.uuid4()), "not an order"):
        cloud.client("ec2").run_instances(
            ImageId=cloud.image("us-east-1"), InstanceType="g5.2xlarge", MinCount=1, MaxCount=1,
            TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": INSTANCE_TAG, "Value": order}]}],
        )  # fmt: skip
    assert AwsBackend(backend).fetch(SourceKey("quota_use", "us-east-1"))[code_of("g5.xlarge", spot=False)] == 16
