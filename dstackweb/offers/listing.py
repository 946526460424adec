"""The offers of all backends, with filters, order and pages, and the age of their sources; and the refresh by hand."""

from __future__ import annotations

import datetime as dt
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from django.core import signing
from django.utils.translation import gettext as _
from pydantic import ValidationError

from dstackweb.backends import registry
from dstackweb.backends.contract import (
    Availability,
    LimitedByQuotas,
    Offer,
    PlaceCode,
    Quota,
    SourceFailed,
    SourceState,
)
from dstackweb.backends.hosts.fit import could_ever_fit, host_offers
from dstackweb.backends.hosts.inventory import host_views
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import FieldError, Invalid
from dstackweb.offers import catalog, source_rows, sources
from dstackweb.offers.source_rows import Freshness
from dstackweb.spec.effective import Requirements
from dstackweb.spec.fields import MOST_NAMES
from dstackweb.spec.mappings import ResourcesFields
from dstackweb.spec.source import Source
from dstackweb.spec.wording import field_errors

log = logging.getLogger(__name__)

WHOLE = "offers"
"""The source of a backend without sources, or with invalid settings."""
SPOT: Mapping[str, bool | None] = {
    "": None, "auto": None, "true": True, "1": True, "spot": True, "false": False, "0": False, "on-demand": False,
}  # fmt: skip
_PRICE = re.compile(r"\d{1,8}(\.\d{1,6})?", re.ASCII)
SALT = "dstackweb.offers.page"

BEST_FIRST = (
    Availability.IDLE,
    Availability.AVAILABLE,
    Availability.UNKNOWN,
    Availability.BUSY,
    Availability.NO_QUOTA,
    Availability.NOT_AVAILABLE,
)

Value = Decimal | str | None
"""A sort key; None comes last in both directions."""

SORTS: Mapping[str, Callable[[Offer], Value]] = {
    "price": lambda offer: offer.price,
    "gpu_price": lambda offer: offer.price / offer.gpu_count if offer.gpu_count else None,
    "gpu_count": lambda offer: Decimal(offer.gpu_count),
    "gpu_memory": lambda offer: Decimal(offer.gpu_memory_mib) if offer.gpu_count else None,
    "cpus": lambda offer: Decimal(offer.cpus),
    "memory": lambda offer: Decimal(offer.memory_mib),
    "availability": lambda offer: Decimal(BEST_FIRST.index(offer.availability)),
    "gpu": lambda offer: offer.gpu_name or None,
    "region": lambda offer: offer.region or None,
    "backend": lambda offer: offer.backend,
    "instance_type": lambda offer: offer.instance_type,
}
_TEXTS = frozenset({"gpu", "region", "backend", "instance_type"})


@dataclass(frozen=True)
class Filter:
    """Wanted offers. Empty tuples and None mean all; `max_price` is in USD per hour."""

    requirements: Requirements = field(default_factory=Requirements)
    backends: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    spot: bool | None = None
    max_price: Decimal | None = None

    def takes_backend(self, name: str) -> bool:
        return not self.backends or name in self.backends

    def takes_region(self, name: str) -> bool:
        return not self.regions or name in self.regions

    def takes(self, offer: Offer) -> bool:
        return (
            self.takes_backend(offer.backend)
            and self.takes_region(offer.region)
            and (self.spot is None or offer.spot is self.spot)
            and (self.max_price is None or offer.price <= self.max_price)
        )


@dataclass(frozen=True)
class Order:
    """One of SORTS, and whether the largest comes first."""

    by: str = "price"
    descending: bool = False

    def __str__(self) -> str:
        return f"-{self.by}" if self.descending else self.by


def read_filter(
    *,
    gpu: str = "",
    cpu: str = "",
    memory: str = "",
    backends: Iterable[str] = (),
    regions: Iterable[str] = (),
    spot: str = "",
    max_price: str = "",
    within: tuple[str, ...] = (),
) -> Filter:
    """A filter from text; names may also be separated by commas. Raises Invalid with all errors.

    Each error's `loc` is `within` and the API's parameter: `region`, `backend`.
    """
    errors: list[FieldError] = []

    def wrong(name: str, msg: str) -> None:
        errors.append({"loc": [*within, name], "line": None, "msg": msg})

    given = {name: text.strip() for name, text in (("gpu", gpu), ("cpu", cpu), ("memory", memory)) if text.strip()}
    requirements = Requirements()
    try:
        requirements = Requirements.of(ResourcesFields.model_validate(given))
    except ValidationError as error:
        for one in field_errors(error, ResourcesFields, Source(given)):
            wrong(str(one["loc"][0]), one["msg"])
    spot, price = spot.strip().lower(), max_price.strip()
    if spot not in SPOT:
        wrong("spot", _("`spot` should be true, false or auto, not %s") % repr(spot[:80]))
    if price and not _PRICE.fullmatch(price):
        text = _("`max_price` should be a number of USD per hour such as 2.50, not %s")
        wrong("max_price", text % repr(price[:80]))
    named = {"backend": _names(backends), "region": _names(regions)}
    for name, several in named.items():
        if len(several) > MOST_NAMES:
            wrong(name, _("`%(name)s` has more than %(most)d names") % {"name": name, "most": MOST_NAMES})
    if errors:
        raise Invalid(errors[0]["msg"], errors)
    return Filter(
        requirements=requirements,
        backends=named["backend"],
        regions=named["region"],
        spot=SPOT[spot],
        max_price=Decimal(price) if price else None,
    )


def read_order(text: str, *, within: tuple[str, ...] = ()) -> Order:
    """An order such as `price`, or `-memory` for the largest first. Raises Invalid."""
    by = text.strip().removeprefix("-") or "price"
    if by not in SORTS:
        msg = _("`sort` should be one of %(sorts)s, with a - in front for the largest first, not %(text)s") % {
            "sorts": ", ".join(SORTS),
            "text": repr(text[:80]),
        }
        raise Invalid.at(*within, "sort", msg=msg)
    return Order(by, text.strip().startswith("-"))


def page(
    offers: Iterable[Offer], order: Order, limit: int, cursor: str = "", *, within: tuple[str, ...] = ()
) -> tuple[list[Offer], str | None]:
    """Up to `limit` offers after the cursor, and the next page's cursor. Raises Invalid for an invalid cursor.

    Equal ones are ordered by price, backend, region, instance type and spot. A cursor has the sort key of the last
    offer shown, so it stays valid when offers come and go.
    """
    keyed = sorted(((_key(_place(offer, order), order), offer) for offer in offers), key=lambda pair: pair[0])
    if cursor:
        behind = _key(_read_cursor(cursor, order, within), order)
        keyed = [pair for pair in keyed if pair[0] > behind]
    items = [offer for _, offer in keyed[:limit]]
    return items, _cursor(items[-1], order) if items and len(keyed) > limit else None


_Place = tuple[Value, Decimal, str, str, str, bool, str]


def _place(offer: Offer, order: Order) -> _Place:
    """An offer's sort key; the instance's ID distinguishes two idle instances of one type."""
    instance = str(offer.detail.get("instance", ""))
    value = SORTS[order.by](offer)
    return value, offer.price, offer.backend, offer.region, offer.instance_type, offer.spot, instance


def _key(place: _Place, order: Order) -> tuple[Any, ...]:
    value, *rest = place
    if value is None:
        return True, 0, *rest
    if not order.descending:
        return False, value, *rest
    if isinstance(value, str):
        # The longer of two that begin alike comes first.
        return False, (*(-ord(char) for char in value), 1), *rest
    return False, -value, *rest


def _cursor(offer: Offer, order: Order) -> str:
    value, price, *rest = _place(offer, order)
    return signing.dumps([str(order), None if value is None else str(value), str(price), *rest], salt=SALT)


def _read_cursor(cursor: str, order: Order, within: tuple[str, ...]) -> _Place:
    try:
        sort, value, price, *rest = signing.loads(cursor, salt=SALT)
    except signing.BadSignature:
        sort = None
    if sort != str(order):
        raise Invalid.at(*within, "cursor", msg=_("`cursor` should be the `next` of a page of the same order"))
    known = value if value is None or order.by in _TEXTS else Decimal(value)
    return (known, Decimal(price), *rest)


def _names(given: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for text in given for name in text.split(",") if name.strip()))


@dataclass(frozen=True)
class OfferListing:
    """Unsorted offers, and the sources of the backends that were read."""

    offers: list[Offer]
    sources: list[Freshness]


@dataclass(frozen=True)
class RegionQuotas:
    """An account's quotas in a region by the cloud's code. If empty, `age` (of the limits) says why.

    `use_age` is that of what others use in the account; own instances count at once.
    """

    region: str
    age: Freshness
    use_age: Freshness
    quotas: Mapping[str, Quota]


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
        known = source_rows.of_backends([(backend, driver)], now) if driver else []
        ages += (age for age in known if not age.region or wanted.takes_region(age.region))
        if error is not None and not known:
            ages.append(Freshness(backend.name, backend.kind, WHOLE, "", SourceState.FAILED, error=error))
    return OfferListing(found, ages)


def quotas(backend: Backend, now: dt.datetime) -> list[RegionQuotas]:
    """The known quotas by region; empty if the backend has no quotas."""
    driver = sources.driver_of(backend)
    if driver is None or not isinstance(driver, LimitedByQuotas):
        return []
    keys = [key for key in driver.wanted() if key.source in (driver.limits, driver.use)]
    readings = sources.read_all(backend, driver, keys)
    ages = {(age.source, age.region): age for age in source_rows.of_backends([(backend, driver)], now)}
    return [
        RegionQuotas(region, ages[driver.limits, region], ages[driver.use, region], driver.quotas(readings, region))
        for region in sorted({key.region for key in keys})
    ]


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
