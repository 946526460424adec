"""The instance types of a region with their zones and prices (USD per hour: on demand, with Linux and shared tenancy,
and spot), and the zones of its configured subnets."""

from __future__ import annotations

import datetime as dt
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from dstackweb.backends.aws.config import AwsConfig
from dstackweb.backends.contract import SourceFailed, SourceFailure

if TYPE_CHECKING:
    from dstackweb.backends.aws.client import Aws, Patience

log = logging.getLogger(__name__)

NAMES = {"RTX PRO Server 4500": "RTX PRO 4500", "RTX PRO Server 6000": "RTX PRO 6000", "T4g": "T4G"}
"""GPUs whose names at AWS differ from those in run files and in NVIDIA's driver."""

MAX_VALUES = 200
"""In one filter of EC2."""

OTHER_DEVICES = ("FpgaInfo", "InferenceAcceleratorInfo", "MediaAcceleratorInfo", "NeuronInfo")

WANTED = {"operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used"}
"""Attributes of wanted products. Only `Used` is not reserved, idle capacity."""

HOME = "us-east-1"
REFUSED_EVERYWHERE = (
    SourceFailure.ACCESS_DENIED,
    SourceFailure.BAD_CREDENTIALS,
    SourceFailure.NO_CREDENTIALS,
    SourceFailure.THROTTLED,
)
"""Failures of one endpoint that another one would answer with, too, or that it must not be asked after."""


@dataclass(frozen=True, slots=True)
class InstanceType:
    """An instance type that jobs can use. `gpu_memory_mib` is per GPU."""

    name: str
    architecture: str
    cpus: int
    memory_mib: int
    gpu_name: str
    gpu_count: int
    gpu_memory_mib: int
    on_demand: bool
    spot: bool
    zones: tuple[str, ...]

    @property
    def family(self) -> str:
        return self.name.partition(".")[0]


def fetch(aws: Aws, config: AwsConfig, region: str) -> dict[str, InstanceType]:
    """The instance types that the config allows, by name. Raises SourceFailed."""
    wanted = [*(config.instance_types or ()), *(f"{family}.*" for family in config.families or ())]
    filters = [{"Name": "instance-type", "Values": wanted}] if 0 < len(wanted) <= MAX_VALUES else []
    zones: defaultdict[str, list[str]] = defaultdict(list)
    params = {"LocationType": "availability-zone", "MaxResults": 1000, "Filters": filters}
    offered = aws.items(
        "ec2", region, "DescribeInstanceTypeOfferings", "InstanceTypeOfferings",
        lambda offering: (str(offering["InstanceType"]), str(offering["Location"])), **params,
    )  # fmt: skip
    for name, zone in offered:
        zones[name].append(zone)

    def read_one(described: Mapping[str, Any]) -> InstanceType | None:
        name = described["InstanceType"]
        return read(described, config.architectures, zones.get(name, ())) if config.allows(name) else None

    params = {"MaxResults": 100, "Filters": filters}
    kinds = aws.items("ec2", region, "DescribeInstanceTypes", "InstanceTypes", read_one, **params)
    return {kind.name: kind for kind in kinds if kind is not None}


def read(
    described: Mapping[str, Any], architectures: tuple[str, ...], zones: list[str] | tuple[str, ...]
) -> InstanceType | None:
    """An instance type from EC2's description; None if no run could use it.

    That is one without a zone or a wanted architecture, or with devices other than NVIDIA's GPUs, which run files
    cannot name. A part of a GPU is not the GPU that a run requires, and needs a driver of its own. Raises one of
    `errors.ODD` if it can't be read.
    """
    supported = described.get("ProcessorInfo", {}).get("SupportedArchitectures", ())
    architecture = next((one for one in architectures if one in supported), None)
    if not zones or architecture is None or "hvm" not in described.get("SupportedVirtualizationTypes", ()):
        return None
    if any(described.get(device) for device in OTHER_DEVICES):
        return None
    gpus = described.get("GpuInfo", {}).get("Gpus", ())
    if len(gpus) > 1 or any(gpu.get("Manufacturer") != "NVIDIA" or not gpu.get("Count") for gpu in gpus):
        return None
    gpu = gpus[0] if gpus else {}
    usage = described.get("SupportedUsageClasses", ())
    name = gpu.get("Name", "")
    return InstanceType(
        name=described["InstanceType"],
        architecture=architecture,
        cpus=positive(described["VCpuInfo"]["DefaultVCpus"]),
        memory_mib=positive(described["MemoryInfo"]["SizeInMiB"]),
        gpu_name=NAMES.get(name, name),
        gpu_count=gpu.get("Count", 0),
        gpu_memory_mib=gpu.get("MemoryInfo", {}).get("SizeInMiB", 0),
        on_demand="on-demand" in usage,
        spot="spot" in usage,
        zones=tuple(sorted(zones)),
    )


def positive(number: int) -> int:
    """A count. Raises ValueError, TypeError."""
    if number <= 0:
        raise ValueError(f"{number} is no count")
    return number


def amount(text: Any) -> Decimal:
    """A price in USD. Raises ValueError, ArithmeticError."""
    price = Decimal(str(text))
    if not price.is_finite() or price < 0:
        raise ValueError(f"{text} is no price")
    return price.normalize()


def fetch_subnets(aws: Aws, config: AwsConfig, region: str) -> dict[str, str]:
    """The zone of each configured subnet, by its ID. Raises SourceFailed, also if one does not exist."""
    ids = list(config.subnets_in(region))

    def read_zone(subnet: Mapping[str, Any]) -> tuple[str, str]:
        return str(subnet["SubnetId"]), str(subnet["AvailabilityZone"])

    return dict(aws.items("ec2", region, "DescribeSubnets", "Subnets", read_zone, SubnetIds=ids))


def fetch_prices(aws: Aws, config: AwsConfig, region: str) -> dict[str, Decimal]:
    """The USD price of each allowed instance type. Raises SourceFailed.

    Few regions have the Pricing API, for the prices of all; where one can't be reached, the next is asked.
    """
    from dstackweb.backends.aws.client import PROBE

    *homes, last = pricing_regions(aws, region)
    for home in homes:
        try:
            return _fetch_prices(aws, config, region, home, patience=PROBE)
        except SourceFailed as failed:
            if failed.code in REFUSED_EVERYWHERE:
                raise
            log.warning("the prices of %s can't be read from %s: %s", region, home, failed)
    return _fetch_prices(aws, config, region, last)


def _fetch_prices(
    aws: Aws, config: AwsConfig, region: str, home: str, patience: Patience | None = None
) -> dict[str, Decimal]:
    filters = [
        {"Type": "TERM_MATCH", "Field": name, "Value": value}
        for name, value in {**WANTED, "regionCode": region}.items()
    ]

    def read_one(product: str) -> tuple[str, Decimal]:
        return read_price(json.loads(product), region)

    params = {"ServiceCode": "AmazonEC2", "Filters": filters, "MaxResults": 100, "patience": patience}
    products = aws.items("pricing", home, "GetProducts", "PriceList", read_one, **params)
    return {name: price for name, price in products if price and config.allows(name)}


def read_price(product: Mapping[str, Any], region: str) -> tuple[str, Decimal]:
    """A product's instance type and price; 0 if it is not a wanted product or has no price of its own.

    Capacity blocks are separate products with `marketoption` CapacityBlock. Raises one of `errors.ODD` if it can't be
    read.
    """
    attributes = product["product"]["attributes"]
    name = attributes.get("instanceType", "")
    if not isinstance(name, str):
        raise TypeError("an instance type without a name")
    wanted = {**WANTED, "regionCode": region, "locationType": "AWS Region", "marketoption": "OnDemand"}
    if any(attributes.get(field, value) != value for field, value in wanted.items()):
        return name, Decimal(0)
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term.get("priceDimensions", {}).values():
            if dimension.get("unit") == "Hrs" and (price := amount(dimension["pricePerUnit"].get("USD", 0))):
                return name, price
    return name, Decimal(0)


def pricing_regions(aws: Aws, region: str) -> list[str]:
    """The regions of the Pricing API in the order in which to ask them: the own one, HOME, and the others."""
    regions = aws.regions_of("pricing", region) or [region]
    return sorted(regions, key=lambda name: (name != region, name != HOME, name))


def fetch_spot_prices(aws: Aws, config: AwsConfig, region: str, now: dt.datetime) -> dict[str, dict[str, Decimal]]:
    """The USD per hour of each allowed instance type, by zone. Raises SourceFailed.

    A history that starts now contains the last change before it of each type and zone: the current price.
    """
    newest: dict[tuple[str, str], tuple[dt.datetime, Decimal]] = {}

    def read_change(change: Mapping[str, Any]) -> tuple[str, str, dt.datetime, Decimal]:
        price = amount(change["SpotPrice"])
        if not price or not isinstance(change["Timestamp"], dt.datetime):
            raise ValueError("no price, or none of a known time")
        return change["InstanceType"], change["AvailabilityZone"], change["Timestamp"], price

    params = {"StartTime": now, "ProductDescriptions": ["Linux/UNIX"], "MaxResults": 1000}
    changes = aws.items("ec2", region, "DescribeSpotPriceHistory", "SpotPriceHistory", read_change, **params)
    for name, zone, at, price in changes:
        if config.allows(name) and ((name, zone) not in newest or newest[name, zone][0] < at):
            newest[name, zone] = at, price
    found: defaultdict[str, dict[str, Decimal]] = defaultdict(dict)
    for (name, zone), (_, price) in sorted(newest.items()):
        found[name][zone] = price
    return dict(found)


described: dict[str, Mapping[str, Any]] = {}
"""Instance types as EC2 describes them; these never change, so each process asks once."""


def describe(aws: Aws, region: str, names: Iterable[str]) -> Mapping[str, Mapping[str, Any]]:
    """EC2's descriptions of instance types, and of others, by name. Raises SourceFailed."""

    def read_named(kind: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        positive(kind["VCpuInfo"]["DefaultVCpus"])
        return str(kind["InstanceType"]), kind

    unknown = sorted(set(names) - set(described))
    for start in range(0, len(unknown), 100):
        batch = unknown[start : start + 100]
        described.update(
            aws.items("ec2", region, "DescribeInstanceTypes", "InstanceTypes", read_named, InstanceTypes=batch)
        )
    return described
