"""Checks of the health page about backends, their offers and the instances of clouds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from django.db.models import F
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.backends import registry
from dstackweb.backends.contract import SourceState
from dstackweb.backends.kinds import ApiUsage, HealthLine
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.lib.errors import Invalid
from dstackweb.offers import source_rows, sources, store
from dstackweb.offers.source_rows import Freshness
from dstackweb.wording import offers as offer_words
from dstackweb.wording import statuses
from dstackweb.wording.sentence import listing

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
    for kind in registry.KINDS.values():
        if usage := kind.api_usage(now):
            yield _rate_limits(_("Rate limits of %s") % (kind.label or kind.name), usage)


def _rate_limits(name: str, usage: Sequence[ApiUsage]) -> HealthLine:
    throttled = [f"{one.api} ({one.region}, {one.open_until:%H:%M:%S} UTC)" for one in usage if one.open_until]
    if throttled:
        hint = _("Not called until then: %s. Offers use the last known values.")
        return HealthLine(name, "wait", _("throttled"), hint % listing(throttled))
    if full := [f"{one.api} ({one.region})" for one in usage if one.left < 0]:
        return HealthLine(name, "wait", _("at the limit"), _("Calls wait: %s.") % listing(full))
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
