"""Public images under the names of AWS's public parameters: a few of what moto would take 0.3 s a region to load."""

from __future__ import annotations

import hashlib
import re

from moto.ec2.models import ec2_backends
from moto.ec2.models.amis import Ami

from dstackweb.devtools.aws.quotas import ACCOUNT

BUILT = "20261101"
AMAZON, CANONICAL = "137112412989", "099720109477"
_AMAZON_LINUX = r"ami-amazon-linux-latest/(al2023-ami-kernel-[\w.]+|amzn2-ami-(?:kernel-[\w.]+-)?hvm)-(x86_64|arm64)\S*"
_DEEP_LEARNING = (
    r"deeplearning/ami/(x86_64|arm64)/base-oss-nvidia-driver-gpu-(ubuntu|amazon-linux)-([\d.]+)/latest/ami-id"
)
_UBUNTU = r"canonical/ubuntu/server/(\d\d\.04)/stable/current/(amd64|arm64)/hvm/ebs-gp[23]/ami-id"
USUAL = [
    f"/aws/service/{name}"
    for name in (
        "ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64",
        "ami-amazon-linux-latest/al2023-ami-kernel-default-arm64",
        "deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id",
        "deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
        "deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id",
        "canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id",
        "canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id",
    )
]


def _of(parameter: str) -> tuple[str, str, str, str] | None:
    """Name, owner, architecture and root device of the image that a parameter names."""
    path = parameter.removeprefix("/aws/service/")
    if found := re.fullmatch(_AMAZON_LINUX, path):
        return f"{found[1]}-{BUILT}-{found[2]}", AMAZON, found[2], "/dev/xvda"
    if found := re.fullmatch(_DEEP_LEARNING, path):
        system = f"{found[2].replace('-', ' ').title()} {found[3]}"
        device = "/dev/sda1" if found[2] == "ubuntu" else "/dev/xvda"
        return f"Deep Learning Base OSS Nvidia Driver GPU AMI ({system}) {BUILT}", "898082745236", found[1], device
    if found := re.fullmatch(_UBUNTU, path):
        architecture = {"amd64": "x86_64"}.get(found[2], found[2])
        return (
            f"ubuntu/images/hvm-ssd/ubuntu-{found[1]}-{found[2]}-server-{BUILT}",
            CANONICAL,
            architecture,
            "/dev/sda1",
        )
    return None


def known(parameter: str) -> bool:
    return _of(parameter) is not None


def image(parameter: str, region: str) -> str:
    """The id of the image, which moto knows from now on."""
    told = _of(parameter)
    if told is None:
        raise KeyError(parameter)
    name, owner, architecture, device = told
    image_id = f"ami-{hashlib.sha256(f'{region}{parameter}'.encode()).hexdigest()[:17]}"
    backend = ec2_backends[ACCOUNT][region]
    if image_id not in backend.amis:
        backend.amis[image_id] = Ami(
            backend, image_id, name=name, description=name, owner_id=owner, public=True, virtualization_type="hvm",
            owner_alias=None if owner == CANONICAL else "amazon", architecture=architecture, hypervisor="xen",
            root_device_type="ebs", root_device_name=device, region_name=f"{region}a",
        )  # fmt: skip
    return image_id


def stock(region: str) -> None:
    """The usual images, for whoever looks for them by name."""
    for parameter in USUAL:
        image(parameter, region)
