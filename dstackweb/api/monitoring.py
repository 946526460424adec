"""Liveness and readiness probes, and metrics for Prometheus. They need no sign-in."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator

from django.db import connection
from django.db.models import Case, Count, Exists, F, OuterRef, Q, Value, When
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils import timezone
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dstackweb.accounts.models import Project
from dstackweb.backends import registry
from dstackweb.backends.contract import SourceState
from dstackweb.backends.hosts.inventory import is_online
from dstackweb.backends.models import Gpu, Host, Instance, InstanceStatus
from dstackweb.gpus.clock import to_ms
from dstackweb.gpus.models import HostSampling, PolicyStop
from dstackweb.gpus.samples.latest import is_fresh, newest
from dstackweb.offers import counts, freshness, sources
from dstackweb.progress.models import Scope
from dstackweb.progress.states import TaskState
from dstackweb.runs import spend
from dstackweb.runs.models import QueueCount, Run
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.models import PassState, PeriodicJob

GAUGES = (
    ("utilization", "dstackweb_gpu_utilization_percent", "GPU utilization", 1),
    ("memory_used_mib", "dstackweb_gpu_memory_used_bytes", "GPU memory in use", 1 << 20),
    ("power_w", "dstackweb_gpu_power_watts", "GPU power draw", 1),
    ("temperature_c", "dstackweb_gpu_temperature_celsius", "GPU temperature", 1),
)


class Gpus(Collector):
    """GPU metrics as of `now`. GPUs without a fresh sample, or without a value, are left out."""

    def __init__(self, now: dt.datetime) -> None:
        self._now = now

    def collect(self) -> Iterable[Metric]:
        """GPU metrics from stored samples."""
        yield from self._gpus()
        yield from self._hosts()
        yield from self._stops()

    def _gpus(self) -> Iterator[Metric]:
        gpus = list(Gpu.objects.select_related("host").order_by("host__name", "index"))
        seen = newest(gpus)
        fresh = [gpu for gpu in gpus if gpu.uuid in seen and is_fresh(seen[gpu.uuid], to_ms(self._now))]
        for name, metric, help_text, factor in GAUGES:
            gauge = GaugeMetricFamily(metric, help_text, labels=["host", "gpu", "uuid"])
            for gpu in fresh:
                value = getattr(seen[gpu.uuid], name)
                if value is not None:
                    gauge.add_metric([gpu.host.name, str(gpu.index), gpu.uuid], value * factor)
            yield gauge

    def _hosts(self) -> Iterator[Metric]:
        works = GaugeMetricFamily(
            "dstackweb_host_sampling_ok", "Whether all GPUs of a host can be read", labels=["host"]
        )
        library = GaugeMetricFamily("dstackweb_host_nvml", "Whether a host has the NVML library", labels=["host"])
        age = GaugeMetricFamily(
            "dstackweb_host_sample_age_seconds", "Time since the last sample of a host's GPUs", labels=["host"]
        )
        took = GaugeMetricFamily("dstackweb_host_sample_duration_ms", "Duration of the last sample", labels=["host"])
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
            "Runs that utilization policies stopped, or (observed) would have stopped",
            labels=["project", "observed"],
        )
        rows = PolicyStop.objects.order_by().values(name=F("project__name"), only=F("observed")).annotate(n=Count("pk"))
        for row in rows:
            counter.add_metric([row["name"], str(row["only"]).lower()], row["n"])
        yield counter


COUNTED = {
    "hits": "Looks at offers answered from a kept result",
    "misses": "Reads that were not in the cache",
    "coalesced": "Calls saved because the same call was already in progress",
    "calls": "Calls to a cloud",
    "failures": "Calls to a cloud that failed",
    "throttles": "Calls that a cloud throttled",
    "stale_served": "Reads answered with stale data",
    "uncached": "Calls that would have been made without the cache",
}


class Clouds(Collector):
    """Cloud metrics as of `now`. Counters restart at midnight UTC, as after a restart of the process."""

    def __init__(self, now: dt.datetime) -> None:
        self._now = now

    def collect(self) -> Iterable[Metric]:
        """Cloud metrics from stored rows; no cloud is called."""
        yield from self._cache()
        yield from self._sources()
        yield from self._apis()
        yield from self._machines()
        yield from self._money()

    def _cache(self) -> Iterator[Metric]:
        midnight = self._now.astimezone(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        totals = counts.totals(midnight)
        for name, help_text in COUNTED.items():
            counter = CounterMetricFamily(f"dstackweb_offers_{name}", help_text, labels=["backend"])
            for backend, found in totals.items():
                counter.add_metric([backend], getattr(found, name))
            yield counter
        saved = GaugeMetricFamily(
            "dstackweb_offers_calls_saved", "Calls that the cache saved since midnight UTC", labels=["backend"]
        )
        for backend, found in totals.items():
            saved.add_metric([backend], found.saved)
        yield saved

    def _sources(self) -> Iterator[Metric]:
        labels = ["backend", "source", "region"]
        age = GaugeMetricFamily("dstackweb_source_age_seconds", "Age of a source's data", labels=labels)
        state = GaugeMetricFamily(
            "dstackweb_source_state", "1 for the current state of a source", labels=[*labels, "state"]
        )
        for found in freshness.of_backends(sources.sourced_backends(), self._now):
            names = [found.backend, found.source, found.region]
            if found.fetched_at is not None:
                age.add_metric(names, (self._now - found.fetched_at).total_seconds())
            for each in SourceState:
                state.add_metric([*names, each.value], float(found.state is each))
        yield age
        yield state

    def _apis(self) -> Iterator[Metric]:
        labels = ["api", "region"]
        left = GaugeMetricFamily(
            "dstackweb_api_calls_left", "Calls allowed now; negative: calls that wait", labels=labels
        )
        most = GaugeMetricFamily("dstackweb_api_calls_at_once", "Maximum burst of calls", labels=labels)
        alone = GaugeMetricFamily(
            "dstackweb_api_left_alone_seconds", "Time until a throttled API is called again", labels=labels
        )
        for found in (one for kind in registry.KINDS.values() for one in kind.api_usage(self._now)):
            names = [found.api, found.region]
            left.add_metric(names, found.left)
            most.add_metric(names, found.burst)
            alone.add_metric(names, (found.open_until - self._now).total_seconds() if found.open_until else 0.0)
        yield left
        yield most
        yield alone

    def _machines(self) -> Iterator[Metric]:
        there = Instance.objects.exclude(status=InstanceStatus.GONE).order_by()
        counts = GaugeMetricFamily(
            "dstackweb_instances", "Cloud instances; idle: kept for another run",
            labels=["backend", "status"],
        )  # fmt: skip
        idle = When(status=InstanceStatus.RUNNING, holder=None, then=Value("idle"))
        state = Case(idle, default=F("status"))
        for backend, status, count in there.values_list("backend__name", state).annotate(Count("pk")):
            counts.add_metric([backend, status], count)
        yield counts

    def _money(self) -> Iterator[Metric]:
        spent = GaugeMetricFamily("dstackweb_spent_usd", "USD spent on clouds this month (UTC)", labels=["project"])
        budget = GaugeMetricFamily("dstackweb_budget_usd", "Monthly budget in USD", labels=["project"])
        pays = Exists(Instance.objects.filter(project=OuterRef("pk")))
        for project in Project.objects.filter(Q(monthly_budget__isnull=False) | pays).order_by("name"):
            spent.add_metric([project.name], float(spend.spent_this_month(project.pk, self._now)))
            if project.monthly_budget is not None:
                budget.add_metric([project.name], float(project.monthly_budget))
        yield spent
        yield budget


class Tasks(Collector):
    """Task counters by run; prefixes, of which there may be thousands, are only in the API."""

    def collect(self) -> Iterable[Metric]:
        """Task metrics of attempts that have not ended."""
        tasks = GaugeMetricFamily("dstackweb_tasks", "Tasks of running attempts", labels=["project", "run", "state"])
        groups = GaugeMetricFamily(
            "dstackweb_task_groups", "Task groups with tasks that are not forgotten", labels=["project", "run"]
        )
        scopes = list(Scope.objects.filter(run_id__gt=0, ended_ms=None).select_related("project").order_by("id"))
        names = dict(Run.objects.filter(pk__in=[scope.run_id for scope in scopes]).values_list("pk", "name"))
        newest = {(scope.project.name, names[scope.run_id]): scope for scope in scopes if scope.run_id in names}
        for labels, scope in newest.items():
            for state in TaskState:
                tasks.add_metric([*labels, state.value], getattr(scope, state.value))
            groups.add_metric(labels, scope.groups)
        yield tasks
        yield groups
        unsettled = GaugeMetricFamily(
            "dstackweb_task_attempts_unsettled", "Ended attempts whose unfinished tasks are not released yet"
        )
        unsettled.add_metric([], Scope.objects.filter(ended_ms__isnull=False, settled=False).count())
        yield unsettled


def healthz(request: HttpRequest) -> HttpResponse:
    """The web process is alive."""
    return JsonResponse({"status": "ok"})


def readyz(request: HttpRequest) -> HttpResponse:
    """The database answers; otherwise 503 with the error."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except Exception as error:
        return JsonResponse({"status": "unavailable", "detail": f"database: {type(error).__name__}"}, status=503)
    return JsonResponse({"status": "ok"})


def metrics(request: HttpRequest) -> HttpResponse:
    """Metrics in Prometheus' text format, from stored counters: a scrape reads a few rows."""
    registry = CollectorRegistry()
    runs = Gauge("dstackweb_runs", "Runs by queue and status", ["project", "queue", "status"], registry=registry)
    for row in QueueCount.objects.select_related("queue__project"):
        for status in RunStatus:
            runs.labels(row.queue.project.name, row.queue.name, status.value).set(getattr(row, status.value))
    hosts = Gauge("dstackweb_host_online", "Whether a host is online", ["host"], registry=registry)
    cpus = Gauge("dstackweb_host_cpus_used", "CPUs in use by jobs", ["host"], registry=registry)
    for host in Host.joined.all():
        hosts.labels(host.name).set(is_online(host))
        cpus.labels(host.name).set(host.cpus_used)
    late = Gauge("dstackweb_periodic_late_seconds", "How late a periodic job is", ["job"], registry=registry)
    now = timezone.now()
    for job in PeriodicJob.objects.all():
        late.labels(job.name).set(max(0.0, (now - job.due_at).total_seconds()))
    state = PassState.objects.filter(pk=1).first()
    if state is not None:
        Gauge("dstackweb_pass_duration_ms", "Duration of the last pass", registry=registry).set(state.duration_ms)
    registry.register(Clouds(now))
    registry.register(Gpus(now))
    registry.register(Tasks())
    return HttpResponse(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)
