"""Liveness and readiness probes, which need no sign-in, and metrics for Prometheus, which need a token."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.models import Case, Count, Exists, F, OuterRef, Q, Sum, Value, When
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils import timezone
from django.utils.crypto import constant_time_compare
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dstackweb.accounts.models import Project
from dstackweb.backends import api_calls, registry
from dstackweb.backends.api_calls import Api
from dstackweb.backends.contract import SourceState
from dstackweb.backends.hosts.inventory import is_online
from dstackweb.backends.models import Gpu, Host, Instance, InstanceStatus
from dstackweb.gpus.models import HostSampling, PolicyStop
from dstackweb.gpus.selectors import is_fresh, newest
from dstackweb.lib.latency import Latency
from dstackweb.lib.times import to_ms
from dstackweb.offers import counts, source_rows, sources
from dstackweb.progress.models import Scope
from dstackweb.progress.states import AS_ENDED, AS_REPORTED, TaskState, folded
from dstackweb.runs import usage
from dstackweb.runs.models import Artifact, ProjectArtifacts, QueueCount
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.models import PassState, PeriodicJob
from dstackweb.scheduler.processes import retention

Rows = Iterable[tuple[Sequence[str], float]]
"""The values of a metric, each with its labels."""
SAMPLING_OLD_S = 120.0
"""A host whose GPUs were read longer ago is not read now; one without GPUs says so each minute."""
CLOSED = "Metrics are closed: set DSTACKWEB_METRICS_TOKEN on the server and give the same token to Prometheus.\n"
GPU_GAUGES = (
    ("utilization", "gpu_utilization_percent", "GPU utilization", 1),
    ("memory_used_mib", "gpu_memory_used_bytes", "GPU memory in use", 1 << 20),
    ("power_w", "gpu_power_watts", "GPU power draw", 1),
    ("temperature_c", "gpu_temperature_celsius", "GPU temperature", 1),
)
OFFER_COUNTERS = {
    "hits": "Reads answered from the cache",
    "misses": "Reads that were not in the cache",
    "coalesced": "Calls saved because the same call was already in progress",
    "calls": "Calls to a cloud",
    "failures": "Calls to a cloud that failed",
    "throttles": "Calls that a cloud throttled",
    "stale_served": "Reads answered with stale data",
    "uncached": "Calls that would have been made without the cache",
}


API_COUNTERS = (
    ("requests", "api_calls", "Requests that were sent to an API, retries included"),
    ("retries", "api_retries", "Requests that repeat a failed one"),
    ("throttles", "api_throttles", "Requests that an API throttled"),
    ("failures", "api_failures", "Requests that failed otherwise"),
)


def _gauge(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    return _filled(GaugeMetricFamily(f"dstackweb_{name}", text, labels=labels), rows)


def _counter(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    return _filled(CounterMetricFamily(f"dstackweb_{name}", text, labels=labels), rows)


def _filled(metric: GaugeMetricFamily | CounterMetricFamily, rows: Rows) -> Metric:
    for labels, value in rows:
        metric.add_metric(labels, value)
    return metric


class StoredMetrics(Collector):
    """All metrics as of `now`, from stored counters: no cloud or host is called, and a scrape reads few rows."""

    def __init__(self, now: dt.datetime) -> None:
        self._now = now

    def collect(self) -> Iterator[Metric]:
        for part in (
            _runs,
            _hosts,
            _periodic,
            _artifacts,
            _retention,
            _offers,
            _sources,
            _apis,
            _instances,
            _money,
            _gpus,
            _stops,
            _tasks,
        ):
            yield from part(self._now)


def _runs(now: dt.datetime) -> Iterator[Metric]:
    queues = QueueCount.objects.select_related("queue__project")
    rows = [
        ((row.queue.project.name, row.queue.name, status.value), getattr(row, status.value))
        for row in queues
        for status in RunStatus
    ]
    yield _gauge("runs", "Runs by queue and status", ["project", "queue", "status"], rows)


def _hosts(now: dt.datetime) -> Iterator[Metric]:
    hosts = list(Host.joined.all())
    yield _gauge(
        "host_online", "Whether a host is online", ["host"], [((host.name,), is_online(host)) for host in hosts]
    )
    held_back = [((host.name,), host.held_back_at is not None) for host in hosts]
    yield _gauge("host_held_back", "Whether a host gets no jobs because starts fail on it", ["host"], held_back)
    yield _gauge("host_cpus_used", "CPUs in use by jobs", ["host"], [((host.name,), host.cpus_used) for host in hosts])
    joined = list(HostSampling.objects.filter(host__left_at=None).select_related("host").order_by("host__name"))
    ages = {sampling: max(0.0, (now - sampling.at).total_seconds()) for sampling in joined}
    current = [sampling for sampling in joined if is_online(sampling.host) and ages[sampling] <= SAMPLING_OLD_S]
    read = [((sampling.host.name,), sampling in current and not sampling.error) for sampling in joined]
    yield _gauge("host_sampling_ok", "Whether all GPUs of a host are read now", ["host"], read)
    library = [((sampling.host.name,), sampling.library) for sampling in current]
    yield _gauge("host_nvml", "Whether a host has the NVML library", ["host"], library)
    rows = [((sampling.host.name,), age_s) for sampling, age_s in ages.items()]
    yield _gauge("host_sample_age_seconds", "Time since the last sample of a host's GPUs", ["host"], rows)
    durations = [((sampling.host.name,), sampling.took_ms) for sampling in current]
    yield _gauge("host_sample_duration_ms", "Duration of the last sample", ["host"], durations)


def _periodic(now: dt.datetime) -> Iterator[Metric]:
    late = [((job.name,), max(0.0, (now - job.due_at).total_seconds())) for job in PeriodicJob.objects.all()]
    yield _gauge("periodic_late_seconds", "How late a periodic job is", ["name"], late)
    passes = PassState.objects.filter(pk=1)
    yield _gauge("pass_duration_ms", "Duration of the last pass", [], [((), state.duration_ms) for state in passes])


def _artifacts(now: dt.datetime) -> Iterator[Metric]:
    kept = ProjectArtifacts.objects.select_related("project").order_by("project__name")
    sizes = [((row.project.name,), row.bytes) for row in kept]
    yield _gauge("artifacts_bytes", "Bytes of artifacts that are kept", ["project"], sizes)
    yield _gauge("artifacts", "Artifacts that are kept", [], [((), Artifact.objects.count())])


def _retention(now: dt.datetime) -> Iterator[Metric]:
    """As of the last ticks."""
    rows = [((row.kind, row.host), row.waiting) for row in retention.current()]
    yield _gauge("retention_waiting", "Old data that waits to be pruned", ["kind", "host"], rows)


def _gpus(now: dt.datetime) -> Iterator[Metric]:
    """GPUs without a fresh sample, or without a value, are left out."""
    gpus = list(Gpu.objects.filter(host__left_at=None).select_related("host").order_by("host__name", "index"))
    seen = newest(gpus)
    fresh = [
        ((gpu.host.name, str(gpu.index), gpu.uuid), seen[gpu.uuid])
        for gpu in gpus
        if gpu.uuid in seen and is_fresh(seen[gpu.uuid], to_ms(now))
    ]
    for field, name, text, factor in GPU_GAUGES:
        values = [(labels, getattr(series, field)) for labels, series in fresh]
        rows = [(labels, value * factor) for labels, value in values if value is not None]
        yield _gauge(name, text, ["host", "gpu", "uuid"], rows)


def _stops(now: dt.datetime) -> Iterator[Metric]:
    stops = PolicyStop.objects.order_by().values_list("project__name", "observed").annotate(Count("pk"))
    yield _counter(
        "policy_stops",
        "Runs that utilization policies stopped, or (observed) would have stopped",
        ["project", "observed"],
        [((project, str(observed).lower()), count) for project, observed, count in stops],
    )


def _offers(now: dt.datetime) -> Iterator[Metric]:
    """Counters restart at midnight UTC, as after a restart of the process."""
    totals = counts.totals(_midnight(now))
    for field, text in OFFER_COUNTERS.items():
        rows = [((backend,), getattr(found, field)) for backend, found in totals.items()]
        yield _counter(f"offers_{field}", text, ["backend"], rows)
    saved = [((backend,), found.saved) for backend, found in totals.items()]
    yield _gauge("offers_calls_saved", "Calls that the cache saved since midnight UTC", ["backend"], saved)


def _midnight(now: dt.datetime) -> dt.datetime:
    return now.astimezone(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def _sources(now: dt.datetime) -> Iterator[Metric]:
    labels = ["backend", "source", "region"]
    found = [
        ((one.backend, one.source, one.region), one) for one in source_rows.of_backends(sources.sourced_backends(), now)
    ]
    ages = [(names, (now - one.fetched_at).total_seconds()) for names, one in found if one.fetched_at is not None]
    yield _gauge("source_age_seconds", "Age of a source's data", labels, ages)
    states = [((*names, state.value), float(one.state is state)) for names, one in found for state in SourceState]
    yield _gauge("source_state", "1 for the current state of a source", [*labels, "state"], states)


def _apis(now: dt.datetime) -> Iterator[Metric]:
    found = [((one.api, one.region), one) for kind in registry.KINDS.values() for one in kind.api_usage(now)]
    labels = ["api", "region"]
    left = [(names, one.left) for names, one in found]
    yield _gauge("api_calls_left", "Calls allowed now; negative: calls that wait", labels, left)
    most = [(names, one.burst) for names, one in found]
    yield _gauge("api_calls_at_once", "Maximum burst of calls", labels, most)
    alone = [(names, (one.open_until - now).total_seconds() if one.open_until else 0.0) for names, one in found]
    yield _gauge("api_left_alone_seconds", "Time until a throttled API is called again", labels, alone)
    sums = api_calls.totals(_midnight(now))
    for field, name, text in API_COUNTERS:
        rows = [(tuple(api), getattr(sums[api], field)) for api in sorted(sums)]
        yield _counter(name, text, Api._fields, rows)


def _instances(now: dt.datetime) -> Iterator[Metric]:
    idle = When(status=InstanceStatus.RUNNING, holder=None, then=Value("idle"))
    there = Instance.objects.exclude(status=InstanceStatus.GONE).order_by()
    statuses = there.values_list("backend__name", Case(idle, default=F("status"))).annotate(Count("pk"))
    rows = [((backend, status), count) for backend, status, count in statuses]
    yield _gauge("instances", "Cloud instances; idle: kept for another run", ["backend", "status"], rows)


def _money(now: dt.datetime) -> Iterator[Metric]:
    pays = Exists(Instance.objects.filter(project=OuterRef("pk")))
    projects = list(Project.objects.filter(Q(monthly_budget__isnull=False) | pays).order_by("name"))
    spent = [((project.name,), float(usage.spent_this_month(project.pk, now))) for project in projects]
    yield _gauge("spent_usd", "USD spent on clouds this month (UTC)", ["project"], spent)
    budgets = [((each.name,), float(each.monthly_budget)) for each in projects if each.monthly_budget is not None]
    yield _gauge("budget_usd", "Monthly budget in USD", ["project"], budgets)


def _tasks(now: dt.datetime) -> Iterator[Metric]:
    """Tasks of attempts that have not ended, by project: names of runs are their projects' own, and without end."""
    sums = {state.value: Sum(state.value) for state in TaskState}
    running = Scope.objects.filter(run_id__gt=0, ended_ms=None).order_by("project__name").values("project__name")
    summed: Iterable[Any] = running.annotate(n_groups=Sum("groups"), **sums)
    found = {row["project__name"]: row for row in summed}
    counts = {name: {state: row[state.value] for state in TaskState} for name, row in found.items()}
    rows = [((name, state.value), n) for name in counts for state, n in folded(counts[name], AS_REPORTED).items()]
    yield _gauge("tasks", "Tasks of running attempts", ["project", "state"], rows)
    ended = [
        ((name, word), folded(counts[name], AS_ENDED)[state]) for name in counts
        for word, state in (("done", TaskState.MEMORY), ("failed", TaskState.ERRED))
    ]  # fmt: skip
    text = "Tasks of running attempts that were done or have failed, also those that are released or forgotten now"
    yield _gauge("tasks_ended", text, ["project", "outcome"], ended)
    groups = [((name,), row["n_groups"]) for name, row in found.items()]
    yield _gauge("task_groups", "Task groups of running attempts", ["project"], groups)
    unsettled = Scope.objects.filter(ended_ms__isnull=False, settled=False).count()
    text = "Ended attempts whose unfinished tasks are not released yet"
    yield _gauge("task_attempts_unsettled", text, [], [((), unsettled)])


def healthz(request: HttpRequest) -> HttpResponse:
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
    """For `Authorization: Bearer DSTACKWEB_METRICS_TOKEN`: 401 without it, 403 while the server has no such token.

    Loopback is no exception: jobs and a proxy on the same machine call from there.
    """
    if not settings.DSTACKWEB_METRICS_TOKEN:
        return HttpResponse(CLOSED, status=403, content_type="text/plain")
    wanted = f"Bearer {settings.DSTACKWEB_METRICS_TOKEN}"
    if not constant_time_compare(request.headers.get("Authorization", ""), wanted):
        return HttpResponse(
            "Send the token of DSTACKWEB_METRICS_TOKEN as a bearer token.\n",
            status=401,
            content_type="text/plain",
            headers={"WWW-Authenticate": "Bearer"},
        )
    collectors = CollectorRegistry()
    collectors.register(StoredMetrics(timezone.now()))
    collectors.register(Latency())
    return HttpResponse(generate_latest(collectors), content_type=CONTENT_TYPE_LATEST)
