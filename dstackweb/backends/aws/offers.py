"""Offers from the sources of each region: pure. An instance type without a price is no offer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from dstackweb.backends.aws.ami import is_published_for
from dstackweb.backends.aws.config import AwsConfig, in_region
from dstackweb.backends.aws.instance_types import InstanceType
from dstackweb.backends.aws.quotas import code_of, quotas_of
from dstackweb.backends.contract import (
    Availability,
    Offer,
    SourceFailed,
    SourceFailure,
    SourceKey,
    SourceReading,
    SourceState,
)
from dstackweb.backends.matching import meets
from dstackweb.spec.effective import Requirements

Verdict = tuple[Availability, dict[str, Any]]
UNREAD = SourceReading(SourceState.FAILED)


class Region:
    """The sources of one region. `zones`: where instances may launch; None: anywhere. `own_image`: one is set.

    `own_use`: the vCPUs of the backend's own instances there by quota.
    """

    def __init__(
        self,
        config: AwsConfig,
        readings: Mapping[SourceKey, SourceReading],
        name: str,
        own_use: Mapping[str, int],
    ) -> None:
        def read(source: str) -> SourceReading:
            return readings.get(SourceKey(source, name), UNREAD)

        self.name, self.own_image = name, in_region(config.ami, name) is not None
        # Those read before a change of the settings have others, too.
        self.types: Mapping[str, InstanceType] = {
            type_name: kind
            for type_name, kind in (read("instance_types").value or {}).items()
            if config.allows(type_name) and kind.architecture in config.architectures
        }
        self.prices: Mapping[str, Decimal] = read("prices").value or {}
        self.spot_prices: Mapping[str, Mapping[str, Decimal]] = read("spot_prices").value or {}
        limits, use = read("quotas"), read("quota_use")
        self.quotas = quotas_of(limits.value or {}, use.value, own_use)
        self.limits_unknown = _why(limits) if limits.value is None else None
        self.use_unknown = _why(use) if use.value is None else None
        self.zones: frozenset[str] | None = None
        self.zones_unknown: dict[str, Any] | None = None
        if config.subnets_in(name):
            subnets = read("subnets")
            if subnets.value is None:
                self.zones_unknown = {"code": "subnets_unknown", "why": (subnets.error or {}).get("code")}
            else:
                self.zones = frozenset(subnets.value.values())

    def allowed(self, kind: InstanceType) -> tuple[str, ...]:
        """The zones with the instance type where it may launch."""
        return tuple(zone for zone in kind.zones if self.zones is None or zone in self.zones)


def join(
    config: AwsConfig,
    readings: Mapping[SourceKey, SourceReading],
    requirements: Requirements,
    own_use: Mapping[str, Mapping[str, int]],
    *,
    backend: str,
    image: str | None = None,
    url_problem: str | None = None,
) -> list[Offer]:
    """Every instance type that meets the requirements, on demand and spot, by (price, region, instance type).

    `own_use`: the vCPUs of the backend's own instances by region and quota. Raises SourceFailed if there is none and a
    source that could have some is unknown.
    """
    refused_image = None if config.containers else image
    offers = [
        offer
        for name in config.regions
        for offer in _offers(
            Region(config, readings, name, own_use.get(name, {})), requirements, backend, refused_image, url_problem
        )
    ]
    if not offers:
        _raise_unknown(config, readings)
    return sorted(offers, key=lambda offer: (offer.price, offer.region, offer.instance_type, offer.spot))


def _offers(
    region: Region, needs: Requirements, backend: str, image: str | None, url_problem: str | None
) -> Iterator[Offer]:
    for kind in region.types.values():
        if not meets(kind, needs):
            continue
        for spot in (False, True):
            price, more = _price(region, kind, spot)
            if price is None:
                continue
            if url_problem is not None:
                _available, quota = _quota_verdict(region, kind, spot)
                detail = {"code": "public_url", "why": url_problem, "quota": quota}
                verdict: Verdict = Availability.NOT_AVAILABLE, detail
            elif image is not None:
                verdict = Availability.NOT_AVAILABLE, {"code": "image_not_supported", "image": image}
            elif not region.own_image and not is_published_for(kind.family):
                verdict = Availability.NOT_AVAILABLE, {"code": "no_driver", "family": kind.family}
            else:
                verdict = _zone_verdict(region, kind) or _quota_verdict(region, kind, spot)
            availability, detail = verdict
            yield Offer(
                backend=backend,
                region=region.name,
                instance_type=kind.name,
                cpus=kind.cpus,
                memory_mib=kind.memory_mib,
                gpu_name=kind.gpu_name,
                gpu_count=kind.gpu_count,
                gpu_memory_mib=kind.gpu_memory_mib,
                spot=spot,
                price=price,
                availability=availability,
                detail={**detail, **more},
            )


def _price(region: Region, kind: InstanceType, spot: bool) -> tuple[Decimal | None, dict[str, Any]]:
    """USD per hour; for spot, of the cheapest allowed zone, with the price of each zone."""
    if not spot:
        return (region.prices.get(kind.name) if kind.on_demand else None), {}
    prices = region.spot_prices.get(kind.name, {}) if kind.spot else {}
    zones = [zone for zone in region.allowed(kind) if zone in prices] or list(prices)
    if not zones:
        return None, {}
    ordered = sorted(zones, key=lambda zone: (prices[zone], zone))
    return prices[ordered[0]], {"zone": ordered[0], "zone_prices": {zone: str(prices[zone]) for zone in ordered}}


def _zone_verdict(region: Region, kind: InstanceType) -> Verdict | None:
    if region.zones_unknown is not None:
        return Availability.UNKNOWN, region.zones_unknown
    if region.allowed(kind):
        return None
    zones = {"zones": sorted(region.zones or ()), "offered_in": list(kind.zones)}
    return Availability.NOT_AVAILABLE, {"code": "not_in_zone", **zones}


def _quota_verdict(region: Region, kind: InstanceType, spot: bool) -> Verdict:
    """Judge by the account's quota, with how many more instances fit. An unknown quota or use is not a used-up one."""
    if region.limits_unknown is not None:
        return Availability.UNKNOWN, {"code": "quota_unknown", "why": region.limits_unknown}
    code = code_of(kind.name, spot=spot)
    quota = region.quotas.get(code or "")
    if quota is None:
        why = "not_documented" if code is None else "not_listed"
        return Availability.UNKNOWN, {"code": "quota_unknown", "why": why}
    numbers = {"limit": quota.limit, "used": quota.used, "needs": kind.cpus}
    if quota.used is None and kind.cpus <= quota.limit:
        return Availability.UNKNOWN, {"code": "quota_use_unknown", "why": region.use_unknown, **numbers}
    fits = max(0, quota.limit - (quota.used or 0)) // kind.cpus
    if fits == 0:
        return Availability.NO_QUOTA, {"code": "no_quota", "fits": 0, **numbers}
    return Availability.AVAILABLE, {"code": "quota", "fits": fits, **numbers}


def _why(unknown: SourceReading) -> str:
    return str((unknown.error or {}).get("code", SourceFailure.NOT_READ))


def _raise_unknown(config: AwsConfig, readings: Mapping[SourceKey, SourceReading]) -> None:
    """Raise for the first unknown source that offers need."""
    for region in config.regions:
        for source in ("instance_types", "prices", "spot_prices"):
            reading = readings.get(SourceKey(source, region), UNREAD)
            if reading.value is None:
                error = dict(reading.error or {"code": SourceFailure.NOT_READ})
                raise SourceFailed(error.pop("code"), **{"source": source, "region": region, **error})
