"""What own hosts' GPUs do and what policies stopped, for Prometheus: a row for each GPU and host."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator

from django.db.models import Count, F
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dstackweb.backends.models import Gpu
from dstackweb.gpus.clock import to_ms
from dstackweb.gpus.models import HostSampling, PolicyStop
from dstackweb.gpus.samples.latest import is_fresh, newest

GAUGES = (
    ("utilization", "dstackweb_gpu_utilization_percent", "How much of the time a GPU computed", 1),
    ("memory_used_mib", "dstackweb_gpu_memory_used_bytes", "Memory of a GPU in use", 1 << 20),
    ("power_w", "dstackweb_gpu_power_watts", "Power that a GPU draws", 1),
    ("temperature_c", "dstackweb_gpu_temperature_celsius", "Temperature of a GPU", 1),
)


class Gpus(Collector):
    """The figures at `now`. A GPU whose newest sample is stale, or lacks a value, has none of it."""

    def __init__(self, now: dt.datetime) -> None:
        self._now = now

    def collect(self) -> Iterable[Metric]:
        """All metrics of GPUs; none of them asks a GPU."""
        yield from self._gpus()
        yield from self._hosts()
        yield from self._stops()

    def _gpus(self) -> Iterator[Metric]:
        gpus = list(Gpu.objects.select_related("host").order_by("host__name", "index"))
        seen = newest(gpus)
        fresh = [gpu for gpu in gpus if gpu.uuid in seen and is_fresh(seen[gpu.uuid], to_ms(self._now))]
        for name, metric, told, factor in GAUGES:
            gauge = GaugeMetricFamily(metric, told, labels=["host", "gpu", "uuid"])
            for gpu in fresh:
                value = getattr(seen[gpu.uuid], name)
                if value is not None:
                    gauge.add_metric([gpu.host.name, str(gpu.index), gpu.uuid], value * factor)
            yield gauge

    def _hosts(self) -> Iterator[Metric]:
        works = GaugeMetricFamily(
            "dstackweb_host_sampling_ok", "Whether all GPUs of a host can be read", labels=["host"]
        )
        library = GaugeMetricFamily("dstackweb_host_nvml", "Whether a host has NVML's library", labels=["host"])
        age = GaugeMetricFamily(
            "dstackweb_host_sample_age_seconds", "Since the last look at a host's GPUs", labels=["host"]
        )
        took = GaugeMetricFamily("dstackweb_host_sample_duration_ms", "How long that look took", labels=["host"])
        for sampling in HostSampling.objects.select_related("host"):
            host = [sampling.host.name]
            works.add_metric(host, not sampling.error)
            library.add_metric(host, sampling.library)
            age.add_metric(host, max(0.0, (self._now - sampling.at).total_seconds()))
            took.add_metric(host, sampling.took_ms)
        yield from (works, library, age, took)

    def _stops(self) -> Iterator[Metric]:
        counter = CounterMetricFamily(
            "dstackweb_policy_stops",
            "Runs that their utilization policies stopped, or (observed) would have",
            labels=["project", "observed"],
        )
        rows = PolicyStop.objects.order_by().values(name=F("project__name"), only=F("observed")).annotate(n=Count("pk"))
        for row in rows:
            counter.add_metric([row["name"], str(row["only"]).lower()], row["n"])
        yield counter
