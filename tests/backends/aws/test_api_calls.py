"""Each request is counted where it is sent: the numbers shown are those that the cloud counted."""

from __future__ import annotations

import datetime as dt
import re
import threading
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
from django.db import connections
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends import api_calls
from dstackweb.backends.aws import client as aws_client, rate_limits
from dstackweb.backends.aws.client import Aws, Patience
from dstackweb.backends.aws.kind import AwsBackend
from dstackweb.backends.contract import InstanceOrder, LaunchFailed, SourceFailed, SourceKey
from dstackweb.backends.models import ApiCount, Backend
from dstackweb.lib.models import Bucket
from dstackweb.web import health_checks
from standins.aws import Cloud
from tests.api.test_metrics import scrape

REGION = "us-east-1"
SERVICES = {"servicequotas": "service-quotas"}
RETRYING = Patience("standard", attempts=3, connect_s=3, read_s=10, turn_s=30)

pytestmark = [pytest.mark.django_db(transaction=True)]


def counted_by(cloud: Cloud) -> Counter[tuple[str, str]]:
    """Requests by API and region."""
    return Counter(
        (f"{SERVICES.get(call['service'], call['service'])}.{call['action']}", call["region"]) for call in cloud.calls()
    )


def counted_here(column: str = "requests") -> Counter[tuple[str, str]]:
    api_calls.flush()
    found = Counter[tuple[str, str]]()
    for row in ApiCount.objects.all():
        found[row.api, row.region] += getattr(row, column)
    return +found


@pytest.fixture
def settings_of_a_storm(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.DSTACKWEB_PUBLIC_URL = "https://gpus.example.org"
    monkeypatch.setattr(aws_client, "ONCE", RETRYING)
    monkeypatch.setitem(rate_limits.RATES, "ec2.RunInstances", rate_limits.RateLimit(1000, 1000))


def order(number: int) -> InstanceOrder:
    instance = f"6d9a4e58-4c5f-4f0c-8d53-b6ab5d6e4{number:03d}"
    return InstanceOrder(instance, "ours", REGION, "g5.xlarge", False, "#!/bin/sh\n")


@pytest.mark.both_sides
@pytest.mark.usefixtures("settings_of_a_storm")
def test_a_storm_of_launches_throttles_and_retries_is_counted_as_the_cloud_does(
    backend: Backend, cloud: Cloud, project: Project, member: User, client: Client, settings: Any
) -> None:
    settings.DSTACKWEB_METRICS_TOKEN = "metrics"
    backend.config = {**backend.config, "families": ["g5"]}
    ours = AwsBackend(backend)
    for key in ours.wanted():
        ours.fetch(key)
    cloud.throttle("ec2", "RunInstances", rate=0.5, burst=1)
    cloud.fail("ec2", "DescribeInstances", times=3)

    def launch(number: int) -> None:
        try:
            ours.launch(order(number))
        except (SourceFailed, LaunchFailed):
            pass
        finally:
            connections.close_all()

    threads = [threading.Thread(target=launch, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ours.fetch(SourceKey("spot_prices", REGION))
    assert counted_here() == counted_by(cloud)
    throttled = Counter(call["action"] for call in cloud.calls() if call["code"] == "RequestLimitExceeded")
    assert counted_here("throttles") == {("ec2.RunInstances", REGION): throttled["RunInstances"]}
    assert throttled["RunInstances"] > 2
    assert counted_here("failures")["ec2.DescribeInstances", REGION] == 3
    assert counted_here("retries")["ec2.DescribeInstances", REGION] == 3

    client.force_login(member)
    page = client.get("/p/main/health/").content.decode().split('id="api-requests"')[1].split("</section>")[0]
    shown = dict(re.findall(r'data-api="([\w.-]+) us-east-1".*?<td class="num">\s*([\d,]+)', page, re.DOTALL))
    expected = {api: number for (api, _region), number in counted_by(cloud).items()}
    assert {api: int(number.replace(",", "")) for api, number in shown.items()} == expected
    metrics = scrape()
    name = f'dstackweb_api_calls_total{{api="ec2.RunInstances",kind="aws",region="{REGION}"}}'
    assert metrics[name] == expected["ec2.RunInstances"]
    assert metrics[name.replace("calls", "throttles")] == throttled["RunInstances"]


def test_signing_in_with_a_role_is_counted(backend: Backend, cloud: Cloud) -> None:
    credentials = {**backend.config["credentials"], "role_arn": "arn:aws:iam::123456789012:role/gpus"}
    backend.config = {**backend.config, "credentials": credentials}
    AwsBackend(backend).fetch(SourceKey("spot_prices", REGION))
    assert counted_by(cloud)["sts.AssumeRole", REGION] == 1
    assert counted_here() == counted_by(cloud)


@pytest.fixture
def profile_with_a_role(backend: Backend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from standins.aws import ACCESS_KEY, SECRET_KEY

    keys = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    role = "[profile gpus]\nrole_arn = arn:aws:iam::123456789012:role/gpus\nsource_profile = base\nregion = eu-west-1\n"
    (tmp_path / "config").write_text(f"[profile base]\n{keys}{role}endpoint_url = {cloud.url}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.url)
    backend.config = {**backend.config, "credentials": {"profile": "gpus"}}


@pytest.mark.usefixtures("profile_with_a_role")
def test_signing_in_with_the_role_of_a_profile_is_counted(backend: Backend, cloud: Cloud) -> None:
    AwsBackend(backend).fetch(SourceKey("spot_prices", REGION))
    assert sum(number for (api, _), number in counted_by(cloud).items() if api == "sts.AssumeRole") == 1
    assert counted_here() == counted_by(cloud)


@pytest.mark.usefixtures("profile_with_a_role")
def test_a_sign_in_that_fails_with_the_role_of_a_profile_is_counted_as_a_failure(
    backend: Backend, cloud: Cloud
) -> None:
    cloud.deny("sts")
    with pytest.raises(SourceFailed, match="access_denied"):
        AwsBackend(backend).fetch(SourceKey("spot_prices", REGION))
    assert counted_here("failures") == counted_by(cloud) == {("sts.AssumeRole", REGION): 1}


def test_a_call_that_waits_too_long_for_its_turn_is_not_sent_and_not_counted(
    backend: Backend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rate_limits.RATES, "ec2", rate_limits.RateLimit(0.001, 2))
    for is_sent in (True, True, False, False):
        with nullcontext() if is_sent else pytest.raises(SourceFailed, match="limiter"):
            aws_client.aws_of(backend).call("ec2", REGION, "DescribeInstances")
    assert counted_here() == counted_by(cloud) == {("ec2.DescribeInstances", REGION): 2}


def test_an_api_warns_before_its_burst_is_used_up(
    backend: Backend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rate_limits.RATES, "ec2", rate_limits.RateLimit(0.001, 10))
    ours: Aws = aws_client.aws_of(backend)

    def line() -> tuple[str, str]:
        api_calls.flush()
        [check] = health_checks.api_checks()
        return check.tone, check.value

    for _ in range(7):
        ours.call("ec2", REGION, "DescribeInstances")
    assert line() == ("go", "below the limit")
    for _ in range(2):
        ours.call("ec2", REGION, "DescribeInstances")
    assert line() == ("wait", "near the limit")
    monkeypatch.setitem(rate_limits.RATES, "ec2", rate_limits.RateLimit(10, 10))
    Bucket.objects.update(tokens=10)
    assert line() == ("info", "near the limit lately")
    now = timezone.now() + dt.timedelta(hours=3)
    monkeypatch.setattr(timezone, "now", lambda: now)
    assert line() == ("go", "below the limit")


def test_a_cloud_that_throttles_below_our_limit_is_told_of(backend: Backend, cloud: Cloud) -> None:
    cloud.fail("ec2", "DescribeInstances", code="RequestLimitExceeded", status=503, times=1)
    ours = aws_client.aws_of(backend)
    ours._patience = RETRYING
    ours.call("ec2", REGION, "DescribeInstances")
    api_calls.flush()
    [check] = health_checks.api_checks()
    assert (check.tone, check.value) == ("wait", "throttled lately")
    assert "ec2.DescribeInstances (us-east-1): 1" in check.hint
