"""Schemas of offers and backends."""

from __future__ import annotations

import datetime as dt
from typing import Any

from ninja import Field, Schema

from dstackweb.api.schemas import OfferOut
from dstackweb.backends import registry
from dstackweb.backends.contract import Offer
from dstackweb.backends.models import Backend
from dstackweb.offers.freshness import Freshness
from dstackweb.offers.listing import RegionQuotas
from dstackweb.spec.effective import Requirements
from dstackweb.wording import offers as offer_words


class SourceOut(Schema):
    """What a cloud says of one thing in one region. `region` is empty where that is the same everywhere.

    `state` is `fresh`, `stale` (the last good value) or `failed` (nothing is known). `error` is the latest failure
    since the last success: its `code`, its data, and a `message` for people. It is fresh until `expires_at`; while
    somebody looks at it, it is asked for again at `due_at`, or soon where that is null.
    """

    backend: str
    region: str
    source: str
    fetched_at: dt.datetime | None
    state: str
    error: dict[str, Any] | None
    expires_at: dt.datetime | None
    due_at: dt.datetime | None

    @classmethod
    def of(cls, age: Freshness) -> SourceOut:
        error = {**age.error, "message": offer_words.failure(age.kind, age.error)} if age.error else None
        fields = {name: getattr(age, name) for name in cls.model_fields if name not in ("state", "error")}
        return cls(**fields, state=age.state.value, error=error)


class OffersOut(Schema):
    """Prices are USD per hour. An offer's `detail` has a `code`, its numbers, and a `message` for people.

    `total` counts the offers of all pages.
    """

    items: list[OfferOut]
    next: str | None
    total: int
    sources: list[SourceOut]


def offer_out(offer: Offer, needs: Requirements) -> OfferOut:
    """An offer with its reason as text."""
    out = OfferOut.of(offer)
    out.detail = {**offer.detail, "message": offer_words.why(offer, needs)}
    return out


class RefreshIn(Schema):
    """The backends to refresh; all by default."""

    model_config = {"extra": "forbid"}

    backends: list[str] | None = Field(None, min_length=1, max_length=100)


class RefreshOut(Schema):
    """`items` are the backends that are refreshed, without those that were refreshed just before."""

    items: list[str]


class BackendOut(Schema):
    """A backend. `config` never has a secret; `has_secret` says whether one is stored."""

    name: str
    type: str
    enabled: bool
    config: dict[str, Any]
    has_secret: bool
    version: int

    @classmethod
    def of(cls, backend: Backend) -> BackendOut:
        return cls(
            name=backend.name,
            type=backend.kind,
            enabled=backend.enabled,
            config=backend.config,
            has_secret=bool(backend.secret),
            version=backend.version,
        )


class BackendsOut(Schema):
    items: list[BackendOut]
    next: str | None = None


class PutBackendIn(Schema):
    """All settings of a backend. A missing secret stays if the access key is the same."""

    model_config = {"extra": "forbid"}

    type: str = Field(examples=["aws"])
    config: dict[str, Any] = Field(
        default_factory=dict, examples=[{"regions": ["eu-west-1"], "credentials": "default"}]
    )
    enabled: bool = Field(True, strict=True)


class QuotaOut(Schema):
    """A quota of the account and its use, in vCPUs."""

    code: str
    name: str
    limit: int
    used: int


class RegionQuotasOut(Schema):
    """`items` are empty if nothing is known; `source` says why."""

    region: str
    source: SourceOut
    items: list[QuotaOut]

    @classmethod
    def of(cls, found: RegionQuotas) -> RegionQuotasOut:
        kind = registry.KINDS[found.age.kind]
        return cls(
            region=found.region,
            source=SourceOut.of(found.age),
            items=[
                QuotaOut(code=code, name=kind.quota_name(code), limit=limit, used=used)
                for code, (limit, used) in found.quotas.items()
            ],
        )


class QuotasOut(Schema):
    items: list[RegionQuotasOut]
    next: str | None = None


class FiguresOut(Schema):
    """Statistics of a backend's offer cache, of an hour or in total (docs/offers.md)."""

    hits: int
    misses: int
    coalesced: int
    calls: int
    failures: int
    throttles: int
    stale_served: int
    uncached: int
    saved: int


class HourOut(FiguresOut):
    hour: dt.datetime


class CacheOut(Schema):
    """By hour, the newest first, without hours of zeros."""

    total: FiguresOut
    items: list[HourOut]
    next: str | None = None
