"""The quotas page: limit and use by region and instance family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.http import HttpResponse
from django.utils import timezone

from dstackweb.accounts.access import allows
from dstackweb.backends import registry
from dstackweb.offers import freshness, listing, sources
from dstackweb.offers.listing import RegionQuotas
from dstackweb.runs import selectors
from dstackweb.web.cloud.offer_rows import SourceLine
from dstackweb.web.common.pages import PageRequest, fingerprint, polled, project_page

POLL_S = 3
NEAR = 0.8
"""A quota is marked as nearly used up from this share on."""


@dataclass(frozen=True)
class QuotaUsage:
    """One quota, in vCPUs."""

    code: str
    limit: int
    used: int

    @property
    def drawn(self) -> int:
        """Filled length of the bar: use may exceed a quota that was lowered."""
        return min(self.used, self.limit)

    @property
    def tone(self) -> str:
        """`full`, `near` or nothing."""
        if self.used >= self.limit:
            return "full"
        return "near" if self.used >= NEAR * self.limit else ""

    @property
    def left(self) -> int:
        """vCPUs that are free."""
        return max(0, self.limit - self.used)


@dataclass(frozen=True)
class FamilyLine:
    """One family of instance types; None where the region's answer has no such quota."""

    name: str
    on_demand: QuotaUsage | None
    spot: QuotaUsage | None


@dataclass(frozen=True)
class RegionCard:
    """One region of a backend. `none` names the families without any quota, which most accounts begin with."""

    backend: str
    region: str
    source: SourceLine
    families: list[FamilyLine]
    none: list[str]

    @classmethod
    def of(cls, backend: str, found: RegionQuotas, source: SourceLine) -> RegionCard:
        """The card; `families` is empty where nothing is known."""
        lines = [
            FamilyLine(name, _used(found.quotas, on_demand), _used(found.quotas, spot))
            for name, on_demand, spot in registry.KINDS[found.age.kind].quota_families()
        ]
        told = [line for line in lines if line.on_demand or line.spot]
        some = [line for line in told if any(one and (one.limit or one.used) for one in (line.on_demand, line.spot))]
        return cls(backend, found.region, source, some, [line.name for line in told if line not in some])


def _used(quotas: Mapping[str, tuple[int, int]], code: str) -> QuotaUsage | None:
    return QuotaUsage(code, *quotas[code]) if code in quotas else None


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
            RegionCard.of(backend.name, found, SourceLine.of_source(found.age, now))
            for backend, _driver in backends
            for found in listing.quotas(backend, now)
        ]
        lines = [SourceLine.of_source(age, now) for age in ages]
        return {
            "tab": "quotas",
            "cards": cards,
            "asking": sum(line.state == "asking" for line in lines),
            "may_refresh": bool(backends) and allows(request.role, "member"),
            "can_edit": request.user.is_staff,
            "poll_s": POLL_S,
        }

    return polled(request, "cloud/quotas.html", "cloud/quotas_body.html", version, context)
