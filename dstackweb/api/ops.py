"""Liveness, readiness and figures for the people who run the deployment; no sign-in needed."""

from __future__ import annotations

from django.db import connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils import timezone
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from dstackweb.api.gpu_metrics import Gpus
from dstackweb.api.offer_metrics import Clouds
from dstackweb.api.progress_metrics import Tasks
from dstackweb.backends.hosts.views import is_online
from dstackweb.backends.models import Host
from dstackweb.runs.models import QueueCount
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.models import PassState, PeriodicJob


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
