"""Offers of hosts and clouds for a project's runs, and their refresh.

Backends, for deployment admins; their quotas and cache statistics, for members of any project.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Annotated, Any

from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext as _
from ninja import Field, P, Path, PathEx, QueryEx, Router, Schema, Status
from pydantic import BeforeValidator

from dstackweb.api.app import REFUSALS, Body, Listing, admin, member_somewhere, project_of, refusals
from dstackweb.api.plan_schemas import OfferOut
from dstackweb.backends import registry, services
from dstackweb.backends.contract import Hidden
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import Invalid
from dstackweb.offers import counts, listing, sources
from dstackweb.offers.listing import RegionQuotas
from dstackweb.offers.source_rows import Freshness
from dstackweb.scheduler.cloud.backend_offers import idle_offers
from dstackweb.scheduler.placement.offers import matching_idle
from dstackweb.wording import offers as offer_words

router = Router(tags=["offers"])
backend_router = Router(tags=["backends"])
QUERY = ("query",)
Several = QueryEx[list[str] | None, P(description="Repeat or separate by commas")]
NewName = PathEx[str, P(pattern=r"^[A-Za-z0-9_-]+$", max_length=60)]


class SourceOut(Schema):
    """One kind of a backend's data in one region. `region` is empty for data that is the same in all regions.

    `state` is `fresh`, `stale` (the last good value) or `failed` (nothing is known). `error` is the latest failure
    since the last success: its `code`, its data, and a `message` for people. It is fresh until `expires_at`. While it
    is in use, it is read again at `due_at`; null: soon. `asked_at` is when the call began that has not ended yet.
    `requested`: a refresh by hand is not done yet.

    `tells`: what offers of the region have from it, `shape` (which there are), `price` or `availability`. `spot` is
    true or false where only offers with that pricing do.
    """

    backend: str
    region: str
    source: str
    fetched_at: dt.datetime | None
    state: str
    error: dict[str, Any] | None
    expires_at: dt.datetime | None
    due_at: dt.datetime | None
    asked_at: dt.datetime | None
    requested: bool
    tells: str
    spot: bool | None

    @staticmethod
    def resolve_spot(age: Freshness) -> bool | None:
        return {Hidden.SPOT: True, Hidden.ON_DEMAND: False}.get(age.hides)

    @staticmethod
    def resolve_error(age: Freshness) -> dict[str, Any] | None:
        return {**age.error, "message": offer_words.failure(age.kind, age.error)} if age.error else None


class OffersOut(Schema):
    """Prices are USD per hour. An offer's `detail` has a `code`, its numbers, and a `message` for people.

    `total` counts the offers of all pages.
    """

    items: list[OfferOut]
    next: str | None
    total: int
    sources: list[SourceOut]


class RefreshIn(Body):
    """The backends to refresh; all by default."""

    backends: list[str] | None = Field(None, min_length=1, max_length=100)


class RefreshOut(Schema):
    """`items` are the backends that are refreshed."""

    items: list[str]


class BackendOut(Schema):
    """A backend. `config` never has a secret; `has_secret` says whether one is stored."""

    name: str
    type: str = Field(validation_alias="kind")
    enabled: bool
    config: dict[str, Any]
    has_secret: Annotated[bool, BeforeValidator(bool)] = Field(validation_alias="secret")
    version: int


class BackendsOut(Listing[BackendOut]): ...


class PutBackendIn(Body):
    """All settings of a backend. A secret that is left out stays, if its access key or address is the same."""

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
    used: int | None


class RegionQuotasOut(Schema):
    """`items` are empty if nothing is known; `source` (of the limits) says why.

    `use` is the source of what others use in the account; if that is not known, `used` is null. Instances of runs count
    in `used` at once.
    """

    region: str
    source: SourceOut = Field(validation_alias="age")
    use: SourceOut = Field(validation_alias="use_age")
    items: list[QuotaOut]

    @staticmethod
    def resolve_items(found: RegionQuotas) -> list[dict[str, Any]]:
        name = registry.KINDS[found.age.kind].quota_name
        return [
            {"code": code, "name": name(code), "limit": limit, "used": used}
            for code, (limit, used) in found.quotas.items()
        ]


class QuotasOut(Listing[RegionQuotasOut]): ...


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


@router.get("", response={200: OffersOut, **REFUSALS}, summary="Offers, the cheapest first")
def offers(
    request: HttpRequest,
    project: Path[str],
    gpu: QueryEx[str, P(description="As in a run file: `A100:1..`, `A100,H100:40GB..:2`, `24GB..`")] = "",
    cpu: QueryEx[str, P(description="As in a run file: `4..`")] = "",
    memory: QueryEx[str, P(description="As in a run file: `16GB..`")] = "",
    region: Several = None,
    spot: QueryEx[str, P(description="`true`, `false`; without it, or `auto`, both")] = "",
    max_price: QueryEx[str, P(description="USD per hour")] = "",
    backend: Several = None,
    sort: QueryEx[str, P(description=f"{', '.join(listing.SORTS)}; `-price` for the largest first")] = "price",
    limit: QueryEx[int, P(ge=1, le=2000)] = 500,
    cursor: str = "",
) -> dict[str, Any]:
    """Offers for one node of a run with these `resources`, including unavailable ones.

    Answers from cached data, and never waits for a cloud; `sources` says how old the data is. Hosts are free. A cloud
    instance that is kept for the project's next run is `idle`, with its `instance` in `detail`.
    """
    owner, _role = project_of(request, project)
    order = listing.read_order(sort, within=QUERY)
    wanted = listing.read_filter(
        gpu=gpu, cpu=cpu, memory=memory, regions=region or (), backends=backend or (), spot=spot, max_price=max_price,
        within=QUERY,
    )  # fmt: skip
    now = timezone.now()
    found = listing.find_offers(wanted, now)
    kept = matching_idle(idle_offers(now)(owner.pk), wanted.requirements)
    all_offers = [*found.offers, *filter(wanted.takes, kept)]
    items, following = listing.page(all_offers, order, limit, cursor, within=QUERY)
    return {
        "items": [
            replace(offer, detail={**offer.detail, "message": offer_words.why(offer, wanted.requirements)})
            for offer in items
        ],
        "next": following,
        "total": len(all_offers),
        "sources": found.sources,
    }


@router.post("/refresh", response={200: RefreshOut, **REFUSALS}, summary="Refresh offers")
def refresh(request: HttpRequest, project: Path[str], body: RefreshIn | None = None) -> dict[str, Any]:
    """Refresh all sources in the background. Until then the known offers are used.

    One that is being read is read again after that.
    """
    project_of(request, project, "member")
    clouds = {
        found.name: found for found in Backend.objects.filter(enabled=True).exclude(kind__in=registry.host_kinds())
    }
    named = body.backends if body is not None and body.backends is not None else list(clouds)
    for place, name in enumerate(named):
        if name not in clouds:
            raise Invalid.at(
                "backends", place, msg=_("there is no enabled cloud backend %(name)s") % {"name": repr(name[:80])}
            )
    names = list(dict.fromkeys(named))
    for name in names:
        sources.refresh_now(clouds[name])
    return {"items": names}


@backend_router.get("", response={200: BackendsOut, **REFUSALS}, summary="All backends")
def backends(request: HttpRequest) -> dict[str, Any]:
    """For deployment admins. No secret is ever shown."""
    admin(request, _("backends"))
    return {"items": Backend.objects.order_by("name")}


@backend_router.get("/{name}", response={200: BackendOut, **REFUSALS}, summary="One backend")
def detail(request: HttpRequest, name: Path[str]) -> Backend:
    """For deployment admins. No secret is ever shown."""
    admin(request, _("backends"))
    return services.find(name)


@backend_router.put(
    "/{name}",
    response={200: BackendOut, 201: BackendOut, **REFUSALS, **refusals(409)},
    summary="Create or change a backend",
)
def put(request: HttpRequest, name: NewName, body: PutBackendIn) -> Status[Backend]:
    """For deployment admins. Replaces all settings; a secret that is left out stays if its access key or address is the
    same, and `null` removes it.

    Offers are fetched within seconds. Repeating the request changes nothing.
    """
    admin(request, _("backends"))
    found, is_new = services.put(name, body.type, body.config, enabled=body.enabled)
    return Status(201 if is_new else 200, found)


@backend_router.delete("/{name}", response={204: None, **REFUSALS, **refusals(409)}, summary="Delete a backend")
def delete(request: HttpRequest, name: Path[str]) -> Status[None]:
    """For deployment admins. Its offers disappear immediately. Its jobs continue; its instances end with them."""
    admin(request, _("backends"))
    services.delete(name)
    return Status(204, None)


@backend_router.get("/{name}/quotas", response={200: QuotasOut, **REFUSALS}, summary="An account's quotas by region")
def quotas(request: HttpRequest, name: Path[str]) -> dict[str, Any]:
    """For members of any project. Used and total, in vCPUs; `source` says how old they are.

    Empty for a backend without quotas.
    """
    member_somewhere(request)
    return {"items": listing.quotas(services.find(name), timezone.now())}


@backend_router.get("/{name}/cache", response={200: CacheOut, **REFUSALS}, summary="Statistics of the offer cache")
def cache(request: HttpRequest, name: Path[str], hours: QueryEx[int, P(ge=1, le=2160)] = 24) -> dict[str, Any]:
    """For members of any project. Cache hits, calls made and calls saved, by hour."""
    member_somewhere(request)
    this_hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    found = counts.by_hour(services.find(name), this_hour - dt.timedelta(hours=hours - 1))
    return {
        "total": sum((one for _, one in found), counts.Figures()),
        "items": [{"hour": hour, **FiguresOut.from_orm(one).dict()} for hour, one in found],
    }
