from __future__ import annotations

from collections.abc import Iterator

import pytest

from dstackweb.backends.aws import client, config, instance_types, rate_limits
from dstackweb.backends.aws.kind import AwsBackend
from dstackweb.backends.models import Backend
from standins.aws import ACCESS_KEY, SECRET_KEY, Cloud
from tests.standins.fixtures import cloud

__all__ = ["cloud"]

REGION = "us-east-1"


@pytest.fixture(autouse=True)
def as_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing kept of other tests, and nothing of this machine's own AWS."""
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    client._kept.clear()
    instance_types.described.clear()
    yield
    client._kept.clear()


@pytest.fixture
def backend(cloud: Cloud, db: None) -> Backend:
    """A backend whose AWS is the cloud."""
    credentials = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}
    kept, secret = config.settle({"regions": [REGION], "endpoint_url": cloud.url, "credentials": credentials})
    return Backend.objects.create(name="cloud", kind="aws", config=kept, secret=secret)


@pytest.fixture
def unlimited_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that do not wait for the rate limit of one per second."""
    monkeypatch.setitem(rate_limits.RATES, "ec2.RunInstances", rate_limits.RateLimit(1000, 1000))


@pytest.fixture
def aws(backend: Backend) -> AwsBackend:
    return AwsBackend(backend)
