"""Prices: on demand computed from vCPUs, memory and accelerators, in the layout of AWS's price list; spot prices as a
fraction of them that differs by zone and changes every few hours.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from itertools import product
from typing import Any

from standins.aws import catalog
from standins.aws.wire import AwsError, Call, page

_LINUX = "Linux/UNIX"
ENDPOINTS = {"us-east-1", "eu-central-1", "ap-south-1"}
PUBLISHED = "2026-11-02T17:25:33Z"
# USD an hour: with these and 0.036 a vCPU, 0.003 a GiB, the usual types cost about what they do.
_DEVICE = {
    ("V100", 32): 3.2, ("A100", 40): 3.23, ("A100", 80): 4.26, ("H100", 80): 10.66, ("H200", 141): 8.97,
    ("B200", 179): 12.6, ("B300", 268): 15.4, ("T4", 16): 0.334, ("A10G", 22): 0.814, ("L4", 22): 0.613,
    ("L40S", 44): 1.62, ("T4g", 16): 0.3, ("Inferentia2", 32): 0.5, ("Trainium", 32): 0.96,
}  # fmt: skip
_DEAR = {"us-east-1": 1.0, "us-east-2": 1.0, "us-west-2": 1.0, "eu-west-1": 1.11, "eu-central-1": 1.15}
_SYSTEMS = {"Linux": ("RunInstances", 0.0), "Windows": ("RunInstances:0002", 0.046)}
_CAPACITY = {
    "Used": "BoxUsage",
    "UnusedCapacityReservation": "UnusedBox",
    "AllocatedCapacityReservation": "Reservation",
}
_ON_DEMAND, _PER_HOUR = "JRTCKXETXF", "6YS6EN2CT7"


@cache
def hourly(instance_type: str, region: str = "us-east-1") -> float:
    """USD an hour of a shared Linux instance on demand."""
    cpus, memory = catalog.vcpus(instance_type), catalog.memory_gib(instance_type)
    architectures = catalog.ALL[instance_type]["ProcessorInfo"]["SupportedArchitectures"]
    price = (0.036 * cpus + 0.003 * memory) * (0.8 if "x86_64" not in architectures else 1)
    for name, count, each_mib in catalog.accelerators(instance_type):
        each = _DEVICE.get((name, each_mib // 1024), 0.25 + each_mib / 1024 * 0.04)
        price += each * count
    return round(price * _factor(region), 4)


def _factor(region: str) -> float:
    return _DEAR.get(region, 1.05 + int(hashlib.sha256(region.encode()).hexdigest()[:4], 16) % 26 / 100)


def get_products(call: Call) -> dict[str, Any]:
    if call.region not in ENDPOINTS:
        raise AwsError("UnrecognizedClientException", "The security token included in the request is invalid.")
    if call.data.get("ServiceCode") != "AmazonEC2":
        raise AwsError("NotFoundException", "No service found with this service code")
    filters = call.data.get("Filters", [])
    if any(each["Type"] != "TERM_MATCH" for each in filters):
        raise AwsError("InvalidParameterException", "Input Parameters are invalid. Filter type is not supported")
    wanted = {each["Field"]: each["Value"] for each in filters}
    rows, more = page((row for row in _products(wanted) if wanted.items() <= row.items()), call)
    return {"FormatVersion": "aws_v1", "PriceList": [json.dumps(_listed(row)) for row in rows], **more}


def _products(wanted: dict[str, str]) -> Iterator[dict[str, str]]:
    """The attributes of all products, without regions and types that `wanted` excludes."""
    for region in [wanted["regionCode"]] if "regionCode" in wanted else catalog.regions():
        if region not in catalog.locations():
            continue
        offered = catalog.in_region(region)
        for name in [wanted["instanceType"]] if wanted.get("instanceType") in offered else offered:
            for system, tenancy, status in product(_SYSTEMS, ("Shared", "Dedicated"), _CAPACITY):
                yield _attributes(region, name, system, tenancy, status)


def _attributes(region: str, name: str, system: str, tenancy: str, status: str) -> dict[str, str]:
    info = catalog.ALL[name]
    found = {
        "instanceType": name,
        "instanceFamily": "GPU instance" if catalog.gpu_count(name) else "General purpose",
        "currentGeneration": "Yes" if info.get("CurrentGeneration") else "No",
        "vcpu": str(catalog.vcpus(name)),
        "memory": f"{catalog.memory_gib(name):g} GiB",
        "clockSpeed": f"{info['ProcessorInfo'].get('SustainedClockSpeedInGhz', 3.0)} GHz",
        "processorArchitecture": "64-bit",
        "networkPerformance": info["NetworkInfo"]["NetworkPerformance"],
        "operatingSystem": system,
        "operation": _SYSTEMS[system][0],
        "licenseModel": "No License required",
        "preInstalledSw": "NA",
        "tenancy": tenancy,
        "capacitystatus": status,
        "marketoption": "OnDemand",
        "location": catalog.locations()[region],
        "locationType": "AWS Region",
        "regionCode": region,
        "servicecode": "AmazonEC2",
        "servicename": "Amazon Elastic Compute Cloud",
        "usagetype": f"{_CAPACITY[status] if tenancy == 'Shared' else 'DedicatedUsage'}:{name}",
    }
    if gpus := catalog.gpu_count(name):
        found |= {"gpu": str(gpus), "gpuMemory": f"{info['GpuInfo']['TotalGpuMemoryInMiB'] / 1024:g} GB"}
    return found


def _listed(attributes: dict[str, str]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(attributes, sort_keys=True).encode()).hexdigest().upper()
    sku = re.sub("[^0-9A-Z]", "", digest)[:16]
    name, system, tenancy = attributes["instanceType"], attributes["operatingSystem"], attributes["tenancy"]
    price = hourly(name, attributes["regionCode"]) + _SYSTEMS[system][1] * catalog.vcpus(name)
    price *= 1.06 if tenancy == "Dedicated" else 1
    price *= 0 if attributes["capacitystatus"] == "AllocatedCapacityReservation" else 1
    term, rate = f"{sku}.{_ON_DEMAND}", f"{sku}.{_ON_DEMAND}.{_PER_HOUR}"
    dimension = {
        "unit": "Hrs",
        "beginRange": "0",
        "endRange": "Inf",
        "description": f"${price:.4f} per On Demand {system} {name} Instance Hour",
        "appliesTo": [],
        "rateCode": rate,
        "pricePerUnit": {"USD": f"{price:.10f}"},
    }
    return {
        "product": {"productFamily": "Compute Instance", "attributes": attributes, "sku": sku},
        "serviceCode": "AmazonEC2",
        "terms": {
            "OnDemand": {
                term: {
                    "priceDimensions": {rate: dimension},
                    "sku": sku,
                    "effectiveDate": "2026-11-01T00:00:00Z",
                    "offerTermCode": _ON_DEMAND,
                    "termAttributes": {},
                }
            }
        },
        "version": "20261102172533",
        "publicationDate": PUBLISHED,
    }


class SpotPrices:
    def __init__(self) -> None:
        self.fixed: dict[tuple[str, str], tuple[float, float]] = {}
        """(type, zone or "*"): the price that was set, and since when."""

    def at(self, name: str, zone: str, moment: float) -> tuple[float, float]:
        """USD an hour at `moment`, and since when."""
        fixed = self.fixed.get((name, zone)) or self.fixed.get((name, "*"))
        if fixed and fixed[1] <= moment:
            return fixed
        period = 3600 * (4 + _draw(name, zone, "period") * 5)
        step = math.floor(moment / period + _draw(name, zone, "phase"))
        since = (step - _draw(name, zone, "phase")) * period
        usual = 0.3 + 0.3 * _draw(name) + 0.08 * _draw(name, zone)
        price = hourly(name, zone[:-1]) * (usual + 0.06 * _draw(name, zone, step))
        return round(price, 6), since

    def history(
        self, region: str, names: list[str], zones: set[str], since: float, until: float
    ) -> Iterator[dict[str, str]]:
        """Newest first for each type and zone, down to the price at `since`."""
        for name in names:
            if "spot" not in catalog.ALL[name]["SupportedUsageClasses"]:
                continue
            for zone in catalog.zones_of(region).get(name, []):
                moment = until
                while (not zones or zone in zones) and moment >= 0:
                    price, began = self.at(name, zone, moment)
                    at = datetime.fromtimestamp(began, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
                    yield {
                        "InstanceType": name, "ProductDescription": _LINUX, "SpotPrice": f"{price:.6f}",
                        "Timestamp": at, "AvailabilityZone": zone,
                    }  # fmt: skip
                    moment = began - 0.001
                    if began <= since:
                        break

    def describe(self, call: Call) -> dict[str, Any]:
        filters = call.filters()
        names = set(call.numbered("InstanceType") or filters.get("instance-type", []) or catalog.in_region(call.region))
        zones = set(filters.get("availability-zone", []))
        if "AvailabilityZone" in call.form:
            zones = {call.form["AvailabilityZone"]}
        wanted = call.numbered("ProductDescription") or filters.get("product-description", []) or [_LINUX]
        names &= set(catalog.in_region(call.region)) if {_LINUX, f"{_LINUX} (Amazon VPC)"} & set(wanted) else set()
        now = time.time()
        until = min(_moment(call.form.get("EndTime"), now), now)
        since = min(_moment(call.form.get("StartTime"), until - 90 * 86400), until)
        rows, more = page(self.history(call.region, sorted(names), zones, since, until), call, 1000)
        return {"SpotPriceHistory": rows, **more}


def _draw(*what: object) -> float:
    """Between 0 and 1, the same for the same arguments."""
    return int(hashlib.sha256(repr(what).encode()).hexdigest()[:8], 16) / 0xFFFFFFFF


def _moment(text: str | None, default: float) -> float:
    if not text:
        return default
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise AwsError("InvalidParameterValue", f"Invalid value '{text}' for a time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
