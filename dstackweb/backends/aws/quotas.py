"""How many vCPUs of which families an account may run in a region, on demand and as spot, and how many it does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dstackweb.backends.aws.client import Aws


class Codes(NamedTuple):
    """The quotas that a family counts against; None where AWS documents none."""

    on_demand: str | None
    spot: str | None


_P = "L-417A185B"
_STANDARD = Codes("L-1216C47A", "L-34B43A08")
_G_AND_VT = Codes("L-DB2E81BA", "L-3819A6DF")
_OLDER_P, _P5, _NEWER_P = Codes(_P, "L-7212CCBC"), Codes(_P, "L-C4BD4855"), Codes(_P, None)

FAMILIES: Mapping[str, Codes] = {
    **dict.fromkeys(("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"), _STANDARD),
    **dict.fromkeys(("g", "gr", "vt"), _G_AND_VT),
    **dict.fromkeys(("p2", "p3", "p4"), _OLDER_P),
    "p5": _P5,
    "p": _NEWER_P,
    "inf": Codes("L-1945791B", "L-B5D1601B"),
    "trn": Codes("L-2C3B7624", "L-6B0D517C"),
    "dl": Codes("L-6E869C2A", "L-85EED4F7"),
    "f": Codes("L-74FC7D96", "L-88CF9481"),
    "x": Codes("L-7295265B", "L-E3A00192"),
    "u": Codes("L-43DA4232", None),
    "hpc": Codes("L-F7808C92", None),
}
"""By the letters that a family starts with, and its generation where that makes a difference.

https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html and Service Quotas' own names. Which spot
quota P families after P5 count against is documented nowhere, so that it is unknown.
"""

KNOWN = {code for codes in FAMILIES.values() for code in codes if code}
_LETTERS = re.compile(r"([a-z]+)(\d*)")
_NOT_COUNTED = ("capacity-block", "scheduled", "interruptible-capacity-reservation")


class Quota(NamedTuple):
    """vCPUs: how many may run, and how many do."""

    limit: int
    used: int


def code_of(instance_type: str, *, spot: bool) -> str | None:
    """The quota that an instance type counts against; None where that is unknown."""
    found = _LETTERS.match(instance_type.partition(".")[0])
    codes = found and (FAMILIES.get(found[0]) or FAMILIES.get(found[1]))
    return (codes.spot if spot else codes.on_demand) if codes else None


def fetch(aws: Aws, region: str) -> dict[str, Quota]:
    """The account's quotas, by code, as far as Service Quotas lists them. Raises SourceFailed."""
    listed = limits(aws, region)
    if not listed:
        return {}
    used = _used(aws, region)
    return {code: Quota(limit, used[code]) for code, limit in sorted(listed.items())}


def limits(aws: Aws, region: str) -> dict[str, int]:
    """How many vCPUs may run, by quota. Raises SourceFailed."""
    found: dict[str, int] = {}
    for page in aws.pages("service-quotas", region, "ListServiceQuotas", ServiceCode="ec2", MaxResults=100):
        for quota in page.get("Quotas", ()):
            if quota.get("QuotaCode") in KNOWN and "Value" in quota:
                found[quota["QuotaCode"]] = int(quota["Value"])
    return found


def _used(aws: Aws, region: str) -> Counter[str]:
    """The vCPUs that count, by quota: of instances that run or start, and of open requests for spot instances."""
    running = Counter(_running(aws, region))
    running.update((name, True) for name in _requested(aws, region))
    cpus = _default_cpus(aws, region, {name for name, _ in running})
    used: Counter[str] = Counter()
    for (name, spot), count in running.items():
        if (code := code_of(name, spot=spot)) is not None:
            used[code] += count * cpus.get(name, 0)
    return used


def _running(aws: Aws, region: str) -> Iterable[tuple[str, bool]]:
    """Instance type, and whether it is spot. Dedicated hosts and blocks bought ahead have quotas of their own."""
    states = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    for page in aws.pages("ec2", region, "DescribeInstances", Filters=states, MaxResults=1000):
        for reservation in page.get("Reservations", ()):
            for instance in reservation.get("Instances", ()):
                own = instance.get("Placement", {}).get("Tenancy") == "host"
                lifecycle = instance.get("InstanceLifecycle")
                if not own and lifecycle not in _NOT_COUNTED:
                    yield instance["InstanceType"], lifecycle == "spot"


def _requested(aws: Aws, region: str) -> Iterable[str]:
    """Instance types of spot requests that wait. Those that were met are instances."""
    states = [{"Name": "state", "Values": ["open"]}]
    for page in aws.pages("ec2", region, "DescribeSpotInstanceRequests", Filters=states, MaxResults=1000):
        for request in page.get("SpotInstanceRequests", ()):
            if name := request.get("LaunchSpecification", {}).get("InstanceType"):
                yield name


_cpus: dict[str, int] = {}
"""The same everywhere and for ever, so each process asks once."""


def _default_cpus(aws: Aws, region: str, names: set[str]) -> Mapping[str, int]:
    """vCPUs by instance type. An instance with fewer threads counts as if it had them all."""
    unknown = sorted(names - set(_cpus))
    for start in range(0, len(unknown), 100):
        asked = unknown[start : start + 100]
        for page in aws.pages("ec2", region, "DescribeInstanceTypes", InstanceTypes=asked):
            for described in page.get("InstanceTypes", ()):
                _cpus[described["InstanceType"]] = described["VCpuInfo"]["DefaultVCpus"]
    return _cpus
