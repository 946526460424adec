"""EC2, as its stand-in plays it, passes the conformance suite of kinds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from dstackweb.backends.aws import ami, client
from dstackweb.backends.aws.kind import AwsBackend
from dstackweb.backends.contract import InstanceOrder
from dstackweb.backends.models import Backend
from dstackweb.lib.models import Circuit
from standins.aws import Cloud
from tests.backends.aws.conftest import REGION
from tests.backends.contract.engine import Engine
from tests.backends.contract.suite import CloudContract
from tests.support import free_port


class Ec2(Engine):
    region = REGION
    instance_type = "t3.small"
    ends = "shutdown -h now"

    def __init__(self, backend: Backend, cloud: Cloud, patch: pytest.MonkeyPatch) -> None:
        self.backend, self.cloud, self.patch = backend, cloud, patch
        ami.forget()

    def driver(self) -> AwsBackend:
        return AwsBackend(self.backend)

    def started(self) -> int:
        return len(self.cloud.machines())

    def end(self, cloud_id: str) -> None:
        self.cloud.client("ec2").terminate_instances(InstanceIds=[cloud_id])

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        self._use(f"http://127.0.0.1:{free_port()}")
        yield
        self._use(self.cloud.url)

    @contextmanager
    def losing_answers(self) -> Iterator[None]:
        self.driver().launch(self.order(deployment="warm up: finds an image"))
        self.cloud.reset()
        with self.patch.context() as patch:
            patch.setattr(client, "ONCE", client.Patience("standard", 1, connect_s=1, read_s=0.2, turn_s=1))
            self.cloud.latency(0.5, "ec2", "RunInstances")
            yield
        self.cloud.latency(0, "ec2", "RunInstances")

    @contextmanager
    def throttling(self) -> Iterator[None]:
        self.cloud.throttle()
        yield
        self.cloud.unthrottle()
        Circuit.objects.all().delete()

    def refused(self) -> InstanceOrder:
        self.cloud.capacity(0, self.instance_type)
        return self.order()

    def _use(self, url: str) -> None:
        self.backend.config = {**self.backend.config, "endpoint_url": url}
        self.backend.version += 1
        self.backend.save()


class TestEc2(CloudContract):
    @pytest.fixture
    def engine(
        self,
        backend: Backend,
        cloud: Cloud,
        monkeypatch: pytest.MonkeyPatch,
        unlimited_launches: None,
        settings: Any,
    ) -> Ec2:
        settings.DSTACKWEB_PUBLIC_URL = "https://gpus.example.org"
        # botocore's own repeats wait for seconds.
        monkeypatch.setattr(client, "Aws", partial(client.Aws, patience=client.PROBE))
        return Ec2(backend, cloud, monkeypatch)
