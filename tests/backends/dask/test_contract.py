"""The conformance suite on a real Dask cluster of two workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from distributed import Client, Future

from dstackweb.backends import registry, services
from dstackweb.backends.contract import Cloud, InstanceOrder
from standins.dask import Dask
from tests.backends.contract.engine import DEPLOYMENT, Engine
from tests.backends.contract.suite import OTHER, CloudContract
from tests.backends.dask.relay import Relay
from tests.support import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("dask")]


class DaskEngine(Engine):
    """The cluster behind a relay, by which calls and answers get lost."""

    region = "cluster"
    instance_type = "cpu"

    def __init__(self, dask: Dask, client: Client) -> None:
        self.dask, self.client = dask, client
        self.relay = Relay(dask.port)
        address = f"tcp://127.0.0.1:{self.relay.port}"
        self.backend, _is_new = services.put("cluster", "dask", {"projects": ["main"], "scheduler": address})
        self.before = self._begun()

    def driver(self) -> Cloud:
        return registry.cloud(self.backend)

    def started(self) -> int:
        return self._begun() - self.before

    def end(self, cloud_id: str) -> None:
        Future(cloud_id, self.client).cancel(force=True)

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        self.relay.open = False
        yield
        self.relay.open = True

    @contextmanager
    def losing_answers(self) -> Iterator[None]:
        self.driver().instances(self.region, DEPLOYMENT)  # else what is lost is that the scheduler must learn to answer
        self.relay.answers = False
        yield
        self.relay.answers = True

    def refused(self) -> InstanceOrder:
        return self.order(instance_type="gpu:GPU", gpu_count=9)

    def close(self) -> None:
        self.relay.answers = self.relay.open = True
        code = self.driver()
        for deployment in (DEPLOYMENT, OTHER):
            code.terminate(self.region, [one.cloud_id for one in code.instances(self.region, deployment)])
        eventually(lambda: not any(self.client.processing().values()))
        self.client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins["dstackweb"].rows.clear())
        self.relay.close()

    def _begun(self) -> int:
        """How many tasks of this kind the scheduler has given to a worker."""
        # Lambdas are sent as a whole: the scheduler can't import this module.
        prefixes = self.client.run_on_scheduler(
            lambda dask_scheduler: {name: dict(of.state_counts) for name, of in dask_scheduler.task_prefixes.items()}
        )
        return int(prefixes.get("dstackweb", {}).get("processing", 0))


@pytest.fixture(scope="module")
def client(dask: Dask) -> Iterator[Client]:
    with Client(dask.address, set_as_default=False) as client:
        yield client


class TestContract(CloudContract):
    @pytest.fixture
    def engine(self, dask: Dask, client: Client, db: Any) -> Iterator[DaskEngine]:
        engine = DaskEngine(dask, client)
        yield engine
        engine.close()
