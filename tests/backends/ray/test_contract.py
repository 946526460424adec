"""The conformance suite on a real Ray cluster of one node."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from dstackweb.backends import registry, services
from dstackweb.backends.contract import Cloud, InstanceOrder
from dstackweb.backends.ray.cluster import DEPLOYMENT
from dstackweb.devtools.ray import Ray
from tests.backends.contract.engine import Engine
from tests.backends.contract.suite import CloudContract
from tests.support import eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


class Way:
    """The network between a driver and the cluster. `trouble`: `cut`, `lost` (answers to submits), or a status."""

    def __init__(self, address: str) -> None:
        self.cluster = httpx.Client(base_url=address, timeout=30)
        self.trouble = ""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.cluster.close()

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs that the cluster knows and a deployment has made."""
        found = self.cluster.get("/api/jobs/").json()
        return [job for job in found if DEPLOYMENT in (job["metadata"] or {})]


def _handler(way: Way) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if way.trouble == "cut":
                return
            if way.trouble.isdigit():
                self.send_response(int(way.trouble))
                self.end_headers()
                return
            answer = way.cluster.request(self.command, self.path, content=body)
            if way.trouble == "lost" and self.command == "POST":
                return
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_POST = do_DELETE = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler


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


class TestContract(CloudContract):
    @pytest.fixture
    def engine(self, ray: Ray, db: Any) -> Iterator[RayEngine]:
        engine = RayEngine(Way(ray.address))
        yield engine
        engine.clear()
        engine.way.close()
