"""Every request that this project makes of AWS, held against AWS's own description of it.

boto3 looks at types and at what is required. Here the rest is looked at too: values of enumerations, lengths, ranges,
patterns, and whether EC2's documentation knows each filter.
"""

from __future__ import annotations

import re
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import botocore.session
import pytest

from dstackweb.backends.aws import ami, check, check_words, config, public_url
from dstackweb.backends.aws.client import Aws
from dstackweb.backends.aws.kind import AwsBackend
from dstackweb.backends.contract import InstanceOrder, LaunchFailed
from dstackweb.backends.models import Backend
from standins.aws import ACCESS_KEY, SECRET_KEY, Cloud
from tests.backends.aws.conftest import REGION

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("unlimited_launches")]

MOST_RESULTS = {
    "DescribeInstances": (5, 1000),
    "DescribeInstanceTypes": (5, 100),
    "DescribeInstanceTypeOfferings": (5, 1000),
    "DescribeSpotInstanceRequests": (5, 1000),
    "DescribeSpotPriceHistory": (1, 1000),
    "GetProducts": (1, 100),
    "ListServiceQuotas": (1, 100),
}
"""What AWS's documentation allows for `MaxResults`, where its model says nothing."""
WITHOUT_PAGES = {"DescribeInstances": "InstanceIds", "DescribeInstanceTypes": "InstanceTypes"}
"""Beside these `MaxResults` is refused, or of no use."""
PERMISSIONS = {"service-quotas": "servicequotas"}

Requests = dict[tuple[str, str], list[dict[str, Any]]]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """What is asked, by service and operation."""
    asked: Requests = defaultdict(list)
    call = Aws.call

    def noted(self: Aws, service: str, region: str, operation: str, **more: Any) -> dict[str, Any]:
        params = {name: value for name, value in more.items() if name not in ("patience", "key")}
        asked[service, operation].append(params)
        return call(self, service, region, operation, **more)

    monkeypatch.setattr(Aws, "call", noted)
    monkeypatch.setattr(public_url, "check", lambda url, allow_private: {"code": "ok", "url": url})
    ami.forget()
    return asked


def wrong(shape: Any, value: Any, place: str) -> Iterator[str]:
    """What a value has that its shape doesn't allow."""
    if shape.type_name == "structure":
        missing = set(shape.required_members) - set(value)
        unknown = set(value) - set(shape.members)
        yield from (f"{place}.{name} is missing" for name in missing)
        yield from (f"{place}.{name} is unknown" for name in unknown)
        for name in set(value) - unknown:
            yield from wrong(shape.members[name], value[name], f"{place}.{name}")
        return
    limits = shape.metadata
    size = value if shape.type_name in ("integer", "long") else len(value) if hasattr(value, "__len__") else None
    if size is not None and not limits.get("min", size) <= size <= limits.get("max", size):
        yield f"{place}: {size} is not in {limits['min']} to {limits['max']}"
    if shape.type_name == "list":
        for number, item in enumerate(value):
            yield from wrong(shape.member, item, f"{place}[{number}]")
    elif shape.type_name == "string":
        if limits.get("enum") and value not in limits["enum"] and shape.name != "InstanceType":
            yield f"{place}: {value!r} is none of {', '.join(limits['enum'])}"
        if limits.get("pattern") and not re.search(limits["pattern"], value):
            yield f"{place}: {value!r} is not like {limits['pattern']}"


def undocumented(model: Any, params: dict[str, Any]) -> Iterator[str]:
    """Filters that the operation's documentation doesn't name."""
    documented = set(re.findall(r"<code>([a-z][a-z:.-]+)", model.input_shape.members["Filters"].documentation))
    for one in params.get("Filters", ()):
        name = "tag:" if one["Name"].startswith("tag:") else one["Name"]
        if name not in documented:
            yield f"{model.name} has no filter {one['Name']}"


def test_a_request_that_aws_does_not_describe_is_detected() -> None:
    model = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances")
    options = {"HttpTokens": "always", "HttpPort": 80}
    found = list(wrong(model.input_shape, {"MinCount": 1, "MetadataOptions": options}, "it"))
    assert len(found) == 3
    describe = model.service_model.operation_model("DescribeInstances")
    filters = [{"Name": name} for name in ("tag:Name", "instance-state-name", "state")]
    assert list(undocumented(describe, {"Filters": filters})) == ["DescribeInstances has no filter state"]


def order(instance_type: str, **more: Any) -> InstanceOrder:
    said: dict[str, Any] = {"region": REGION, "spot": False, "user_data": "#!/bin/sh\n", "project": "vision", **more}
    return InstanceOrder(str(uuid.uuid4()), "d" * 20, instance_type=instance_type, run="quick-fox-1", **said)


def ask_all(backend: Backend, cloud: Cloud) -> None:
    """Everything that is ever asked: sources, launches of all kinds, machines, ends, and the test of a connection."""
    ec2 = cloud.client("ec2")
    subnets = [one["SubnetId"] for one in ec2.describe_subnets()["Subnets"]][:2]
    special = {
        "subnets": subnets,
        "security_groups": ["sg-0a1b2c3d4e5f60718"],
        "instance_profile": "trainer",
        "ssh_key": "ops",
        "tags": {"team": "vision"},
        "families": ["g5", "t3"],
    }
    started = []
    for changed in ({}, special, {**special, "public_ip": False}, {"public_ip": False}, {"security_groups": "sg-0a1b"}):
        backend.config = {**{k: v for k, v in backend.config.items() if k not in special}, "public_ip": True, **changed}
        backend.version += 1
        backend.save()
        code = AwsBackend(backend)
        for spot in (False, True) if changed in ({}, special) else (False,):
            with suppress(LaunchFailed):  # what is configured isn't there: it was asked all the same
                started.append(code.launch(order("g5.xlarge", spot=spot)).cloud_id)
        if changed in ({}, special):
            for key in code.wanted():
                code.fetch(key)
            check.check(config.read(backend.config), SECRET_KEY, "https://gpus.example.org")
    code.instances(REGION, "d" * 20)
    assert len(started) > 2
    code.terminate(REGION, started)


@pytest.mark.slow
def test_every_request_is_described_by_aws_and_allowed_by_the_policy(
    backend: Backend, cloud: Cloud, requests: Requests
) -> None:
    assert backend.config["credentials"] == {"access_key_id": ACCESS_KEY}
    ask_all(backend, cloud)
    session = botocore.session.get_session()
    found: list[str] = []
    for (service, operation), asked in requests.items():
        model = session.get_service_model(service).operation_model(operation)
        for params in asked:
            found += wrong(model.input_shape, params, operation)
            if "ec2" in service:
                found += undocumented(model, params) if "Filters" in params else ()
            least, most = MOST_RESULTS.get(operation, (1, 1))
            if not least <= params.get("MaxResults", least) <= most:
                found.append(f"{operation}: MaxResults {params['MaxResults']} is not in {least} to {most}")
            if "MaxResults" in params and WITHOUT_PAGES.get(operation) in params:
                found.append(f"{operation}: MaxResults beside {WITHOUT_PAGES[operation]}")
    assert found == []
    launches = requests["ec2", "RunInstances"]
    assert {"NetworkInterfaces" in one for one in launches} == {True, False}
    assert not [one for one in launches if "NetworkInterfaces" in one and {"SubnetId", "SecurityGroupIds"} & set(one)]

    # The policy allows each of them, and nothing that is never asked.
    asked_for = {f"{PERMISSIONS.get(service, service)}:{operation}" for service, operation in requests}
    allowed = {*check_words.READING, *check_words.STARTING}
    assert asked_for - allowed == {"sts:GetCallerIdentity"}  # nobody needs a permission for that
    assert allowed - asked_for == {"ec2:CreateTags", "iam:CreateServiceLinkedRole"}  # for tags of a launch; for spot
