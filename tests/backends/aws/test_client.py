"""How AWS is asked: as whom, how fast, and not while it throttles; over HTTP."""

from __future__ import annotations

import datetime as dt
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstackweb.backends.aws import client, config, rate_limits
from dstackweb.backends.aws.client import BACKGROUND, Aws, Patience
from dstackweb.backends.aws.kind import AwsBackend
from dstackweb.backends.aws.rate_limits import RateLimit
from dstackweb.backends.contract import SourceFailed, SourceKey
from dstackweb.backends.models import Backend
from dstackweb.lib.models import Bucket, Circuit
from standins.aws import ACCESS_KEY, SECRET_KEY, Cloud

REGION = "us-east-1"
TWO_TRIES = Patience("standard", attempts=2, connect_s=3, read_s=10, turn_s=3)
NOW = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
QUOTAS = ("service-quotas", REGION, "ListServiceQuotas")
LISTED: dict[str, Any] = {"ServiceCode": "ec2"}

pytestmark = pytest.mark.django_db


class Clock:
    """Time that only sleeping moves."""

    def __init__(self) -> None:
        self.now = NOW
        self.slept: list[float] = []

    def __call__(self) -> dt.datetime:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += dt.timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def aws(cloud: Cloud, clock: Clock, **how: Any) -> Aws:
    said = {"regions": [REGION], "endpoint_url": cloud.url, "credentials": {"access_key_id": ACCESS_KEY}}
    patience = how.pop("patience", client.PROBE)
    return Aws(config.read({**said, **how}), SECRET_KEY, patience=patience, clock=clock, sleep=clock.sleep)


def failure(of: Aws, *call: str, **params: Any) -> SourceFailed:
    with pytest.raises(SourceFailed) as failed:
        of.call(*(call or QUOTAS), **(params or ({} if call else LISTED)))
    return failed.value


class TestThrottling:
    def test_opens_the_circuit_for_all_callers_until_a_probe_closes_it(self, cloud: Cloud, clock: Clock) -> None:
        ours, others = aws(cloud, clock), aws(cloud, clock)
        cloud.throttle("servicequotas")
        failed = failure(ours)
        until = dt.datetime.fromisoformat(failed.data["until"])
        assert (failed.code, failed.data["api"], failed.data["region"]) == (
            "throttled",
            "service-quotas:ListServiceQuotas",
            REGION,
        )
        assert clock.now < until <= clock.now + dt.timedelta(seconds=2)
        for _ in range(5):
            assert failure(others).data["until"] == failed.data["until"]
        assert cloud.count("servicequotas") == 1
        clock.now = until
        again = dt.datetime.fromisoformat(failure(others).data["until"])
        assert (cloud.count("servicequotas"), again > until) == (2, True)
        cloud.unthrottle()
        clock.now = again
        ours.call(*QUOTAS, **LISTED)
        others.call(*QUOTAS, **LISTED)
        assert Circuit.objects.get().open_until is None

    def test_of_one_api_does_not_affect_others_or_other_regions(self, cloud: Cloud, clock: Clock) -> None:
        ours = aws(cloud, clock, regions=[REGION, "eu-west-1"])
        cloud.throttle("ec2", "DescribeInstances", REGION)
        assert failure(ours, "ec2", REGION, "DescribeInstances").code == "throttled"
        ours.call("ec2", REGION, "DescribeSubnets")
        ours.call("ec2", "eu-west-1", "DescribeInstances")

    @pytest.mark.parametrize(
        ("service", "operation", "params"),
        [
            ("ec2", "DescribeInstances", {}),
            ("service-quotas", "ListServiceQuotas", LISTED),
            ("pricing", "GetProducts", {"ServiceCode": "AmazonEC2"}),
        ],
    )
    def test_is_recognized_for_each_service(
        self, cloud: Cloud, clock: Clock, service: str, operation: str, params: dict[str, Any]
    ) -> None:
        cloud.throttle()
        assert failure(aws(cloud, clock), service, REGION, operation, **params).code == "throttled"

    def test_for_a_moment_is_overcome_by_a_repeat(self, cloud: Cloud, clock: Clock) -> None:
        cloud.fail("servicequotas", code="TooManyRequestsException", status=400, times=1)
        aws(cloud, clock, patience=TWO_TRIES).call(*QUOTAS, **LISTED)
        assert cloud.count("servicequotas") == 2
        assert not Circuit.objects.exists()

    def test_a_probe_that_fails_otherwise_is_followed_by_another(self, cloud: Cloud, clock: Clock) -> None:
        ours = aws(cloud, clock)
        cloud.throttle("servicequotas")
        clock.now = dt.datetime.fromisoformat(failure(ours).data["until"])
        cloud.unthrottle()
        cloud.deny("servicequotas")
        assert [failure(ours).code for _ in range(2)] == ["access_denied"] * 2
        cloud.allow()
        ours.call(*QUOTAS, **LISTED)
        assert Circuit.objects.get().failures == 0


class TestPace:
    @pytest.fixture(autouse=True)
    def slow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(rate_limits.RATES, "service-quotas", RateLimit(0.1, 2))

    def test_is_one_for_all_that_use_the_same_account(self, cloud: Cloud, clock: Clock) -> None:
        patient = replace(client.PROBE, turn_s=60)
        ours, others = aws(cloud, clock, patience=patient), aws(cloud, clock, patience=patient)
        for each in (ours, others, ours, others):
            each.call(*QUOTAS, **LISTED)
        assert len(clock.slept) == 2
        assert clock.slept == pytest.approx([10, 20], abs=4)
        assert Bucket.objects.count() == 1

    def test_counts_repeats_too(self, cloud: Cloud, clock: Clock) -> None:
        cloud.throttle("servicequotas")
        failure(aws(cloud, clock, patience=TWO_TRIES))
        failure(aws(cloud, clock, patience=TWO_TRIES))
        assert cloud.count("servicequotas") == 2
        assert Bucket.objects.get().tokens == pytest.approx(0, abs=0.5)

    def test_a_caller_that_would_wait_too_long_gets_an_error_and_takes_no_token(
        self, cloud: Cloud, clock: Clock
    ) -> None:
        ours = aws(cloud, clock, patience=replace(client.PROBE, turn_s=15))
        for _ in range(3):
            ours.call(*QUOTAS, **LISTED)
        for _ in range(2):
            failed = failure(ours)
            wait = dt.datetime.fromisoformat(failed.data["until"]) - clock.now
            assert (failed.code, failed.data["by"]) == ("throttled", "limiter")
            assert 15 < wait.total_seconds() <= 20
        assert cloud.count("servicequotas") == 3
        assert not Circuit.objects.exists()


class TestCredentials:
    def test_of_the_default_chain_come_from_the_environment(
        self, cloud: Cloud, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in cloud.env.items():
            monkeypatch.setenv(name, value)
        ours = aws(cloud, clock, credentials="default", endpoint_url=None)
        ours.call("ec2", REGION, "DescribeInstances")
        assert cloud.count("ec2") == 1

    def test_of_a_profile_come_from_boto3s_files(
        self, cloud: Cloud, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = tmp_path / "credentials"
        path.write_text(f"[gpus]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
        aws(cloud, clock, credentials={"profile": "gpus"}).call("ec2", REGION, "DescribeInstances")
        failed = failure(aws(cloud, clock, credentials={"profile": "cpus"}), "ec2", REGION, "DescribeInstances")
        assert (failed.code, failed.data["why"]) == ("bad_credentials", "config")

    def test_that_are_not_there_are_missed(self, cloud: Cloud, clock: Clock) -> None:
        assert failure(aws(cloud, clock, credentials="default"), "ec2", REGION, "DescribeInstances").code == (
            "no_credentials"
        )

    def test_that_aws_refuses_are_bad(self, cloud: Cloud, clock: Clock) -> None:
        cloud.credentials({"AKIAOTHER": "x"})
        of_ec2 = failure(aws(cloud, clock), "ec2", REGION, "DescribeInstances")
        of_quotas = failure(aws(cloud, clock))
        for failed in (of_ec2, of_quotas):
            assert (failed.code, failed.data["why"]) == ("bad_credentials", "refused")

    def test_a_role_is_assumed_with_them(self, cloud: Cloud, clock: Clock) -> None:
        role = {"role_arn": "arn:aws:iam::123456789012:role/gpus", "external_id": "ours"}
        ours = aws(cloud, clock, credentials={"access_key_id": ACCESS_KEY, **role})
        for _ in range(2):
            ours.call("ec2", REGION, "DescribeInstances")
        assert (cloud.count("sts", "AssumeRole"), cloud.count("ec2")) == (1, 2)
        assert {name.split(":")[1] for name in Bucket.objects.values_list("name", flat=True)} == {"123456789012"}

    def test_a_role_that_may_not_be_assumed_names_that_permission(self, cloud: Cloud, clock: Clock) -> None:
        cloud.deny("sts")
        role = {"role_arn": "arn:aws:iam::123456789012:role/gpus"}
        failed = failure(
            aws(cloud, clock, credentials={"access_key_id": ACCESS_KEY, **role}), "ec2", REGION, "DescribeInstances"
        )
        assert (failed.code, failed.data["action"]) == ("access_denied", "sts:AssumeRole")


def test_a_region_that_is_not_enabled_is_an_error_of_its_own(cloud: Cloud, clock: Clock) -> None:
    cloud.region("af-south-1", enabled=False)
    failed = failure(aws(cloud, clock, regions=["af-south-1"]), "ec2", "af-south-1", "DescribeInstances")
    assert (failed.code, failed.data["region"]) == ("region_disabled", "af-south-1")


def test_an_endpoint_that_refuses_connections_is_unreachable(cloud: Cloud, clock: Clock) -> None:
    ours = aws(cloud, clock, endpoint_url="http://127.0.0.1:9")
    failed = failure(ours, "ec2", REGION, "DescribeInstances")
    assert failed.code == "unreachable"
    assert failed.data["endpoint"].startswith("http://127.0.0.1:9")


def test_threads_share_the_clients_of_a_backend(backend: Backend, cloud: Cloud) -> None:
    found: list[Any] = []
    ours = client.aws_of(backend)
    threads = [threading.Thread(target=lambda: found.append(ours._client("ec2", REGION, BACKGROUND))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_a_new_version_of_a_backend_signs_in_again(backend: Backend) -> None:
    first = client.aws_of(backend)
    assert client.aws_of(backend) is first
    backend.version += 1
    assert client.aws_of(backend) is not first


def test_refused_credentials_are_read_again_next_time(
    backend: Backend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    backend.config["credentials"] = "default"
    ours, key = AwsBackend(backend), SourceKey("spot_prices", REGION)
    said = f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = "
    path.write_text(f"{said} wrong\n")
    with pytest.raises(SourceFailed, match="bad_credentials"):
        ours.fetch(key)
    path.write_text(f"{said} {SECRET_KEY}\n")
    assert ours.fetch(key)


@pytest.mark.parametrize("source", ["prices", "spot_prices"])
def test_a_missing_profile_is_bad_credentials_for_every_source(backend: Backend, source: str) -> None:
    backend.config["credentials"] = {"profile": "gpus"}
    with pytest.raises(SourceFailed) as failed:
        AwsBackend(backend).fetch(SourceKey(source, REGION))
    assert (failed.value.code, failed.value.data["why"]) == ("bad_credentials", "config")


def test_a_region_without_a_partition_is_a_service_error_that_names_it(backend: Backend) -> None:
    backend.config["regions"] = ["aa-nowhere-1"]
    with pytest.raises(SourceFailed) as failed:
        AwsBackend(backend).fetch(SourceKey("prices", "aa-nowhere-1"))
    assert failed.value.code == "service_error"
    assert "aa-nowhere-1" in failed.value.data["text"]


def test_an_access_key_without_its_secret_is_bad_credentials(backend: Backend) -> None:
    backend.secret = ""
    with pytest.raises(SourceFailed, match="missing: secret_access_key"):
        AwsBackend(backend).fetch(SourceKey("spot_prices", REGION))


def test_a_secret_kept_under_another_key_can_not_be_used(backend: Backend, settings: Any) -> None:
    settings.SECRET_KEY = "another"
    with pytest.raises(SourceFailed) as failed:
        AwsBackend(backend).fetch(SourceKey("spot_prices", REGION))
    assert (failed.value.code, failed.value.data["why"]) == ("bad_credentials", "config")
    assert "another secret key" in failed.value.data["text"]


def test_pages_follow_each_other_to_the_end(cloud: Cloud, clock: Clock) -> None:
    few: dict[str, Any] = {"ServiceCode": "ec2", "MaxResults": 20}
    codes = list(aws(cloud, clock).items(*QUOTAS, "Quotas", lambda quota: quota["QuotaCode"], **few))
    assert cloud.count("servicequotas") > 2
    assert len(codes) == len(set(codes)) > 40
