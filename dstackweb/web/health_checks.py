"""Checks of hosts and periodic jobs, by cause, and of backends: what is down is one line, with what waits for it.

A silent host's late work is no trouble of its own, nor is each late job while no ticker runs.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from django.db.models import Count, F
from django.utils import timezone
from django.utils.translation import gettext as _, ngettext

from dstackweb.backends import api_calls, registry
from dstackweb.backends.api_calls import Api, Figures
from dstackweb.backends.contract import SourceState
from dstackweb.backends.hosts.inventory import engine_fails, is_online
from dstackweb.backends.kinds import ApiUsage, HealthLine
from dstackweb.backends.models import Backend, Gpu, Host, Instance, InstanceStatus
from dstackweb.gpus import selectors as samples
from dstackweb.gpus.models import GpuSeries, HostSampling
from dstackweb.lib.commands import server_command
from dstackweb.lib.errors import Invalid
from dstackweb.lib.times import to_ms
from dstackweb.offers import source_rows, sources, store
from dstackweb.offers.source_rows import Freshness
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE
from dstackweb.scheduler import restored
from dstackweb.scheduler.models import PeriodicJob
from dstackweb.wording import hosts as host_words, offers as offer_words, statuses, units
from dstackweb.wording.sentence import clauses, enumeration, listing

LATE_S = 15.0
"""Periodic work that is due for longer is not being enqueued: no ticker is running."""


class PeriodicWork(NamedTuple):
    """One periodic job. `host` is empty for work of the deployment."""

    name: str
    host: str = ""
    late_s: float = 0.0
    error: str = ""
    ended_at: dt.datetime | None = None

    @property
    def is_late(self) -> bool:
        return self.late_s > LATE_S


class Causes(NamedTuple):
    """Periodic jobs by what is down: each is in one place only."""

    silent: dict[str, list[PeriodicWork]]
    """All work of each silent host."""
    host_tickers: dict[str, list[PeriodicWork]]
    """Late work of hosts that are online."""
    ticker: list[PeriodicWork]
    """The deployment's work, if all of it is late."""
    late: list[PeriodicWork]
    failed: list[PeriodicWork]
    fine: list[PeriodicWork]


def by_cause(work: Iterable[PeriodicWork], online: Mapping[str, bool]) -> Causes:
    """Sort periodic work by its cause. `online`: the joined hosts. Pure."""
    found = Causes({}, {}, [], [], [], [])
    for one in work:
        if one.host and not online.get(one.host, False):
            found.silent.setdefault(one.host, []).append(one)
        elif one.is_late and one.host:
            found.host_tickers.setdefault(one.host, []).append(one)
        elif one.is_late:
            found.late.append(one)
        else:
            (found.failed if one.error else found.fine).append(one)
    own = [one for one in [*found.failed, *found.fine] if not one.host]
    if not own and len(found.late) > 1:
        found.ticker.extend(found.late)
        found.late.clear()
    return found


def host_checks() -> Iterable[HealthLine]:
    """Hosts, each with what waits for it, and those that all placement waits for after a restore."""
    if missing := restored.missing_hosts():
        hint = _(
            "Nothing is placed until they have said what was started there since the backup, for a minute at most."
        )
        yield HealthLine(_("Restore"), "wait", _("waiting for %s") % listing(missing), hint)
    hosts = list(Host.joined.all())
    yield from _hosts(hosts, by_cause(_all_work(), {host.name: is_online(host) for host in hosts}))


def gpu_checks() -> Iterable[HealthLine]:
    """GPUs that are missing, can't be read or are slowed down by heat, by host; those of silent hosts are unknown."""
    gpus = list(Gpu.objects.filter(host__left_at=None).select_related("host").order_by("host__name", "index"))
    errors = dict(HostSampling.objects.exclude(error="").values_list("host", "error"))
    newest, now_ms = samples.newest(gpus), to_ms(timezone.now())
    fine = 0
    for host, of_host in groupby(gpus, key=lambda gpu: gpu.host):
        if not is_online(host):
            continue
        there = list(of_host)
        missing = [gpu for gpu in there if not gpu.present]
        hot = [gpu for gpu in there if gpu.present and _is_hot(newest.get(gpu.uuid), now_ms)]
        fine += len(there) - len(missing) - len(hot)
        yield from _gpu_faults(host, missing, hot, errors.get(host.pk, ""))
    if fine:
        yield HealthLine(_("GPUs"), "go", ngettext("%d in order", "%d in order", fine) % fine)


def _is_hot(series: GpuSeries | None, now_ms: int) -> bool:
    """Whether heat slows it down now; not where no current sample says so."""
    if series is None or not samples.is_fresh(series, now_ms):
        return False
    return samples.ThrottleReason.HEAT in samples.throttle_reasons(series.throttle)


def _gpu_faults(host: Host, missing: Sequence[Gpu], hot: Sequence[Gpu], error: str) -> Iterable[HealthLine]:
    found = []
    if missing:
        found.append(_("%s missing") % listing([_("GPU %d") % gpu.index for gpu in missing]))
    if hot:
        found.append(_("%s slowed down by heat") % listing([_("GPU %d") % gpu.index for gpu in hot]))
    if error and not missing:
        found.append(_("some cannot be read"))
    if found:
        hint = error or (_("Runs no longer get a missing GPU.") if missing else "")
        yield HealthLine(_("GPUs of %s") % host.name, "wait", clauses(found), hint, host=host.name)


def periodic_checks() -> Iterable[HealthLine]:
    """Periodic jobs, but for those whose host is at fault."""
    work = _all_work()
    yield from _periodic(by_cause(work, {host.name: is_online(host) for host in Host.joined.all()}))
    if not work:
        yield HealthLine(_("Ticker"), "bad", _("never started"))


def _all_work() -> list[PeriodicWork]:
    now = timezone.now()
    return [_work(job, now) for job in PeriodicJob.objects.all()]


def _work(job: PeriodicJob, now: dt.datetime) -> PeriodicWork:
    late_s = max(0.0, (now - job.due_at).total_seconds())
    return PeriodicWork(job.name, job.name.partition(":")[2], late_s, job.last_error, job.last_ended_at)


def _hosts(hosts: Sequence[Host], causes: Causes) -> Iterable[HealthLine]:
    active = Job.objects.filter(status__in=JOB_ACTIVE, host__isnull=False).order_by()
    jobs = dict(active.values_list("host").annotate(Count("pk")))
    for host in hosts:
        for check in _host(host, jobs.get(host.pk, 0), causes):
            yield check._replace(host=host.name)
    online = sum(is_online(host) for host in hosts)
    value = _("%(online)d of %(all)d online") % {"online": online, "all": len(hosts)}
    if not hosts:
        yield HealthLine(_("Hosts"), "bad", value, _("Register a host so that runs can start."))
    else:
        yield HealthLine(_("Hosts"), "go" if online == len(hosts) else "info", value)


def _host(host: Host, jobs: int, causes: Causes) -> Iterable[HealthLine]:
    name = _("Host %s") % host.name
    if not is_online(host):
        waiting = _waiting(len(causes.silent.get(host.name, ())), jobs)
        if jobs:
            advice = _("If the machine is gone for good, say so on its page.")
        else:
            advice = _("No jobs are lost. If the machine is gone for good, remove the host.")
        # A drained host may have been switched off on purpose.
        tone = "wait" if host.draining and not jobs else "bad"
        yield HealthLine(name, tone, _("silent"), f"{waiting} {advice}".strip(), host.seen_at)
        return
    if host.held_back_at is not None:
        hint = _(
            "Starts fail: %s. Runs that could not start went back to the queue, running jobs continue. It takes jobs "
            "again once a start works."
        )
        text = hint % host_words.start_error(host.start_error).rstrip(".。")
        yield HealthLine(name, "bad", _("held back"), text, host.held_back_at)
    if engine_fails(host):
        hint = _("%(engine)s (%(error)s). Runs with an image wait or go to other hosts until a try works.")
        text = hint % {"engine": host_words.engine(host.engine), "error": host.engine.get("error", "").rstrip(".。")}
        yield HealthLine(name, "bad", _("containers held back"), text, host.seen_at)
    if late := causes.host_tickers.get(host.name):
        yield HealthLine(name, "bad", _("its ticker is not running"), _all_late(late))
    if host.error:
        yield HealthLine(name, "bad", host.error, at=host.seen_at)


def _waiting(periodic: int, jobs: int) -> str:
    """`Its 3 periodic jobs and 2 jobs of runs wait for it.`"""
    parts = [ngettext("%d periodic job", "%d periodic jobs", periodic) % periodic] if periodic else []
    parts += [ngettext("%d job of a run", "%d jobs of runs", jobs) % jobs] if jobs else []
    if not parts:
        return ""
    return ngettext("Its %s waits for it.", "Its %s wait for it.", periodic + jobs) % enumeration(parts)


def _all_late(late: Sequence[PeriodicWork]) -> str:
    longest = units.duration(max(one.late_s for one in late))
    text = ngettext("%(n)d periodic job waits for it", "%(n)d periodic jobs wait for it", len(late))
    return (text + _(", late by up to %(time)s.")) % {"n": len(late), "time": longest}


def _periodic(causes: Causes) -> Iterable[HealthLine]:
    if causes.ticker:
        start = _("Start it with %s, or read its output.") % server_command("up")
        yield HealthLine(_("Ticker"), "bad", _("not running"), f"{_all_late(causes.ticker)} {start}")
    for one in causes.failed:
        yield HealthLine(_("Periodic: %s") % one.name, "bad", _("failed"), one.error, one.ended_at)
    for one in causes.late:
        value = _("late by %s") % units.duration(one.late_s)
        yield HealthLine(_("Periodic: %s") % one.name, "bad", value, one.error, one.ended_at)
    if count := len(causes.fine):
        text = ngettext("%d on time", "%d on time", count) % count
        last = max((one.ended_at for one in causes.fine if one.ended_at), default=None)
        yield HealthLine(_("Periodic jobs"), "go", text, at=last)


STUCK_S = 900.0
"""An instance takes a minute or two to terminate."""


def backend_checks() -> Iterable[HealthLine]:
    """Each backend with sources: how fresh they are. Then what each kind checks by itself."""
    now = timezone.now()
    pairs = sources.sourced_backends()
    ages = source_rows.of_backends(pairs, now)
    for backend, _driver in pairs:
        yield _sources_of(backend, [one for one in ages if one.backend == backend.name])
    usable = []
    for backend in Backend.objects.filter(enabled=True):
        if hint := _why_unusable(backend):
            yield HealthLine(_("Backend %s") % backend.name, "bad", _("unusable"), hint)
        else:
            usable.append(backend)
    for name, kind in registry.KINDS.items():
        yield from kind.health([backend for backend in usable if backend.kind == name], now)


def _why_unusable(backend: Backend) -> str:
    """Empty if it can be used."""
    try:
        registry.kind_of(backend).settle(backend.config, backend.secret)
    except registry.UnknownKind:
        return offer_words.failure(backend.kind, {"code": "not_served"})
    except Invalid as error:
        return _("Its settings are invalid: %s. Change them on the admin site.") % str(error).rstrip(".")
    return ""


def _sources_of(backend: Backend, ages: Sequence[Freshness]) -> HealthLine:
    name = _("Backend %s") % backend.name
    fresh = sum(one.state is SourceState.FRESH for one in ages)
    value = _("%(fresh)d of %(all)d sources fresh") % {"fresh": fresh, "all": len(ages)}
    failures = [one for one in ages if one.error]
    if not failures:
        return HealthLine(name, "go", value)
    tone = "bad" if any(one.state is SourceState.FAILED for one in failures) else "wait"
    hint = " ".join(dict.fromkeys(offer_words.failure(one.kind, one.error) for one in failures if one.error))
    return HealthLine(name, tone, value, hint, min(one.failed_at for one in failures if one.failed_at))


def api_checks() -> Iterable[HealthLine]:
    """Cloud APIs near their rate limit, and those that throttled."""
    now = timezone.now()
    lately = api_calls.lately(now)
    for kind in registry.KINDS.values():
        usage = kind.api_usage(now)
        counted = {api: figures for api, figures in lately.items() if api.kind == kind.name}
        if usage or any(figures.throttles for figures in counted.values()):
            yield _rate_limits(_("Rate limits of %s") % (kind.label or kind.name), usage, counted)


def _rate_limits(name: str, usage: Sequence[ApiUsage], lately: Mapping[Api, Figures]) -> HealthLine:
    throttled = [f"{use.api} ({use.region}, {use.open_until:%H:%M:%S} UTC)" for use in usage if use.open_until]
    if throttled:
        hint = _("Not called until then: %s. Offers use the last known values.")
        return HealthLine(name, "wait", _("throttled"), hint % listing(throttled))
    if full := [f"{use.api} ({use.region})" for use in usage if use.left < 0]:
        return HealthLine(name, "wait", _("at the limit"), _("Calls wait: %s.") % listing(full))
    if lines := [f"{api.api} ({api.region}): {calls.throttles}" for api, calls in lately.items() if calls.throttles]:
        hint = _("Throttled in the last 10 minutes: %s. Calls are repeated later.")
        return HealthLine(name, "wait", _("throttled lately"), hint % listing(lines))
    if lines := [f"{use.api} ({use.region}): {use.left:.0f}/{use.burst:g}" for use in usage if use.is_tight]:
        hint = _("Few calls are left before others wait: %s.")
        return HealthLine(name, "wait", _("near the limit"), hint % listing(lines))
    if lines := [f"{api.api} ({api.region})" for api, calls in lately.items() if calls.tight]:
        hint = _("In the last 10 minutes at most a fifth of the calls was left of: %s.")
        return HealthLine(name, "info", _("near the limit lately"), hint % listing(lines))
    return HealthLine(name, "go", _("below the limit"))


def instance_checks() -> Iterable[HealthLine]:
    """Cloud instances by status, and those that do not terminate."""
    living = Instance.objects.exclude(status=InstanceStatus.GONE)
    rows = living.order_by("status", F("holder").desc(nulls_last=True)).values_list("status", "holder")
    idle = (InstanceStatus.RUNNING, None)
    numbers = Counter("idle" if row == idle else row[0] for row in rows)
    if not numbers:
        return
    value = listing(f"{number} {statuses.instance_status(status)}" for status, number in numbers.items())
    stuck = living.filter(status=InstanceStatus.STOPPING, status_s__gt=STUCK_S)
    if names := [f"{one.cloud_id or one.pk} ({one.region})" for one in stuck[:5]]:
        hint = _("Still billed although terminated: %s. Termination is retried; check the cloud console.")
        yield HealthLine(_("Cloud instances"), "bad", value, hint % listing(names))
    else:
        yield HealthLine(_("Cloud instances"), "go", value)


def offer_checks() -> Iterable[HealthLine]:
    """One small read of the offers cache, as this process sees it."""
    store.get("health", str)
    away = store.health()
    if away is None:
        yield HealthLine(_("Offers cache"), "go", _("available"))
    else:
        hint = _("Each process reads the clouds by itself, so calls are not shared: %s") % away.error
        yield HealthLine(_("Offers cache"), "bad", _("unavailable"), hint, away.since)
