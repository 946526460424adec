"""What each source asks of AWS and makes of the answers, over HTTP."""

from __future__ import annotations

import pickle
from decimal import Decimal
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.backends.aws import instance_types
from dstackweb.backends.aws.kind import AwsBackend
from dstackweb.backends.contract import Availability, SourceFailed, SourceKey, SourceReading, SourceState
from dstackweb.backends.models import Backend
from dstackweb.spec.effective import Requirements
from standins.aws import Cloud

REGION = "us-east-1"
G, SPOT_G = "L-DB2E81BA", "L-3819A6DF"

pytestmark = pytest.mark.django_db


def fetch(aws: AwsBackend, source: str, region: str = REGION) -> Any:
    value = aws.fetch(SourceKey(source, region))
    assert pickle.loads(pickle.dumps(value)) == value
    return value


def change(backend: Backend, **said: Any) -> AwsBackend:
    backend.config = {**backend.config, **said}
    backend.version += 1
    backend.save()
    return AwsBackend(backend)


def readings(aws: AwsBackend) -> dict[SourceKey, SourceReading]:
    found = {}
    for key in aws.wanted():
        try:
            found[key] = SourceReading(SourceState.FRESH, aws.fetch(key), timezone.now())
        except SourceFailed as failed:
            found[key] = SourceReading(SourceState.FAILED, error={"code": failed.code, **failed.data})
    return found


def test_instance_types_have_cpus_memory_gpus_and_zones(aws: AwsBackend) -> None:
    types = fetch(aws, "instance_types")
    p5 = types["p5.48xlarge"]
    assert (p5.cpus, p5.memory_mib, p5.gpu_name, p5.gpu_count, p5.gpu_memory_mib) == (192, 2097152, "H100", 8, 81920)
    assert {"p4d.24xlarge", "p5en.48xlarge", "g5.xlarge", "g6.xlarge", "m7i.large"} <= set(types)
    assert all(kind.zones and kind.zones[0].startswith(REGION) for kind in types.values())
    assert types["m7i.large"].gpu_count == 0


UNUSABLE = ["mac2", "inf2", "trn1", "g6f", "f2", "vt1"]
ARM = ["m7g", "g5g"]


def test_types_that_runs_cannot_use_or_require_are_left_out(cloud: Cloud, backend: Backend) -> None:
    cloud.catalog(everything=True)
    families = [*UNUSABLE, *ARM, "m7i", "g5"]
    described = cloud.client("ec2").describe_instance_types(
        Filters=[{"Name": "instance-type", "Values": [f"{family}.*" for family in families]}]
    )["InstanceTypes"]
    assert {one["InstanceType"].partition(".")[0] for one in described} == set(families)
    types = fetch(change(backend, families=families), "instance_types")
    assert {name.partition(".")[0] for name in types} == {"m7i", "g5"}
    both = fetch(change(backend, architectures=["x86_64", "arm64"]), "instance_types")
    assert {name.partition(".")[0] for name in both} == {"m7i", "g5", *ARM}
    assert (both["g5g.xlarge"].gpu_name, both["g5g.xlarge"].architecture) == ("T4G", "arm64")
    assert both["m7i.large"].architecture == "x86_64"


@pytest.mark.parametrize(
    ("gpus", "is_usable"),
    [
        ([], True),
        ([{"Name": "A10G", "Manufacturer": "NVIDIA", "Count": 1}], True),
        ([{"Name": "Radeon Pro V520", "Manufacturer": "AMD", "Count": 1}], False),
        ([{"Name": "Gaudi HL-205", "Manufacturer": "Habana", "Count": 8}], False),
        ([{"Name": "A10G", "Manufacturer": "NVIDIA", "Count": 1}] * 2, False),
    ],
)
def test_of_gpus_only_one_model_by_nvidia_is_usable(gpus: list[dict[str, Any]], is_usable: bool) -> None:
    described = {
        "InstanceType": "g9.xlarge",
        "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
        "SupportedVirtualizationTypes": ["hvm"],
        "VCpuInfo": {"DefaultVCpus": 4},
        "MemoryInfo": {"SizeInMiB": 16384},
        "GpuInfo": {"Gpus": gpus},
    }
    assert (instance_types.read(described, ("x86_64",), ["us-east-1a"]) is not None) == is_usable


def test_each_source_keeps_only_types_that_the_config_allows(backend: Backend) -> None:
    aws = change(backend, families=["g5"], instance_types=["p5.48xlarge"])
    for source in ("instance_types", "prices", "spot_prices"):
        names = set(fetch(aws, source))
        assert {"g5.xlarge", "p5.48xlarge"} <= names
        assert {name.partition(".")[0] for name in names} == {"g5", "p5"}, source


def test_prices_are_those_of_linux_on_shared_hardware(aws: AwsBackend, cloud: Cloud) -> None:
    prices = fetch(aws, "prices")
    types = fetch(aws, "instance_types")
    assert {name for name, kind in types.items() if kind.on_demand} <= set(prices)
    assert all(isinstance(price, Decimal) and price > 0 for price in prices.values())
    assert prices["g5.xlarge"] < prices["g5.12xlarge"] < prices["p5.48xlarge"]
    assert cloud.count("pricing", "GetProducts") > 1


def test_prices_of_a_region_without_the_pricing_api_are_fetched_from_another(backend: Backend, cloud: Cloud) -> None:
    aws = change(backend, regions=["eu-west-1", "eu-central-1"], families=["g5"])
    assert fetch(aws, "prices", "eu-west-1") != fetch(aws, "prices", "eu-central-1")
    assert {call["region"] for call in cloud.calls("pricing")} == {"us-east-1", "eu-central-1"}


def test_prices_come_from_another_endpoint_while_the_first_is_down(
    backend: Backend, cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    aws = change(backend, regions=["eu-west-1"], families=["g5"])
    usual = fetch(aws, "prices", "eu-west-1")
    cloud.forget_calls()
    cloud.fail("pricing", region="us-east-1", status=503, code="ServiceUnavailable")
    assert fetch(aws, "prices", "eu-west-1") == usual
    assert next(call["region"] for call in cloud.calls("pricing")) == "us-east-1"
    assert {call["region"] for call in cloud.calls("pricing")} == {"us-east-1", "ap-south-1"}
    assert "can't be read from us-east-1" in caplog.text


def test_prices_that_may_not_be_read_or_are_throttled_are_asked_for_at_one_endpoint_alone(
    backend: Backend, cloud: Cloud
) -> None:
    aws = change(backend, regions=["eu-west-1"], families=["g5"])
    cloud.deny("pricing")
    with pytest.raises(SourceFailed):
        aws.fetch(SourceKey("prices", "eu-west-1"))
    assert {call["region"] for call in cloud.calls("pricing")} == {"us-east-1"}


def test_spot_prices_are_those_of_now_by_zone(aws: AwsBackend, cloud: Cloud) -> None:
    cloud.spot_price("g5.xlarge", 0.123, zone="us-east-1b")
    prices = fetch(aws, "spot_prices")
    assert prices["g5.xlarge"]["us-east-1b"] == Decimal("0.123")
    assert len(prices["g5.xlarge"]) > 1
    assert fetch(aws, "prices")["g5.xlarge"] > prices["g5.xlarge"]["us-east-1a"] > 0


def test_quotas_count_used_vcpus_separately_for_spot_and_on_demand(aws: AwsBackend, cloud: Cloud) -> None:
    cloud.quota(G, 64)
    assert fetch(aws, "quotas")[G] == 64
    before = fetch(aws, "quota_use")
    assert before[G] == 0
    ec2 = cloud.client("ec2")
    spot = {"InstanceMarketOptions": {"MarketType": "spot"}}
    image = cloud.image(REGION)
    ec2.run_instances(ImageId=image, InstanceType="g5.2xlarge", MinCount=2, MaxCount=2)
    ec2.run_instances(ImageId=image, InstanceType="g5.xlarge", MinCount=1, MaxCount=1, **spot)
    after = fetch(aws, "quota_use")
    assert (after[G], after[SPOT_G]) == (16, 4)
    assert {code: used for code, used in after.items() if used} == cloud.usage(REGION)
    asked = cloud.count("ec2", "DescribeInstanceTypes")
    fetch(aws, "quota_use")
    assert cloud.count("ec2", "DescribeInstanceTypes") == asked


def test_subnets_are_fetched_only_where_they_are_configured(backend: Backend, cloud: Cloud) -> None:
    assert SourceKey("subnets", REGION) not in AwsBackend(backend).wanted()
    subnet = cloud.client("ec2").describe_subnets()["Subnets"][0]
    aws = change(backend, subnets=subnet["SubnetId"])
    assert SourceKey("subnets", REGION) in aws.wanted()
    assert fetch(aws, "subnets") == {subnet["SubnetId"]: subnet["AvailabilityZone"]}
    with pytest.raises(SourceFailed) as failed:
        fetch(change(backend, subnets="subnet-0123"), "subnets")
    assert failed.value.code == "service_error"
    assert "subnet-0123" in failed.value.data["text"]


def test_offers_are_built_from_the_fetched_sources(backend: Backend, settings: Any) -> None:
    settings.DSTACKWEB_PUBLIC_URL = "https://gpus.example.org"
    aws = change(backend, families=["g5", "p5"])
    needs = Requirements(gpu_count_min=1, gpu_names=("A10G",))
    found = aws.join(readings(aws), needs)
    assert {offer.spot for offer in found} == {True, False}
    best = found[0]
    assert (best.instance_type, best.spot, best.backend) == ("g5.xlarge", True, "cloud")
    assert (best.availability, best.detail["fits"]) == (Availability.AVAILABLE, 16)
    settings.DSTACKWEB_PUBLIC_URL = "http://127.0.0.1:8000"
    assert {offer.availability for offer in aws.join(readings(aws), needs)} == {Availability.NOT_AVAILABLE}


def test_a_denied_quota_names_the_permission_and_leaves_the_offers_usable(
    backend: Backend, cloud: Cloud, settings: Any
) -> None:
    settings.DSTACKWEB_PUBLIC_URL = "https://gpus.example.org"
    cloud.deny("servicequotas")
    aws = change(backend, families=["g5"])
    found = readings(aws)
    error = found[SourceKey("quotas", REGION)].error
    assert error is not None
    assert (error["code"], error["action"]) == ("access_denied", "servicequotas:ListServiceQuotas")
    offers = aws.join(found, Requirements(gpu_count_min=1))
    assert {offer.availability for offer in offers} == {Availability.UNKNOWN}


def test_one_region_that_fails_leaves_the_other(backend: Backend, cloud: Cloud) -> None:
    aws = change(backend, regions=["us-east-1", "eu-west-1"], families=["g5"])
    cloud.fail("ec2", region="eu-west-1")
    found = readings(aws)
    assert found[SourceKey("spot_prices", "eu-west-1")].state is SourceState.FAILED
    assert {offer.region for offer in aws.join(found, Requirements(gpu_count_min=1))} == {"us-east-1"}
