"""Spot prices: a fraction of the on-demand price that differs by zone and changes every few hours."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from dstackweb.devtools.aws import catalog, pricing
from dstackweb.devtools.aws.wire import Answer, Call, Refused, ec2_answer, element, page

_SYSTEM = "Linux/UNIX"


class SpotPrices:
    def __init__(self) -> None:
        self.fixed: dict[tuple[str, str], tuple[float, float]] = {}
        """(type, zone or "*"): the price set by hand, and since when."""

    def at(self, name: str, zone: str, moment: float) -> tuple[float, float]:
        """USD an hour at `moment`, and since when it has been that."""
        fixed = self.fixed.get((name, zone)) or self.fixed.get((name, "*"))
        if fixed and fixed[1] <= moment:
            return fixed
        period = 3600 * (4 + _draw(name, zone, "period") * 5)
        step = math.floor(moment / period + _draw(name, zone, "phase"))
        since = (step - _draw(name, zone, "phase")) * period
        usual = 0.3 + 0.3 * _draw(name) + 0.08 * _draw(name, zone)
        price = pricing.hourly(name, zone[:-1]) * (usual + 0.06 * _draw(name, zone, step))
        return round(price, 6), since

    def history(self, region: str, names: list[str], zones: set[str], since: float, until: float) -> Iterator[str]:
        """Rows as EC2 writes them, newest first for each type and zone, down to the price that held at `since`."""
        for name in names:
            if "spot" not in catalog.ALL[name]["SupportedUsageClasses"]:
                continue
            for zone in catalog.zones_of(region).get(name, []):
                moment = until
                while (not zones or zone in zones) and moment >= 0:
                    price, began = self.at(name, zone, moment)
                    at = datetime.fromtimestamp(began, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
                    yield (
                        f"<item><instanceType>{name}</instanceType><productDescription>{_SYSTEM}</productDescription>"
                        f"<spotPrice>{price:.6f}</spotPrice><timestamp>{at}</timestamp>"
                        f"<availabilityZone>{zone}</availabilityZone></item>"
                    )
                    moment = began - 0.001
                    if began <= since:
                        break

    def describe(self, call: Call) -> Answer:
        filters = call.filters()
        names = set(call.numbered("InstanceType") or filters.get("instance-type", []) or catalog.in_region(call.region))
        zones = set(filters.get("availability-zone", []))
        if "AvailabilityZone" in call.form:
            zones = {call.form["AvailabilityZone"]}
        wanted = call.numbered("ProductDescription") or filters.get("product-description", []) or [_SYSTEM]
        names &= set(catalog.in_region(call.region)) if {_SYSTEM, f"{_SYSTEM} (Amazon VPC)"} & set(wanted) else set()
        now = time.time()
        until = min(_moment(call.form.get("EndTime"), now), now)
        since = min(_moment(call.form.get("StartTime"), until - 90 * 86400), until)
        size = min(int(call.form.get("MaxResults") or 1000), 1000)
        rows, token = page(
            self.history(call.region, sorted(names), zones, since, until), call, size=size,
            token=call.form.get("NextToken"), invalid=lambda: Refused("InvalidNextToken", "The token is not valid."),
        )  # fmt: skip
        return ec2_answer(
            call.action, f"<spotPriceHistorySet>{''.join(rows)}</spotPriceHistorySet>{element('nextToken', token)}"
        )


def _draw(*what: object) -> float:
    """Between 0 and 1, always the same for the same."""
    return int(hashlib.sha256(repr(what).encode()).hexdigest()[:8], 16) / 0xFFFFFFFF


def _moment(text: str | None, default: float) -> float:
    if not text:
        return default
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise Refused("InvalidParameterValue", f"Invalid value '{text}' for a time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
