"""Which products of AWS's price list are what is asked for, and what they cost."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from dstackweb.backends.aws import errors
from dstackweb.backends.aws.instance_types import read_price

SAID = {
    "instanceType": "g5.xlarge", "operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA",
    "capacitystatus": "Used", "regionCode": "eu-west-1", "locationType": "AWS Region", "marketoption": "OnDemand",
}  # fmt: skip


def product(usd: str | None = "1.1230000000", unit: str = "Hrs", **said: str) -> dict[str, Any]:
    """As the Pricing API has it, with the terms that aren't asked for."""
    price = {"CNY": "7.1"} if usd is None else {"USD": usd}
    dimensions = {"SKU.TERM.RATE": {"unit": unit, "pricePerUnit": price}}
    return {
        "product": {"productFamily": "Compute Instance", "attributes": {**SAID, **said}, "sku": "SKU"},
        "terms": {
            "OnDemand": {"SKU.TERM": {"priceDimensions": dimensions}},
            "Reserved": {"SKU.YEAR": {"priceDimensions": {"x": {"unit": "Hrs", "pricePerUnit": {"USD": "0.7"}}}}},
        },
    }


def test_a_price_is_the_exact_one_per_hour() -> None:
    assert read_price(product(), "eu-west-1") == ("g5.xlarge", Decimal("1.123"))


def test_fields_missing_in_older_price_lists_get_their_defaults() -> None:
    old = product()
    for field in ("marketoption", "locationType", "regionCode"):
        del old["product"]["attributes"][field]
    assert read_price(old, "eu-west-1")[1] == Decimal("1.123")


@pytest.mark.parametrize(
    "other",
    [
        product(operatingSystem="Windows"),
        product(tenancy="Dedicated"),
        product(preInstalledSw="SQL Web"),
        product(capacitystatus="UnusedCapacityReservation"),
        product(regionCode="us-east-1"),
        product(locationType="AWS Local Zone"),
        product(marketoption="CapacityBlock"),
        product("0.0000000000"),
        product(None),
        product(unit="Quantity"),
    ],
)
def test_other_products_have_no_price_here(other: dict[str, Any]) -> None:
    assert read_price(other, "eu-west-1")[1] == 0


@pytest.mark.parametrize("other", [product("free"), product("-1"), {"product": {}, "terms": {}}, []])
def test_a_product_that_makes_no_sense_is_an_error(other: Any) -> None:
    with pytest.raises(errors.ODD):
        read_price(other, "eu-west-1")
