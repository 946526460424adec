"""The quotas page: limit and use by region and instance family."""

from __future__ import annotations

import datetime as dt
from typing import Any, NamedTuple

from django.http import HttpResponse
from django.utils import timezone

from dstackweb.backends import registry
from dstackweb.offers import freshness, listing, sources
from dstackweb.offers.listing import RegionQuotas
from dstackweb.runs import selectors
from dstackweb.web.cloud.offer_rows import SourceLine
from dstackweb.web.common.pages import PageRequest, fingerprint, polled, project_page

POLL_S = 3
NEAR = 0.8
"""A quota is marked as nearly used up from this share on."""


class QuotaUsage(NamedTuple):
    """One quota, in vCPUs."""

    limit: int
    used: int

    @property
    def tone(self) -> str:
        """`full`, `near` or nothing."""
        if self.used >= self.limit:
            return "full"
        return "near" if self.used >= NEAR * self.limit else ""

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


class RegionCard(NamedTuple):
    """One region of a backend: families of instance types with their on-demand and spot quotas, where it has them.

    `none` names the families without any quota, which most accounts begin with.
    """

    backend: str
    region: str
    source: SourceLine
    families: list[tuple[str, QuotaUsage | None, QuotaUsage | None]]
    none: list[str]


def _card(backend: str, found: RegionQuotas, now: dt.datetime) -> RegionCard:
    def quota(code: str) -> QuotaUsage | None:
        return QuotaUsage(*found.quotas[code]) if code in found.quotas else None

    lines = [(name, quota(a), quota(b)) for name, a, b in registry.KINDS[found.age.kind].quota_families()]
    some = [line for line in lines if any(one and any(one) for one in line[1:])]
    none = [line[0] for line in lines if line not in some and any(line[1:])]
    return RegionCard(backend, found.region, SourceLine.of_source(found.age, now), some, none)


@project_page()
def quotas_page(request: PageRequest) -> HttpResponse:
    """Of all clouds; also what polls of the page get."""
    now = timezone.now()
    backends = sources.sourced_backends()
    ages = freshness.of_backends(backends, now)
    shown = ([(one.pk, one.version, one.refresh_generation) for one, _driver in backends], ages)
    version = fingerprint(shown, selectors.counts(request.project))

    def context() -> dict[str, Any]:
        cards = [
            _card(backend.name, found, now) for backend, _driver in backends for found in listing.quotas(backend, now)
        ]
        lines = [SourceLine.of_source(age, now) for age in ages]
        return {
            "tab": "quotas",
            "cards": cards,
            "asking": sum(line.state == "asking" for line in lines),
            "has_sources": bool(backends),
            "poll_s": POLL_S,
        }

    return polled(request, "cloud/quotas.html", "cloud/quotas_body.html", version, context)
