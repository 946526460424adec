"""The conformance suite on a real Ray cluster of one node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dstackweb.backends import registry, services
from dstackweb.backends.contract import Cloud, InstanceOrder
from standins.ray import CPUS, Ray
from tests.backends.contract.engine import Engine
from tests.backends.contract.suite import CloudContract
from tests.backends.ray.way import Way
from tests.support import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("ray")]


class RayEngine(Engine):
    region = "cluster"
    instance_type = "cpu"

    def __init__(self, way: Way) -> None:
        self.way = way
        self.backend, _is_new = services.put("cluster", "ray", {"projects": ["main"], "address": way.url})

    def driver(self) -> Cloud:
        return registry.cloud(self.backend)

    def started(self) -> int:
        return len(self.way.jobs())

    def end(self, cloud_id: str) -> None:
        self.way.cluster.post(f"/api/jobs/{cloud_id}/stop").raise_for_status()

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        with self._troubled("cut"):
            yield

    @contextmanager
    def losing_answers(self) -> Iterator[None]:
        with self._troubled("lost"):
            yield

    @contextmanager
    def throttling(self) -> Iterator[None]:
        with self._troubled("429"):
            yield

    @contextmanager
    def _troubled(self, trouble: str) -> Iterator[None]:
        self.way.trouble = trouble
        try:
            yield
        finally:
            self.way.trouble = ""

    def refused(self) -> InstanceOrder:
        return self.order(instance_type="gpu:A100", gpu_count=9)

    def clear(self) -> None:
        """End and forget all jobs."""

        def is_empty() -> bool:
            for job in self.way.jobs():
                self.way.cluster.delete(f"/api/jobs/{job['submission_id']}")
            return not self.way.jobs()

        for job in self.way.jobs():
            self.way.cluster.post(f"/api/jobs/{job['submission_id']}/stop")
        eventually(is_empty)
        # Ray's own count is up to five seconds old, and has the jobs of a test that filled the cluster.
        code = self.driver()
        assert registry.is_counted(code)
        eventually(lambda: code.take(code.fetch(code.key), self.order(cpus=CPUS)) is not None)


class TestContract(CloudContract):
    @pytest.fixture
    def engine(self, ray: Ray, db: Any) -> Iterator[RayEngine]:
        engine = RayEngine(Way(ray.address))
        yield engine
        engine.clear()
        engine.way.close()
