"""The health page: system status as a list of checks, cheap reads all. One that fails becomes a line of its own."""

from __future__ import annotations

import datetime as dt
import functools
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from django.conf import settings
from django.db import connection
from django.http import HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _, gettext_lazy, ngettext
from django_q.brokers import get_broker
from django_q.conf import Conf
from django_q.status import Stat

import dstackweb
from dstackweb.accounts.models import Project
from dstackweb.backends import api_calls, registry
from dstackweb.backends.hosts.inventory import is_online, names_by_isolation
from dstackweb.backends.kinds import HealthLine
from dstackweb.backends.models import Host, Isolation, Ports
from dstackweb.lib import schema
from dstackweb.lib.commands import server_command
from dstackweb.offers import counts
from dstackweb.runs import archives, history
from dstackweb.runs.models import ProjectArtifacts, ProjectLogs, QueueCount
from dstackweb.scheduler.models import PassState
from dstackweb.scheduler.processes import retention
from dstackweb.web import health_checks
from dstackweb.web.common.pages import PageRequest, fingerprint, polled, project_page
from dstackweb.web.history import polylines
from dstackweb.wording import hosts as host_words, storage, units
from dstackweb.wording.sentence import clauses, listing

log = logging.getLogger(__name__)

FULL_AT = 0.95
NEARLY_FULL = 0.8
BEHIND_S = 3600.0
"""Pruning keeps up if now and then nothing is left."""
BACKLOG = 100
"""Tasks waiting in the broker; more means that the workers do not keep up."""
TONES = ("go", "info", "wait", "bad")
TREND = dt.timedelta(hours=24)
APIS = 20
"""APIs with a row of their own."""


class CheckLine(NamedTuple):
    """A check, and the page about what it checks: the name of its URL, or empty."""

    check: HealthLine
    view: str


class HealthArea(NamedTuple):
    """Checks that belong together: those that need attention, the worst first, and the others."""

    name: str
    tone: str
    faults: list[CheckLine]
    fine: list[CheckLine]


@project_page()
def health_page(request: PageRequest) -> HttpResponse:
    now = timezone.now()
    found, calls = areas(request.project), sorted(counts.last_day(now).items())
    apis = api_rows(now)
    trend = history.waiting_by_hour(now - TREND)
    worst = max((area.tone for area in found), key=TONES.index)
    context = {
        "areas": found,
        "calls": calls,
        "apis": apis,
        "api_hours": api_calls.HOURS - 1,
        "worst": worst,
        "faults": sum(len(area.faults) for area in found),
        "trend": polylines(trend),
        "trend_width": len(trend) - 1,
        "most_waiting": max((length for length in trend if length is not None), default=None),
        "program": (dstackweb.__version__, schema.VERSION),
    }
    version = fingerprint(found, calls, trend, apis)
    return polled(request, "health/health.html", "health/health_list.html", version, lambda: context)


class ApiRow(NamedTuple):
    """The requests to one API in the last 24 hours, of which `points` is the chart by hour.

    `kind` is the kind's label. A last row may sum up `summed` APIs.
    """

    kind: str
    api: str
    region: str
    figures: api_calls.Figures
    points: list[str]
    summed: int = 0


def api_rows(now: dt.datetime) -> list[ApiRow]:
    """Return the APIs that throttled, then the busiest; those beyond APIS as one row."""
    apis = sorted(api_calls.last_day(now).items(), key=lambda item: (-item[1].throttles, -item[1].requests, item[0]))
    labels = {name: str(kind.label or name) for name, kind in registry.KINDS.items()}
    rows = [
        ApiRow(labels.get(api.kind, api.kind), api.api, api.region, figures, polylines(figures.by_hour))
        for api, figures in apis[:APIS]
    ]
    if beyond := apis[APIS:]:
        total = api_calls.Figures()
        for _api, figures in beyond:
            total.add({name: getattr(figures, name) for name in api_calls.NUMBERS})
            total.by_hour = [sum(pair) for pair in zip(total.by_hour, figures.by_hour, strict=True)]
        rows.append(ApiRow("", "", "", total, polylines(total.by_hour), len(beyond)))
    return rows


def areas(project: Project) -> list[HealthArea]:
    """All checks by what they are about, the worst first, with what `project` uses."""
    usage = functools.partial(_usage, project)
    parts: dict[str, tuple[tuple[Callable[[], Iterable[HealthLine]], str], ...]] = {
        _("Scheduling"): (
            (_clusters, ""),
            (health_checks.periodic_checks, ""),
            (_passes, "web:history"),
            (_broker, ""),
        ),
        _("Hosts and jobs"): (
            (health_checks.host_checks, "web:hosts"),
            (health_checks.gpu_checks, "web:gpus"),
            (_isolation, "web:hosts"),
            (_ports, "web:hosts"),
            (_limits, "web:hosts"),
        ),
        _("Clouds and clusters"): (
            (health_checks.backend_checks, "web:offers"),
            (health_checks.api_checks, "web:offers"),
            (health_checks.instance_checks, "web:instances"),
            (health_checks.offer_checks, "web:offers"),
        ),
        _("Storage"): ((_database, ""), (_storage, ""), (_disk, ""), (_retention, ""), (usage, "web:runs")),
    }
    lines = _merged(
        (name, CheckLine(check, view)) for name, each in parts.items() for part, view in each for check in _safely(part)
    )
    found = [_area(name, [line for of, line in lines if of == name]) for name in parts]
    return sorted((area for area in found if area.faults or area.fine), key=lambda area: -TONES.index(area.tone))


def _area(name: str, lines: Sequence[CheckLine]) -> HealthArea:
    lines = sorted(lines, key=lambda line: -TONES.index(line.check.tone))
    tone = lines[0].check.tone if lines else "go"
    faults = [line for line in lines if line.check.tone in ("bad", "wait")]
    return HealthArea(name, tone, faults, lines[len(faults) :])


def _merged(found: Iterable[tuple[str, CheckLine]]) -> list[tuple[str, CheckLine]]:
    """One line for all checks that could not be read for the same cause, in the area of the first."""
    merged: dict[tuple[str, ...], tuple[str, CheckLine]] = {}
    for number, (area, line) in enumerate(found):
        check = line.check
        unreadable = check.tone == "bad" and check.value == _("could not be read")
        key = (check.value, check.hint) if unreadable else (str(number),)
        if key in merged:
            of, first = merged[key]
            name = f"{first.check.name}, {check.name}"
            merged[key] = of, first._replace(check=first.check._replace(name=name))
        else:
            merged[key] = area, line
    return list(merged.values())


def _safely(part: Callable[[], Iterable[HealthLine]]) -> list[HealthLine]:
    """A check that raises becomes a finding."""
    try:
        return list(part())
    except Exception as error:
        called = getattr(part, "__name__", "usage")
        log.warning("health check %s failed", called, exc_info=True)
        name = called.removesuffix("_checks").strip("_").capitalize()
        return [HealthLine(name, "bad", _("could not be read"), f"{type(error).__name__}: {error}")]


def _clusters() -> Iterable[HealthLine]:
    """django-q2's clusters report to the cache."""
    stats = Stat.get_all()
    if not stats:
        hint = _("No run starts or is watched. Start the workers with %s, or read its output.") % server_command("up")
        yield HealthLine(_("Workers"), "bad", _("none running"), hint)
    for stat in stats:
        workers = ngettext("%d worker", "%d workers", len(stat.workers)) % len(stat.workers)
        tone = "go" if stat.status in (Conf.IDLE, Conf.WORKING) else "wait"  # lazy words, equal in every language
        yield HealthLine(_("Workers"), tone, f"{str(stat.status).lower()}, {workers}", at=stat.tob)


def _passes() -> Iterable[HealthLine]:
    state = PassState.objects.filter(pk=1).first()
    waiting = sum(QueueCount.objects.values_list("submitted", flat=True))
    if state is not None and state.ended_at is not None:
        numbers = {"ms": round(state.duration_ms), "placed": state.placed, "waiting": waiting}
        value = _("last pass: %(ms)d ms, %(placed)d placed, %(waiting)d waiting") % numbers
        yield HealthLine(_("Placement"), "go", value, at=state.ended_at)
    else:
        yield HealthLine(_("Placement"), "wait", _("no pass has run yet"))


def _isolation() -> Iterable[HealthLine]:
    """What keeps jobs apart on the hosts, weakest first."""
    hosts = names_by_isolation()
    for level, (tone, advice) in _ISOLATION.items():
        if level in hosts:
            yield HealthLine(_("Isolation"), tone, host_words.isolation(level), str(advice) % listing(hosts[level]))
    for backend, projects in (shared := registry.shared_users()).items():
        hint = _("Jobs of %s have one user there: they can read and stop each other's. Set up a backend for each.")
        yield HealthLine(_("Isolation on %s") % backend, "info", _("one user"), hint % listing(projects))
    if not shared and not hosts.keys() & _ISOLATION.keys():
        yield HealthLine(_("Isolation"), "go", _("jobs are isolated from the server and from each other"))


def _ports() -> Iterable[HealthLine]:
    """Whether jobs on the server's own machine can connect to its database and Redis."""
    if hosts := list(Host.joined.filter(ports=Ports.OPEN).order_by("name").values_list("name", flat=True)):
        hint = _(
            "Jobs on %s can connect to the database and Redis, which only passwords protect. "
            "Start the host as root, install nftables there, and leave DSTACKWEB_JOB_USER unset."
        )
        yield HealthLine(_("Ports of the server"), "info", _("open to jobs"), hint % listing(hosts))
    elif Host.joined.filter(ports=Ports.CLOSED).exists():
        yield HealthLine(_("Ports of the server"), "go", _("closed to jobs"))


_ISOLATION = {
    Isolation.NONE: ("bad", gettext_lazy("%s cannot switch users. Start the host as root.")),
    Isolation.SHARED: (
        "wait",
        gettext_lazy(
            "Jobs on %s run as the server's user and can read its files. "
            "Start the host as root where others submit runs."
        ),
    ),
    Isolation.USER: (
        "info",
        gettext_lazy(
            "A job on %s can read and stop those of other projects. "
            "Unset DSTACKWEB_JOB_USER there to give each project a user of its own."
        ),
    ),
    Isolation.PROJECT: (
        "info",
        gettext_lazy("Jobs on %s see each other's processes and share /tmp. Install bubblewrap there for a sandbox."),
    ),
}


def _limits() -> Iterable[HealthLine]:
    """Whether cgroups limit the jobs of each host."""
    hosts = list(Host.joined.exclude(cgroups={}))
    free = [f"{host.name} ({host_words.limits(host.cgroups)})" for host in hosts if host.cgroups.get("code")]
    if free:
        hint = _("Jobs there can use more memory and CPUs than they asked for. Limits: %s.") % clauses(free)
        yield HealthLine(_("Limits of jobs"), "info", _("none on some hosts"), hint)
    elif hosts:
        yield HealthLine(_("Limits of jobs"), "go", _("memory and CPUs are limited"))


def _database() -> Iterable[HealthLine]:
    kind = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}.get(connection.vendor, connection.vendor)
    hint = _("For one server. Several servers need PostgreSQL.") if connection.vendor == "sqlite" else ""
    yield HealthLine(_("Database"), "info" if hint else "go", kind, hint)


def _storage() -> Iterable[HealthLine]:
    """Where logs and code are; several servers need one place. An outage is the periodic job's error."""
    kinds = {"": _("on the server's disk"), "file": _("in a shared folder"), "s3": _("in object storage")}
    url = settings.DSTACKWEB_STORAGE
    value = _("in the database") if url == "database" else kinds[url.partition(":")[0]]
    servers = [host.name for host in Host.joined.exclude(cluster="") if is_online(host)]
    if url or len(servers) < 2:
        yield HealthLine(_("Logs and code"), "go", value)
        return
    hint = _("Each of %s has only what reached it. Set DSTACKWEB_STORAGE on all servers.")
    yield HealthLine(_("Logs and code"), "bad", _("on the disk of each server"), hint % listing(servers))


def _broker() -> Iterable[HealthLine]:
    template = _("%d waiting in Redis") if "redis" in settings.Q_CLUSTER else _("%d waiting in the database")
    for name in sorted(set(settings.DSTACKWEB_CLUSTERS.values())):
        size = get_broker(name).queue_size()
        yield HealthLine(_("Task queue %s") % name, "go" if size < BACKLOG else "wait", template % size)


def _disk() -> Iterable[HealthLine]:
    usage = shutil.disk_usage(settings.DSTACKWEB_HOME)
    full = usage.used / usage.total
    value = _("%(free)s free of %(total)s") % {
        "free": units.mebibytes(usage.free >> 20),
        "total": units.mebibytes(usage.total >> 20),
    }
    yield HealthLine(_("Server disk"), "go" if full < FULL_AT else "bad", value)


def _usage(project: Project) -> Iterable[HealthLine]:
    """The storage that a project uses, of its quotas."""
    logs, code = _("Logs of this project"), _("Code of this project")
    no_logs = _(
        "Output of its jobs is not kept beyond the quota, and the runs go on. Delete runs whose logs are large."
    )
    no_code = _("No more code can be uploaded. It is deleted when it is %s days without use.")
    yield _quota(logs, ProjectLogs.used(project), settings.DSTACKWEB_PROJECT_LOG_GB, no_logs)
    kept, no_more = _("Artifacts of this project"), _("Files that its jobs leave are not kept beyond the quota.")
    no_more += " " + _("They are deleted %s days after their run.") % settings.DSTACKWEB_ARTIFACTS_DAYS
    yield _quota(kept, ProjectArtifacts.used(project), settings.DSTACKWEB_PROJECT_ARTIFACTS_GB, no_more)
    no_code %= settings.DSTACKWEB_ARCHIVES_DAYS
    yield _quota(code, archives.code_size(project), settings.DSTACKWEB_PROJECT_CODE_GB, no_code)


def _quota(name: str, used: int, quota_gb: int, then: str) -> HealthLine:
    share = used / (quota_gb * 1024**3) if quota_gb else 1.0
    value = _("%(used)s of %(quota)d GB") % {"used": units.size(used), "quota": quota_gb}
    if share < NEARLY_FULL:
        return HealthLine(name, "go", value)
    return HealthLine(name, "wait" if share < FULL_AT else "bad", value, then)


def _retention() -> Iterable[HealthLine]:
    """What waits to be pruned, of the deployment and on hosts; late once it does not get less for long."""
    rows = retention.current()
    if not rows:
        return
    waiting = [row for row in rows if row.waiting]
    behind = min((row.behind_since for row in waiting if row.behind_since), default=None)
    late = behind is not None and (timezone.now() - behind).total_seconds() > BEHIND_S
    total = sum(row.waiting for row in waiting)
    value = ngettext("%d item waits to be pruned", "%d items wait to be pruned", total) % total if total else ""
    hint = listing(storage.waiting(row.kind, row.host, row.waiting) for row in waiting)
    last = max((row.pruned_at for row in rows if row.pruned_at), default=None)
    name = _("Old data")
    yield HealthLine(name, "wait" if late else "go", value or _("nothing waits to be pruned"), hint, last)
