"""Prices of a region in USD per hour: on demand (Linux, shared tenancy, no licensed software) and spot."""

from __future__ import annotations

import datetime as dt
import json
from collections import defaultdict
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from dstackweb.backends.aws.config import AwsConfig

if TYPE_CHECKING:
    from dstackweb.backends.aws.client import Aws

WANTED = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
}
"""Attributes of wanted products. Only `Used` is not reserved, idle capacity."""

HOME = "us-east-1"


def fetch(aws: Aws, config: AwsConfig, region: str) -> dict[str, Decimal]:
    """The USD price of each allowed instance type. Raises SourceFailed."""
    filters = [
        {"Type": "TERM_MATCH", "Field": name, "Value": value}
        for name, value in {**WANTED, "regionCode": region}.items()
    ]
    found: dict[str, Decimal] = {}
    pages = aws.pages(
        "pricing", endpoint(aws, region), "GetProducts", ServiceCode="AmazonEC2", Filters=filters, MaxResults=100
    )
    for page in pages:
        for product in page.get("PriceList", ()):
            name, price = read(json.loads(product), region)
            if price and config.allows(name):
                found[name] = price
    return found


def read(product: Mapping[str, Any], region: str) -> tuple[str, Decimal]:
    """A product's instance type and price; 0 if it is not a wanted product or has no price of its own.

    Capacity blocks are separate products with `marketoption` CapacityBlock.
    """
    attributes = product.get("product", {}).get("attributes", {})
    name: str = attributes.get("instanceType", "")
    wanted = {**WANTED, "regionCode": region, "locationType": "AWS Region", "marketoption": "OnDemand"}
    if any(attributes.get(field, value) != value for field, value in wanted.items()):
        return name, Decimal(0)
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term.get("priceDimensions", {}).values():
            price = _amount(dimension.get("pricePerUnit", {}).get("USD"))
            if dimension.get("unit") == "Hrs" and price > 0:
                return name, price.normalize()
    return name, Decimal(0)


def _amount(text: str | None) -> Decimal:
    try:
        return Decimal(text or 0)
    except InvalidOperation:
        return Decimal(0)


def endpoint(aws: Aws, region: str) -> str:
    """The region of the Pricing API, which has all regions' prices, and endpoints in few."""
    there = aws.regions_of("pricing", region)
    return region if region in there or not there else HOME if HOME in there else there[0]


def fetch_spot(aws: Aws, config: AwsConfig, region: str, now: dt.datetime) -> dict[str, dict[str, Decimal]]:
    """The USD per hour of each allowed instance type, by zone. Raises SourceFailed.

    A history that starts now contains the last change before it of each type and zone: the current price.
    """
    newest: dict[tuple[str, str], tuple[dt.datetime, Decimal]] = {}
    params = {"StartTime": now, "ProductDescriptions": ["Linux/UNIX"], "MaxResults": 1000}
    for page in aws.pages("ec2", region, "DescribeSpotPriceHistory", **params):
        for change in page.get("SpotPriceHistory", ()):
            name, at = change["InstanceType"], change["Timestamp"]
            key = name, change["AvailabilityZone"]
            if config.allows(name) and (key not in newest or newest[key][0] < at):
                newest[key] = at, Decimal(change["SpotPrice"]).normalize()
    found: defaultdict[str, dict[str, Decimal]] = defaultdict(dict)
    for (name, zone), (_, price) in sorted(newest.items()):
        found[name][zone] = price
    return dict(found)
