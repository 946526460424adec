"""Backends, for deployment admins; their quotas and cache statistics, for all users."""

from __future__ import annotations

import datetime as dt

from django.http import HttpRequest
from django.utils import timezone
from ninja import P, Path, PathEx, QueryEx, Router, Status

from dstackweb.api.app import caller
from dstackweb.api.offer_schemas import (
    BackendOut,
    BackendsOut,
    CacheOut,
    FiguresOut,
    HourOut,
    PutBackendIn,
    QuotasOut,
    RegionQuotasOut,
)
from dstackweb.api.schemas import ErrorOut
from dstackweb.backends import services
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import Forbidden
from dstackweb.offers import figures, listing
from dstackweb.offers.figures import Figures

router = Router(tags=["backends"])
REFUSALS = {401: ErrorOut, 403: ErrorOut, 404: ErrorOut, 422: ErrorOut}
NewName = PathEx[str, P(pattern=r"^[A-Za-z0-9_-]+$", max_length=60)]


@router.get("", response={200: BackendsOut, **REFUSALS}, summary="All backends")
def backends(request: HttpRequest) -> BackendsOut:
    """For deployment admins. No secret is ever shown."""
    _admin(request)
    return BackendsOut(items=[BackendOut.of(found) for found in Backend.objects.order_by("name")])


@router.get("/{name}", response={200: BackendOut, **REFUSALS}, summary="One backend")
def detail(request: HttpRequest, name: Path[str]) -> BackendOut:
    """For deployment admins. No secret is ever shown."""
    _admin(request)
    return BackendOut.of(services.find(name))


@router.put(
    "/{name}",
    response={200: BackendOut, 201: BackendOut, **REFUSALS, 409: ErrorOut},
    summary="Create or change a backend",
)
def put(request: HttpRequest, name: NewName, body: PutBackendIn) -> Status[BackendOut]:
    """For deployment admins. Replaces all settings; a secret that is left out stays if its access key is the same.

    Offers are fetched within seconds. Repeating the request changes nothing.
    """
    _admin(request)
    found, is_new = services.put(name, body.type, body.config, enabled=body.enabled)
    return Status(201 if is_new else 200, BackendOut.of(found))


@router.delete("/{name}", response={204: None, **REFUSALS, 409: ErrorOut}, summary="Delete a backend")
def delete(request: HttpRequest, name: Path[str]) -> Status[None]:
    """For deployment admins. Its offers disappear immediately. Its jobs continue; its instances end with them."""
    _admin(request)
    services.delete(name)
    return Status(204, None)


@router.get("/{name}/quotas", response={200: QuotasOut, **REFUSALS}, summary="An account's quotas by region")
def quotas(request: HttpRequest, name: Path[str]) -> QuotasOut:
    """Used and total, in vCPUs; `source` says how old they are. Empty for a backend without quotas."""
    found = listing.quotas(services.find(name), timezone.now())
    return QuotasOut(items=[RegionQuotasOut.of(region) for region in found])


@router.get("/{name}/cache", response={200: CacheOut, **REFUSALS}, summary="Statistics of the offer cache")
def cache(request: HttpRequest, name: Path[str], hours: QueryEx[int, P(ge=1, le=2160)] = 24) -> CacheOut:
    """Cache hits, calls made and calls saved, by hour."""
    this_hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    found = figures.by_hour(services.find(name), this_hour - dt.timedelta(hours=hours - 1))
    return CacheOut(
        total=FiguresOut.from_orm(sum((one for _, one in found), Figures())),
        items=[HourOut(hour=hour, **FiguresOut.from_orm(one).dict()) for hour, one in found],
    )


def _admin(request: HttpRequest) -> None:
    if not caller(request).is_superuser:
        raise Forbidden("only deployment admins can manage backends")
