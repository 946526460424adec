"""Testing a connection, against the cloud: what is found, what it is called and what helps."""

from __future__ import annotations

from typing import Any

import pytest

from dstackweb.backends.aws import check, check_words, config, public_url, quotas
from dstackweb.backends.aws.check import Finding, FindingState
from standins.aws import ACCESS_KEY, SECRET_KEY, Cloud

pytestmark = pytest.mark.django_db(transaction=True)

OK, WARNING, FAILED, SKIPPED = FindingState
STEPS = ["enabled", "instance_types", "prices", "spot_prices", "quotas", "usage", "image", "launch", "end"]


@pytest.fixture(autouse=True)
def reached_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_url, "check", lambda url, allow_private: {"code": "ok", "url": url})


def found_in(
    cloud: Cloud, *regions: str, secret: str = SECRET_KEY, limit_s: float = 25.0, **said: Any
) -> list[Finding]:
    asked = {"regions": regions or ["us-east-1"], "endpoint_url": cloud.url, **said}
    asked["credentials"] = {"access_key_id": ACCESS_KEY}
    return check.check(config.read(asked), secret, "https://gpus.example.org", limit_s=limit_s)


def states(findings: list[Finding], region: str = "us-east-1") -> dict[str, FindingState]:
    return {one.step: one.state for one in findings if one.region == region}


def words(findings: list[Finding], step: str, region: str = "us-east-1") -> str:
    (one,) = [one for one in findings if (one.step, one.region) == (step, region)]
    line = check_words.line(one)
    return f"{line.found} {line.fix}"


def test_an_account_that_may_do_all_passes_in_every_region(cloud: Cloud) -> None:
    found = found_in(cloud, "us-east-1", "eu-west-1")
    assert {one.state for one in found} == {OK}
    assert [one.step for one in found] == ["identity", "public_url", *STEPS, *STEPS]
    assert "account 123456789012" in words(found, "identity", "")
    assert "G, VT 64" in words(found, "quotas")
    assert "ami-" in words(found, "image")
    report = check_words.report(found)
    assert (report.summary, [one.open for one in report.snippets]) == ("Everything works.", [False])
    assert cloud.machines() == []


def test_missing_permissions_are_named_with_a_policy_to_paste(cloud: Cloud) -> None:
    cloud.deny("ec2", "RunInstances")
    cloud.deny("servicequotas", "ListServiceQuotas")
    cloud.deny("pricing", "GetProducts")
    cloud.deny("ssm", "GetParameter", "eu-west-1")
    found = found_in(cloud, "us-east-1", "eu-west-1")
    denied = {step for step, state in states(found).items() if state is FAILED}
    assert denied == {"launch", "quotas", "prices"}
    assert states(found, "eu-west-1")["image"] is FAILED
    assert states(found, "eu-west-1")["launch"] is SKIPPED
    assert "lacks ec2:RunInstances" in words(found, "launch")
    missing = check_words.report(found).snippets[0].text
    for action in ("ec2:RunInstances", "servicequotas:ListServiceQuotas", "pricing:GetProducts", "ssm:GetParameter"):
        assert f'"{action}"' in missing


@pytest.mark.parametrize(
    ("action", "step"),
    [
        ("DescribeInstanceTypes", "instance_types"),
        ("DescribeInstanceTypeOfferings", "instance_types"),
        ("DescribeSpotPriceHistory", "spot_prices"),
        ("DescribeInstances", "usage"),
        ("DescribeSpotInstanceRequests", "usage"),
        ("DescribeImages", "image"),
    ],
)
def test_each_permission_has_its_step(cloud: Cloud, action: str, step: str) -> None:
    cloud.deny("ec2", action)
    found = found_in(cloud)
    assert [name for name, state in states(found).items() if state is FAILED] == [step]
    assert f"ec2:{action}" in words(found, step)


def test_ending_that_is_denied_may_be_limited_to_tags(cloud: Cloud) -> None:
    cloud.deny("ec2", "TerminateInstances")
    found = found_in(cloud)
    assert [name for name, state in states(found).items() if state is not OK] == ["end"]
    assert "dstackweb:deployment" in words(found, "end")
    assert "ec2:TerminateInstances" in check_words.report(found).snippets[0].text


def test_every_action_that_is_tried_is_in_the_policy(cloud: Cloud) -> None:
    found_in(cloud, subnets="subnet-0a1b2c3d")
    asked = {f"{call['service']}:{call['action']}" for call in cloud.calls()} - {"sts:GetCallerIdentity"}
    assert asked <= {*check_words.READING, *check_words.STARTING}


def test_a_wrong_secret_is_reported_and_ends_the_check(cloud: Cloud) -> None:
    found = found_in(cloud, secret="wrong")
    assert [(one.step, one.state) for one in found] == [
        ("identity", FAILED),
        ("public_url", OK),
        ("enabled", SKIPPED),
    ]
    assert "AWS rejected the credentials" in words(found, "identity", "")
    assert cloud.count("ec2") == 0


def test_an_unknown_or_disabled_region_is_reported_and_the_others_are_tested(cloud: Cloud) -> None:
    cloud.region("me-south-1", enabled=False)
    found = found_in(cloud, "eu-nowhere-1", "me-south-1", "us-east-1")
    assert states(found, "eu-nowhere-1") == {"enabled": FAILED}
    assert states(found, "me-south-1") == {"enabled": FAILED}
    assert "no such region" in words(found, "enabled", "eu-nowhere-1")
    assert "Enable it" in words(found, "enabled", "me-south-1")
    assert set(states(found).values()) == {OK}


def test_without_the_list_of_regions_they_are_tested_all_the_same(cloud: Cloud) -> None:
    cloud.deny("ec2", "DescribeRegions")
    found = found_in(cloud)
    assert states(found)["enabled"] is WARNING
    assert states(found)["launch"] is OK


def test_a_throttle_is_a_warning_and_not_a_fault(cloud: Cloud) -> None:
    cloud.throttle("servicequotas")
    found = found_in(cloud)
    assert states(found)["quotas"] is WARNING
    assert "is throttled" in words(found, "quotas")
    assert check_words.report(found).state == "warning"


def test_an_unreachable_endpoint_is_reported_and_ends_the_check(cloud: Cloud) -> None:
    found = found_in(cloud, endpoint_url="http://127.0.0.1:1")
    assert found[0].state is FAILED
    assert "http://127.0.0.1:1/ is unreachable" in words(found, "identity", "")


def test_a_check_that_times_out_is_reported_and_the_others_have_results(cloud: Cloud) -> None:
    cloud.latency(6, "pricing")
    found = found_in(cloud, limit_s=4)
    assert {step for step, state in states(found).items() if state is FAILED} == {"prices"}
    assert "No answer in time" in words(found, "prices")


def test_an_account_without_gpu_quotas_gets_a_hint_to_service_quotas(cloud: Cloud) -> None:
    for code in ("L-DB2E81BA", "L-3819A6DF", "L-417A185B", "L-7212CCBC", "L-C4BD4855"):
        cloud.quota(code, 0)
    found = found_in(cloud)
    assert states(found)["quotas"] is WARNING
    assert "Service Quotas" in words(found, "quotas")


def test_an_unexpected_error_of_a_step_is_shown_with_its_text(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    def limits(*_: object) -> dict[str, int]:
        raise LookupError("no such key")

    monkeypatch.setattr(quotas, "limits", limits)
    found = found_in(cloud)
    assert states(found)["quotas"] is FAILED
    assert "LookupError: no such key" in words(found, "quotas")


def test_a_missing_image_is_reported(cloud: Cloud) -> None:
    found = found_in(cloud, ami="ami-0123456789abcdef0")
    assert states(found)["image"] is FAILED


def test_all_regions_are_queried_concurrently(cloud: Cloud) -> None:
    cloud.latency(0.2)
    found = found_in(cloud, "us-east-1", "eu-west-1", "eu-central-1", "us-west-2")
    assert {one.state for one in found} == {OK}
    ends = [(call["at"], call["at"] + call["ms"] / 1000) for call in cloud.calls()]
    assert max(sum(begins <= at < end for begins, end in ends) for at, _ in ends) >= 4
