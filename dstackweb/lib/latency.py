"""How long requests take, by route, method and class of status, added up over all web processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's own variable: where each process keeps its counts in a file. It must be set before an import."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_registry = CollectorRegistry()
_seconds = Histogram(
    "dstackweb_http_request_seconds",
    "Time until the answer to a request begins",
    ["route", "method", "status"],
    buckets=BUCKETS,
    registry=_registry,
)


def start_counting(folder: Path) -> None:
    """Before the first web process of a server starts: forget what the last server's have counted."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in folder.glob("*.db"):
        file.unlink(missing_ok=True)


def observe(route: str | None, method: str | None, status: int, seconds: float) -> None:
    """Count a request. Requests for no route, and odd methods, share a name, since anyone can make them up."""
    _seconds.labels(route or "none", method if method in METHODS else "other", f"{status // 100}xx").observe(seconds)


class Latency(Collector):
    """For /metrics: of all web processes where they share a folder, else of this one."""

    def collect(self) -> Iterator[Metric]:
        folder = os.environ.get(FOLDER)
        if not folder:
            yield from _seconds.collect()
        elif Path(folder).is_dir():
            yield from MultiProcessCollector(CollectorRegistry(), folder).collect()  # type: ignore[no-untyped-call]
