"""The offers of all backends, with the age of their sources; and the refresh by hand."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from dstackweb.backends import registry
from dstackweb.backends.contract import Offer, PlaceCode, SourceFailed, SourceKey, SourceReading, SourceState
from dstackweb.backends.hosts.fit import could_ever_fit, host_offers
from dstackweb.backends.hosts.inventory import host_views
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import TooMany
from dstackweb.lib.models import Bucket, Busy
from dstackweb.offers import catalog, freshness, sources
from dstackweb.offers.filters import Filter
from dstackweb.offers.freshness import Freshness

log = logging.getLogger(__name__)

WHOLE = "offers"
"""The source of a backend without sources, or with invalid settings."""
QUOTAS = "quotas"
REFRESH_EVERY_S = 10.0
"""The least time between two refreshes by hand of a backend."""


@dataclass(frozen=True)
class OfferListing:
    """Unsorted offers, and the sources of the backends that were read."""

    offers: list[Offer]
    sources: list[Freshness]


@dataclass(frozen=True)
class RegionQuotas:
    """An account's vCPU quotas in a region by the cloud's code: (limit, used). If empty, `age` says why."""

    region: str
    age: Freshness
    quotas: dict[str, tuple[int, int]]


def find_offers(wanted: Filter, now: dt.datetime) -> OfferListing:
    """The offers of the enabled backends, without a network; a backend without known data is failed in `sources`."""
    found: list[Offer] = []
    ages: list[Freshness] = []
    for backend in Backend.objects.filter(enabled=True):
        if not wanted.takes_backend(backend.name):
            continue
        offers, error = _read(backend, wanted)
        found += (offer for offer in offers if wanted.takes(offer))
        driver = sources.driver_of(backend)
        known = freshness.of_backends([(backend, driver)], now) if driver else []
        ages += (age for age in known if not age.region or wanted.takes_region(age.region))
        if error is not None and not known:
            failed = SourceState.FAILED
            ages.append(Freshness(backend.name, backend.kind, WHOLE, "", failed, None, None, None, error, None))
    return OfferListing(found, ages)


def quotas(backend: Backend, now: dt.datetime) -> list[RegionQuotas]:
    """The known quotas by region; empty if the backend has no quotas."""
    driver = sources.driver_of(backend)
    if driver is None or QUOTAS not in driver.sources:
        return []
    readings: dict[SourceKey, SourceReading] = sources.read_all(
        backend, driver, [key for key in driver.wanted() if key.source == QUOTAS]
    )
    ages = {age.region: age for age in freshness.of_backends([(backend, driver)], now) if age.source == QUOTAS}
    return [
        RegionQuotas(
            key.region,
            ages[key.region],
            {code: (quota.limit, quota.used) for code, quota in sorted((reading.value or {}).items())},
        )
        for key, reading in sorted(readings.items())
    ]


def refresh(backends: Iterable[Backend], now: dt.datetime) -> list[Backend]:
    """Refresh the sources of these backends in the background, except those refreshed just now; returns the others.

    Raises TooMany if all were refreshed just now.
    """
    refreshed: list[Backend] = []
    waits: list[float] = []
    for backend in backends:
        try:
            Bucket.reserve(f"refresh:{backend.pk}", 1 / REFRESH_EVERY_S, 1, 0.0, round(now.timestamp() * 1e6))
        except Busy as busy:
            waits.append(busy.wait_s)
        else:
            sources.refresh_now(backend)
            refreshed.append(backend)
    if waits and not refreshed:
        raise TooMany(_("they were refreshed just now"), retry_after=min(waits))
    return refreshed


def _read(backend: Backend, wanted: Filter) -> tuple[Sequence[Offer], dict[str, Any] | None]:
    needs = wanted.requirements
    if registry.is_hosts(backend):
        hosts = [host for host in host_views(backend) if could_ever_fit(host, needs)]
        return host_offers(hosts, needs, backend=backend.name), None
    try:
        return catalog.CachedDriver(backend).offers(needs), None
    except registry.UnknownKind:
        return (), {"code": PlaceCode.NOT_SERVED, "kind": backend.kind}
    except SourceFailed as failed:
        return (), {"code": failed.code, **failed.data}
    except Exception as error:
        log.warning("backend %s can't list its offers: %s: %s", backend.name, type(error).__name__, error)
        return (), {"code": PlaceCode.FAILED, "text": str(error)}
