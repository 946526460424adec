"""What the cloud sells and where: moto's instance types and zones, by default a subset of the types."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import botocore.session
from moto.utilities import utils

_OFFERINGS = "ec2/resources/instance_type_offerings/"
_WHOLE = {
    "p3", "p3dn", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "g4dn", "g5", "g6", "g6e", "gr6", "inf2", "trn1",
}  # fmt: skip
_SIZED = {"t3", "m5", "m6i", "m7i", "c6i", "c7i", "r6i", "r7i"}
_SIZES = {"small", "medium", "large", "xlarge", "2xlarge", "4xlarge", "8xlarge", "12xlarge", "16xlarge", "24xlarge"}


class _ByRegion(dict[str, Any]):
    """Offerings of one location type; a region's are read when somebody asks, and hold only what the catalogue has."""

    def __init__(self, location_type: str, regions: list[str]) -> None:
        super().__init__(dict.fromkeys(regions))
        self.location_type = location_type

    def __getitem__(self, region: str) -> list[dict[str, str]]:
        found = super().__getitem__(region)
        if found is None:
            rows = _load(f"{_OFFERINGS}{self.location_type}/{region}.json")
            found = [{**row, "LocationType": self.location_type} for row in rows if row["InstanceType"] in NAMES]
            self[region] = found
        return found  # type: ignore[no-any-return]

    def get(self, region: str, default: Any = None) -> Any:
        return self[region] if self.__contains__(region) else default


_load = utils.load_resource
# moto reads the offerings of all regions as it is imported, 2 s of work: here they are read region by region, when
# somebody asks.
utils.load_resource = lambda resource: [] if resource.startswith(_OFFERINGS) else _load(resource)
try:
    from moto.ec2.models import instance_types as _moto
finally:
    utils.load_resource = _load

ALL: dict[str, dict[str, Any]] = _moto.INSTANCE_TYPES
NAMES: set[str] = set()
"""The types this cloud knows."""


def stock(*, everything: bool = False) -> None:
    """Choose the types: the usual subset, or all that moto knows."""
    NAMES.clear()
    NAMES.update(name for name in ALL if everything or _usual(name))
    for location_type, by_region in list(_moto.INSTANCE_TYPE_OFFERINGS.items()):
        _moto.INSTANCE_TYPE_OFFERINGS[location_type] = _ByRegion(location_type, sorted(by_region))
    in_region.cache_clear()
    zones_of.cache_clear()


def _usual(name: str) -> bool:
    family, _, size = name.partition(".")
    return (family in _WHOLE and size != "metal") or (family in _SIZED and size in _SIZES)


def known(region: str) -> bool:
    return region in _moto.INSTANCE_TYPE_OFFERINGS["region"]


def regions() -> list[str]:
    return sorted(_moto.INSTANCE_TYPE_OFFERINGS["region"])


@cache
def in_region(region: str) -> list[str]:
    return sorted({row["InstanceType"] for row in offerings("availability-zone", region)})


@cache
def zones_of(region: str) -> dict[str, list[str]]:
    """The zones where each type can be had."""
    found: dict[str, list[str]] = {}
    for row in offerings("availability-zone", region):
        found.setdefault(row["InstanceType"], []).append(row["Location"])
    return {name: sorted(zones) for name, zones in found.items()}


def offerings(location_type: str, region: str) -> list[dict[str, str]]:
    return _moto.INSTANCE_TYPE_OFFERINGS[location_type].get(region, [])  # type: ignore[no-any-return]


def matching(names: list[str], filters: dict[str, list[str]]) -> list[str]:
    """By EC2's filters of DescribeInstanceTypes, which moto knows."""
    return [it["InstanceType"] for it in _moto.InstanceTypeBackend().describe_instance_types(names or None, filters)]


def vcpus(name: str) -> int:
    return int(ALL[name]["VCpuInfo"]["DefaultVCpus"])


def memory_gib(name: str) -> float:
    return float(ALL[name]["MemoryInfo"]["SizeInMiB"]) / 1024


def accelerators(name: str) -> list[tuple[str, int, int]]:
    """(name, how many, MiB of each): GPUs, Inferentia and Trainium devices."""
    info = ALL[name]
    devices = info.get("GpuInfo", {}).get("Gpus", []) + info.get("NeuronInfo", {}).get("NeuronDevices", [])
    return [(each["Name"], each["Count"], each.get("MemoryInfo", {}).get("SizeInMiB", 0)) for each in devices]


def gpu_count(name: str) -> int:
    return sum(gpu["Count"] for gpu in ALL[name].get("GpuInfo", {}).get("Gpus", []))


@cache
def locations() -> dict[str, str]:
    """The names of regions as the price list gives them, for example "EU (Ireland)"."""
    data = botocore.session.get_session().get_component("data_loader").load_data("endpoints")
    named = data["partitions"][0]["regions"]
    return {region: re.sub(r"^Europe ", "EU ", entry["description"]) for region, entry in named.items()}


@cache
def ec2_model() -> Any:
    return botocore.session.get_session().get_service_model("ec2")


stock()
