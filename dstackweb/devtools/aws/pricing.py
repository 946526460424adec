"""The Pricing API: prices computed from vCPUs, memory and accelerators, in the layout of AWS's price list."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

from dstackweb.devtools.aws import catalog
from dstackweb.devtools.aws.wire import Answer, Call, Refused, json_answer, page

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


def get_products(call: Call) -> Answer:
    if call.region not in ENDPOINTS:
        raise Refused("UnrecognizedClientException", "The security token included in the request is invalid.")
    if call.data.get("ServiceCode") != "AmazonEC2":
        raise Refused("NotFoundException", "No service found with this service code")
    tests = [(f["Type"], f["Field"], f["Value"]) for f in call.data.get("Filters", [])]
    if any(kind not in _TESTS for kind, _, _ in tests):
        raise Refused("InvalidParameterException", "Input Parameters are invalid. Filter type is not supported")
    size = int(call.data.get("MaxResults", 100))
    if not 1 <= size <= 100:
        raise Refused("InvalidParameterException", "Input Parameters are invalid. maxResults must be 1 to 100")
    found = (item for item in _products(tests) if all(_TESTS[t](item.get(f), v) for t, f, v in tests))
    rows, token = page(
        found, call, size=size, token=call.data.get("NextToken"),
        invalid=lambda: Refused("InvalidNextTokenException", "The pagination token is invalid."),
    )  # fmt: skip
    answer: dict[str, Any] = {"FormatVersion": "aws_v1", "PriceList": [json.dumps(_listed(row)) for row in rows]}
    return json_answer(answer | ({"NextToken": token} if token else {}))


_TESTS: dict[str, Callable[[Any, str], bool]] = {
    "TERM_MATCH": lambda has, value: has == value,
    "EQUALS": lambda has, value: has == value,
    "CONTAINS": lambda has, value: has is not None and value in has,
    "ANY_OF": lambda has, value: has in value.split(","),
    "NONE_OF": lambda has, value: has not in value.split(","),
}


def _products(tests: list[tuple[str, str, str]]) -> Iterator[dict[str, str]]:
    """The attributes of everything on the list; those fixed by a filter are not gone through in vain."""
    fixed = {field: value for kind, field, value in tests if kind in {"TERM_MATCH", "EQUALS"}}
    for region in [fixed["regionCode"]] if "regionCode" in fixed else catalog.regions():
        if region not in catalog.locations():
            continue
        offered = catalog.in_region(region)
        for name in [fixed["instanceType"]] if fixed.get("instanceType") in offered else offered:
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
