"""The instance types of a region with their zones, and the zones of its configured subnets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstackweb.backends.aws.config import AwsConfig

if TYPE_CHECKING:
    from dstackweb.backends.aws.client import Aws

NAMES = {
    "RTX PRO Server 4500": "RTX PRO 4500",
    "RTX PRO Server 6000": "RTX PRO 6000",
    "T4g": "T4G",
}
"""GPUs whose names at AWS differ from those in run files and in NVIDIA's driver."""

MAX_VALUES = 200
"""In one filter of EC2."""

OTHER_DEVICES = ("FpgaInfo", "InferenceAcceleratorInfo", "MediaAcceleratorInfo", "NeuronInfo")


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
    for page in aws.pages("ec2", region, "DescribeInstanceTypeOfferings", **params):
        for offering in page.get("InstanceTypeOfferings", ()):
            zones[offering["InstanceType"]].append(offering["Location"])
    found = {}
    for page in aws.pages("ec2", region, "DescribeInstanceTypes", MaxResults=100, Filters=filters):
        for described in page.get("InstanceTypes", ()):
            name = described["InstanceType"]
            if config.allows(name) and (kind := read(described, config.architectures, zones.get(name, ()))):
                found[name] = kind
    return found


def read(
    described: Mapping[str, Any], architectures: tuple[str, ...], zones: list[str] | tuple[str, ...]
) -> InstanceType | None:
    """An instance type from EC2's description; None if no run could use it.

    That is one without a zone or a wanted architecture, or with devices other than NVIDIA's GPUs, which run files
    cannot name. A part of a GPU is not the GPU that a run requires, and needs a driver of its own.
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
        cpus=described["VCpuInfo"]["DefaultVCpus"],
        memory_mib=described["MemoryInfo"]["SizeInMiB"],
        gpu_name=NAMES.get(name, name),
        gpu_count=gpu.get("Count", 0),
        gpu_memory_mib=gpu.get("MemoryInfo", {}).get("SizeInMiB", 0),
        on_demand="on-demand" in usage,
        spot="spot" in usage,
        zones=tuple(sorted(zones)),
    )


def fetch_subnets(aws: Aws, config: AwsConfig, region: str) -> dict[str, str]:
    """The zone of each configured subnet, by its ID. Raises SourceFailed, also if one does not exist."""
    found = {}
    for page in aws.pages("ec2", region, "DescribeSubnets", SubnetIds=list(config.subnets_in(region))):
        for subnet in page.get("Subnets", ()):
            found[subnet["SubnetId"]] = subnet["AvailabilityZone"]
    return found
