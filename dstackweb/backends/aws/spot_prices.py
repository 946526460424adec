"""Spot prices of a region as they are now, by instance type and zone."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from decimal import Decimal
from typing import TYPE_CHECKING

from dstackweb.backends.aws.config import AwsConfig

if TYPE_CHECKING:
    from dstackweb.backends.aws.client import Aws


def fetch(aws: Aws, config: AwsConfig, region: str, now: dt.datetime) -> dict[str, dict[str, Decimal]]:
    """The USD per hour of each instance type that the config allows, by zone. Raises SourceFailed.

    A history that starts now has the last change before it, which is the price now, of each type and zone.
    """
    newest: dict[tuple[str, str], tuple[dt.datetime, Decimal]] = {}
    asked = {"StartTime": now, "ProductDescriptions": ["Linux/UNIX"], "MaxResults": 1000}
    for page in aws.pages("ec2", region, "DescribeSpotPriceHistory", **asked):
        for change in page.get("SpotPriceHistory", ()):
            name, at = change["InstanceType"], change["Timestamp"]
            key = name, change["AvailabilityZone"]
            if config.allows(name) and (key not in newest or newest[key][0] < at):
                newest[key] = at, Decimal(change["SpotPrice"]).normalize()
    found: defaultdict[str, dict[str, Decimal]] = defaultdict(dict)
    for (name, zone), (_, price) in sorted(newest.items()):
        found[name][zone] = price
    return dict(found)
