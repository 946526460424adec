"""How the deployment does, as a list of checks for the health page.

Cheap reads only, and no check can break the page.
"""

from __future__ import annotations

import datetime as dt
import logging
import shutil
from collections.abc import Callable, Iterable
from typing import NamedTuple

from django.conf import settings
from django.db import connection
from django.db.models import Count
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django_q.brokers import get_broker
from django_q.status import Stat

import dstackweb
from dstackweb.backends.aws import public_url
from dstackweb.backends.aws import wording as aws_wording
from dstackweb.backends.aws.backend import AwsBackend
from dstackweb.backends.aws.pressure import pressures
from dstackweb.backends.contract import SourceState
from dstackweb.backends.hosts.views import is_online
from dstackweb.backends.models import Backend, Host, Instance, InstanceStatus
from dstackweb.offers import freshness, sources, store
from dstackweb.runs.models import QueueCount
from dstackweb.scheduler.models import PassState, PeriodicJob
from dstackweb.wording import units

log = logging.getLogger(__name__)

LATE_S = 15.0
"""Periodic work that is due for longer than this isn't being enqueued: no ticker is up."""
STUCK_S = 900.0
"""A machine that is to end takes a minute or two."""
FULL_AT = 0.95
BACKLOG = 100
"""Tasks that wait in the broker: more means that the workers don't keep up."""
TONES = ("go", "info", "wait", "bad")


class Check(NamedTuple):
    """One line: what, how it is (`go`, `info`, `wait`, `bad`), the value, what to do, and since when."""

    name: str
    tone: str
    value: str
    hint: str = ""
    at: dt.datetime | None = None


def checks() -> list[Check]:
    """All checks, in the order in which one looks."""
    parts = (
        _clusters,
        _periodic,
        _passes,
        _hosts,
        _isolation,
        _clouds,
        _apis,
        _machines,
        _database,
        _broker,
        _offers,
        _disk,
    )
    found = [check for part in parts for check in _safely(part)]
    return [*found, Check(_("Version"), "info", dstackweb.__version__)]


def worst(found: Iterable[Check]) -> str:
    """The tone of the page as a whole."""
    return max((check.tone for check in found), key=TONES.index, default="go")


def _safely(part: Callable[[], Iterable[Check]]) -> list[Check]:
    """A check that can't be made is itself a finding."""
    try:
        return list(part())
    except Exception as error:
        log.warning("health check %s failed", part.__name__, exc_info=True)
        name = part.__name__.strip("_").capitalize()
        return [Check(name, "bad", _("could not be read"), f"{type(error).__name__}: {error}")]


def _clusters() -> Iterable[Check]:
    """django-q2's clusters tell the cache how they are."""
    stats = Stat.get_all()
    if not stats:
        hint = _("Nothing is started or watched. Start it with make run, or see its output.")
        yield Check(_("Workers"), "bad", _("none is up"), hint)
    for stat in stats:
        workers = ngettext("%d worker", "%d workers", len(stat.workers)) % len(stat.workers)
        tone = "go" if stat.status in ("Idle", "Working") else "wait"
        yield Check(_("Workers"), tone, f"{str(stat.status).lower()}, {workers}", at=stat.tob)


def _periodic() -> Iterable[Check]:
    now = timezone.now()
    jobs = list(PeriodicJob.objects.all())
    if not jobs:
        yield Check(_("Ticker"), "bad", _("has never run"))
    for job in jobs:
        late = (now - job.due_at).total_seconds()
        name = _("Periodic: %s") % job.name
        if job.last_error:
            yield Check(name, "bad", _("failed"), job.last_error, job.last_ended_at)
        elif late > LATE_S:
            yield Check(name, "bad", _("late by %s") % units.duration(late), _("No ticker is up."), job.last_ended_at)
        else:
            yield Check(name, "go", _("in time"), at=job.last_ended_at)


def _passes() -> Iterable[Check]:
    state = PassState.objects.filter(pk=1).first()
    waiting = sum(QueueCount.objects.values_list("submitted", flat=True))
    if state is not None and state.ended_at is not None:
        numbers = {"ms": round(state.duration_ms), "placed": state.placed, "waiting": waiting}
        value = _("last pass took %(ms)d ms and placed %(placed)d; %(waiting)d runs wait") % numbers
        yield Check(_("Placement"), "go", value, at=state.ended_at)
    else:
        yield Check(_("Placement"), "wait", _("no pass has run yet"))


def _hosts() -> Iterable[Check]:
    hosts = list(Host.joined.all())
    online = [host for host in hosts if is_online(host)]
    value = _("%(online)d of %(all)d online") % {"online": len(online), "all": len(hosts)}
    hint = "" if hosts else _("Runs can't start before a host is registered.")
    yield Check(_("Hosts"), "go" if hosts and len(online) == len(hosts) else "wait" if online else "bad", value, hint)
    for host in hosts:
        if host.error:
            yield Check(_("Host %s") % host.name, "bad", host.error, at=host.seen_at)


def _isolation() -> Iterable[Check]:
    shared = [host.name for host in Host.joined.filter(isolation="shared")]
    refusing = [host.name for host in Host.joined.filter(isolation="none")]
    if shared:
        hint = _("DSTACKWEB_SHARED_UID is set: jobs on %s run as the server's own user and can read its files.")
        advice = _("Only for your own machine.")
        yield Check(_("Isolation"), "wait", _("none"), f"{hint % ', '.join(shared)} {advice}")
    if refusing:
        hint = _("%s can neither switch users nor run containers. Start the host as root or install Podman or Docker.")
        yield Check(_("Isolation"), "bad", _("jobs are refused"), hint % ", ".join(refusing))
    if not shared and not refusing:
        yield Check(_("Isolation"), "go", _("jobs run apart from the server"))


def _clouds() -> Iterable[Check]:
    """Of each backend that starts machines: what it was asked for, and whether its machines could call back."""
    asked = sources.sourced_backends()
    ages = freshness.of_backends(asked, timezone.now())
    for backend, code in asked:
        own = [one for one in ages if one.backend == backend.name]
        name = _("Backend %s") % backend.name
        fresh = sum(one.state is SourceState.FRESH for one in own)
        value = _("%(fresh)d of %(all)d sources are fresh") % {"fresh": fresh, "all": len(own)}
        failures = [one for one in own if one.error]
        if failures:
            tone = "bad" if any(one.state is SourceState.FAILED for one in failures) else "wait"
            hint = " ".join(dict.fromkeys(aws_wording.failure(one.error) for one in failures if one.error))
            yield Check(name, tone, value, hint, min(one.failed_at for one in failures if one.failed_at))
        else:
            yield Check(name, "go", value)
        if isinstance(code, AwsBackend) and (why := _url_problem(backend)):
            yield Check(name, "bad", _("starts nothing"), aws_wording.availability({"code": "public_url", "why": why}))


def _url_problem(backend: Backend) -> str | None:
    allowed = bool(backend.config.get("allow_private_url"))
    return public_url.problem(settings.DSTACKWEB_PUBLIC_URL, allow_private=allowed)


def _apis() -> Iterable[Check]:
    """Whether AWS is asked as often as it may be, or more often than it likes."""
    now = timezone.now()
    found = pressures(now)
    if not found:
        return
    alone = [f"{one.api} ({one.region}, {one.open_until:%H:%M:%S} UTC)" for one in found if one.open_until]
    full = [f"{one.api} ({one.region})" for one in found if one.left < 0]
    if alone:
        hint = _("They are left alone until they may be asked again: %s. Offers go on with what is known.")
        yield Check(_("APIs of AWS"), "wait", _("some throttle"), hint % ", ".join(alone))
    elif full:
        hint = _("Calls wait for their turn, so that AWS does not throttle: %s.")
        yield Check(_("APIs of AWS"), "wait", _("asked as often as may be"), hint % ", ".join(full))
    else:
        yield Check(_("APIs of AWS"), "go", _("asked less often than may be"))


def _machines() -> Iterable[Check]:
    """What clouds are paid for now, and what won't end."""
    living = Instance.objects.exclude(status=InstanceStatus.GONE)
    counts = dict(living.order_by().values_list("status").annotate(Count("pk")))
    if not counts:
        return
    total = sum(counts.values())
    value = ngettext("%d of clouds", "%d of clouds", total) % total
    stuck = living.filter(status=InstanceStatus.STOPPING, status_s__gt=STUCK_S)
    if names := [f"{one.cloud_id or one.pk} ({one.region})" for one in stuck[:5]]:
        hint = _(
            "These should have ended and cost on: %s. They are ended again and again; look at the cloud's console."
        )
        yield Check(_("Machines"), "bad", value, hint % ", ".join(names))
    else:
        yield Check(_("Machines"), "go", value)


def _database() -> Iterable[Check]:
    kind = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}.get(connection.vendor, connection.vendor)
    hint = _("Good for one machine; hosts on other machines need PostgreSQL.") if connection.vendor == "sqlite" else ""
    yield Check(_("Database"), "info" if hint else "go", kind, hint)


def _broker() -> Iterable[Check]:
    kind = "Redis" if "redis" in settings.Q_CLUSTER else _("the database")
    for name in sorted(set(settings.DSTACKWEB_CLUSTERS.values())):
        numbers = {"size": get_broker(name).queue_size(), "kind": kind}
        tone = "go" if numbers["size"] < BACKLOG else "wait"
        yield Check(_("Task queue %s") % name, tone, _("%(size)d waiting in %(kind)s") % numbers)


def _offers() -> Iterable[Check]:
    """What one small read of the cache of offers shows, as this process sees it."""
    store.get("health")
    away = store.health()
    if away is None:
        yield Check(_("Cache of offers"), "go", _("answers"))
    else:
        hint = _("Each process asks the clouds for itself, and shows only what it has found out: %s") % away.error
        yield Check(_("Cache of offers"), "bad", _("does not answer"), hint, away.since)


def _disk() -> Iterable[Check]:
    usage = shutil.disk_usage(settings.DSTACKWEB_HOME)
    full = usage.used / usage.total
    value = _("%(free)s free of %(total)s") % {
        "free": units.mebibytes(usage.free >> 20),
        "total": units.mebibytes(usage.total >> 20),
    }
    yield Check(_("Disk of the server"), "go" if full < FULL_AT else "bad", value)
