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
from dstackweb.backends.hosts.views import is_online
from dstackweb.backends.models import Gpu, Host, Instance, InstanceStatus
from dstackweb.gpus.clock import to_ms
from dstackweb.gpus.models import HostSampling, PolicyStop
from dstackweb.gpus.samples.latest import is_fresh, newest
from dstackweb.offers import figures, freshness, sources
from dstackweb.progress.models import Scope
from dstackweb.progress.states import TaskState
from dstackweb.runs import spend
from dstackweb.runs.models import QueueCount, Run
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.models import PassState, PeriodicJob

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


COUNTED = {
    "hits": "Looks at offers answered from a kept result",
    "misses": "Looks for which there was no kept result",
    "coalesced": "Callers that would have asked, too, while somebody was at it",
    "calls": "Times that a cloud was asked for something",
    "failures": "Calls to a cloud that came to nothing",
    "throttles": "Failures because a cloud was asked too often",
    "stale_served": "Answers made of something older than it should be",
    "uncached": "Calls that the same answers would have cost without a cache",
}


class Clouds(Collector):
    """The figures at `now`. Counters begin anew at midnight UTC, which Prometheus takes for a restart."""

    def __init__(self, now: dt.datetime) -> None:
        self._now = now

    def collect(self) -> Iterable[Metric]:
        """All metrics of clouds; none of them asks a cloud."""
        yield from self._cache()
        yield from self._sources()
        yield from self._apis()
        yield from self._machines()
        yield from self._money()

    def _cache(self) -> Iterator[Metric]:
        midnight = self._now.astimezone(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        totals = figures.totals(midnight)
        for name, told in COUNTED.items():
            counter = CounterMetricFamily(f"dstackweb_offers_{name}", told, labels=["backend"])
            for backend, found in totals.items():
                counter.add_metric([backend], getattr(found, name))
            yield counter
        saved = GaugeMetricFamily(
            "dstackweb_offers_calls_saved", "Calls that the cache has saved since midnight UTC", labels=["backend"]
        )
        for backend, found in totals.items():
            saved.add_metric([backend], found.saved)
        yield saved

    def _sources(self) -> Iterator[Metric]:
        labels = ["backend", "source", "region"]
        age = GaugeMetricFamily("dstackweb_source_age_seconds", "Age of what a cloud said last", labels=labels)
        state = GaugeMetricFamily(
            "dstackweb_source_state", "1 for the state that a source is in", labels=[*labels, "state"]
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
            "dstackweb_api_calls_left", "Calls that may be made at once; below zero: that wait", labels=labels
        )
        most = GaugeMetricFamily("dstackweb_api_calls_at_once", "Calls that may be made at once at most", labels=labels)
        alone = GaugeMetricFamily(
            "dstackweb_api_left_alone_seconds", "For how long an API that throttled is not asked", labels=labels
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
            "dstackweb_instances", "Machines of clouds that are not gone; idle: kept for another run",
            labels=["backend", "status"],
        )  # fmt: skip
        idle = When(status=InstanceStatus.RUNNING, holder=None, then=Value("idle"))
        state = Case(idle, default=F("status"))
        for backend, status, count in there.values_list("backend__name", state).annotate(Count("pk")):
            counts.add_metric([backend, status], count)
        yield counts

    def _money(self) -> Iterator[Metric]:
        spent = GaugeMetricFamily("dstackweb_spent_usd", "USD spent on clouds this month (UTC)", labels=["project"])
        budget = GaugeMetricFamily("dstackweb_budget_usd", "USD that may be spent in a month", labels=["project"])
        pays = Exists(Instance.objects.filter(project=OuterRef("pk")))
        for project in Project.objects.filter(Q(monthly_budget__isnull=False) | pays).order_by("name"):
            spent.add_metric([project.name], float(spend.spent_this_month(project.pk, self._now)))
            if project.monthly_budget is not None:
                budget.add_metric([project.name], float(project.monthly_budget))
        yield spent
        yield budget


class Tasks(Collector):
    """The counters as they are; prefixes, which may be thousands, are left to the API."""

    def collect(self) -> Iterable[Metric]:
        """All metrics of tasks."""
        tasks = GaugeMetricFamily(
            "dstackweb_tasks", "Tasks of runs whose attempt goes on", labels=["project", "run", "state"]
        )
        groups = GaugeMetricFamily(
            "dstackweb_task_groups", "Groups of tasks that are not all forgotten", labels=["project", "run"]
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
            "dstackweb_task_attempts_unsettled", "Attempts that are over and whose live tasks are still to be released"
        )
        unsettled.add_metric([], Scope.objects.filter(ended_ms__isnull=False, settled=False).count())
        yield unsettled


def healthz(request: HttpRequest) -> HttpResponse:
    """The web process answers."""
    return JsonResponse({"status": "ok"})


def readyz(request: HttpRequest) -> HttpResponse:
    """The database answers; 503 with what is wrong when not."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except Exception as error:
        return JsonResponse({"status": "unavailable", "detail": f"database: {type(error).__name__}"}, status=503)
    return JsonResponse({"status": "ok"})


def metrics(request: HttpRequest) -> HttpResponse:
    """Prometheus text: kept counters only, so that a scrape costs a few rows."""
    registry = CollectorRegistry()
    runs = Gauge("dstackweb_runs", "Runs by queue and status", ["project", "queue", "status"], registry=registry)
    for row in QueueCount.objects.select_related("queue__project"):
        for status in RunStatus:
            runs.labels(row.queue.project.name, row.queue.name, status.value).set(getattr(row, status.value))
    hosts = Gauge("dstackweb_host_online", "Whether a host is heard of", ["host"], registry=registry)
    cpus = Gauge("dstackweb_host_cpus_used", "CPUs that jobs hold", ["host"], registry=registry)
    for host in Host.joined.all():
        hosts.labels(host.name).set(is_online(host))
        cpus.labels(host.name).set(host.cpus_used)
    late = Gauge("dstackweb_periodic_late_seconds", "Time past due of periodic work", ["job"], registry=registry)
    now = timezone.now()
    for job in PeriodicJob.objects.all():
        late.labels(job.name).set(max(0.0, (now - job.due_at).total_seconds()))
    state = PassState.objects.filter(pk=1).first()
    if state is not None:
        Gauge("dstackweb_pass_duration_ms", "Time of the last placement pass", registry=registry).set(state.duration_ms)
    registry.register(Clouds(now))
    registry.register(Gpus(now))
    registry.register(Tasks())
    return HttpResponse(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)
