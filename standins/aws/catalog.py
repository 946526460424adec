"""What the cloud offers where: moto's instance types (by default a subset) and zones, and a few public images."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import botocore.session
from moto.utilities import utils

ACCOUNT = "123456789012"
BUILT, AMAZON, CANONICAL = "20261101", "137112412989", "099720109477"
_OFFERINGS = "ec2/resources/instance_type_offerings/"
_WHOLE = {
    "p3", "p3dn", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "g4dn", "g5", "g6", "g6e", "gr6", "inf2", "trn1",
}  # fmt: skip
_SIZED = {"t3", "m5", "m6i", "m7i", "c6i", "c7i", "r6i", "r7i"}
_SIZES = {"small", "medium", "large", "xlarge", "2xlarge", "4xlarge", "8xlarge", "12xlarge", "16xlarge", "24xlarge"}


class _ByRegion(dict[str, Any]):
    """Offerings of one location type; a region's are read on demand, and hold only types of the catalogue."""

    def __init__(self, location_type: str, regions: list[str]) -> None:
        super().__init__(dict.fromkeys(regions))
        self.location_type = location_type

    def __getitem__(self, region: str) -> list[dict[str, str]]:
        found: list[dict[str, str]] | None = super().__getitem__(region)
        if found is None:
            rows = _load(f"{_OFFERINGS}{self.location_type}/{region}.json")
            found = [{**row, "LocationType": self.location_type} for row in rows if row["InstanceType"] in NAMES]
            self[region] = found
        return found

    def get(self, region: str, default: Any = None) -> Any:
        return self[region] if self.__contains__(region) else default


_load = utils.load_resource
# moto reads the offerings of all regions as it is imported, 2 s of work: here they are read on demand.
utils.load_resource = lambda resource: [] if resource.startswith(_OFFERINGS) else _load(resource)
try:
    from moto.ec2.models import ec2_backends, instance_types as _moto
    from moto.ec2.models.amis import Ami
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
    """The zones that offer each type."""
    found: dict[str, list[str]] = {}
    for row in offerings("availability-zone", region):
        found.setdefault(row["InstanceType"], []).append(row["Location"])
    return {name: sorted(zones) for name, zones in found.items()}


def offerings(location_type: str, region: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = _moto.INSTANCE_TYPE_OFFERINGS[location_type].get(region, [])
    return found


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


def _images() -> Iterator[tuple[str, tuple[str, str, str, str]]]:
    """By AWS's public parameters: name, owner, architecture and root device."""
    for architecture, debian in (("x86_64", "amd64"), ("arm64", "arm64")):
        yield (
            f"/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-{architecture}",
            (f"al2023-ami-kernel-default-{BUILT}-{architecture}", AMAZON, architecture, "/dev/xvda"),
        )
        for version in ("22.04", "24.04"):
            kind = "Deep Learning ARM64" if architecture == "arm64" else "Deep Learning"
            name = f"{kind} Base OSS Nvidia Driver GPU AMI (Ubuntu {version}) {BUILT}"
            yield (
                f"/aws/service/deeplearning/ami/{architecture}/base-oss-nvidia-driver-gpu-ubuntu-{version}/latest/ami-id",
                (name, "898082745236", architecture, "/dev/sda1"),
            )
        yield (
            f"/aws/service/canonical/ubuntu/server/24.04/stable/current/{debian}/hvm/ebs-gp3/ami-id",
            (f"ubuntu/images/hvm-ssd/ubuntu-24.04-{debian}-server-{BUILT}", CANONICAL, architecture, "/dev/sda1"),
        )


IMAGES = dict(_images())
DEFAULT_IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"


def image(parameter: str, region: str) -> str:
    """The ID of an image, added to moto's if needed. moto's own images would take 0.3 s a region to load."""
    name, owner, architecture, device = IMAGES[parameter]
    image_id = f"ami-{hashlib.sha256(f'{region}{parameter}'.encode()).hexdigest()[:17]}"
    backend = ec2_backends[ACCOUNT][region]
    if image_id not in backend.amis:
        backend.amis[image_id] = Ami(
            backend, image_id, name=name, description=name, owner_id=owner, public=True, virtualization_type="hvm",
            owner_alias=None if owner == CANONICAL else "amazon", architecture=architecture, hypervisor="xen",
            root_device_type="ebs", root_device_name=device, region_name=f"{region}a",
        )  # fmt: skip
    return image_id


def add_images(region: str) -> None:
    """All images, which can then be found by name."""
    for parameter in IMAGES:
        image(parameter, region)


stock()
