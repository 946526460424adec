"""The image of an instance, which needs Python, and a driver for GPUs: the configured one, or AWS's newest."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from django.utils import timezone

from dstackweb.backends.aws.config import AwsConfig, in_region
from dstackweb.backends.aws.errors import aws_error, refusal
from dstackweb.backends.aws.instance_types import describe
from dstackweb.backends.contract import LaunchFailed, LaunchFailure, NonsenseAnswer, SourceFailed, nonsense
from dstackweb.lib.models import Circuit, Open

T = TypeVar("T")

if TYPE_CHECKING:
    from dstackweb.backends.aws.client import Aws

_GPU = "/aws/service/deeplearning/ami/{}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
_PLAIN = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{}/hvm/ebs-gp3/ami-id"
PARAMETERS: Mapping[tuple[str, bool], str] = {
    ("x86_64", True): _GPU.format("x86_64"),
    ("arm64", True): _GPU.format("arm64"),
    ("x86_64", False): _PLAIN.format("amd64"),
    ("arm64", False): _PLAIN.format("arm64"),
}
"""Public parameters with the newest image's ID, by architecture and whether there are GPUs.

https://docs.aws.amazon.com/dlami/latest/devguide/find-dlami-id.html and
https://documentation.ubuntu.com/aws/aws-how-to/instances/find-ubuntu-images/
"""

WITHOUT_DRIVER = frozenset({"g2", "g3", "g3s", "p2", "p3", "p3dn"})
"""Families with GPUs older than Turing, which the driver in AWS's current images does not support."""

KEPT_S = 3600.0
"""A new image is published every few weeks."""


@dataclass(frozen=True)
class Image:
    """An image, with the name and minimum size (GiB) of its root disk."""

    id: str
    root_device: str
    least_gb: int


_ids: dict[tuple[str | None, str, str], tuple[float, str]] = {}
"""When a parameter was read, and its value, by endpoint, region and parameter."""
_images: dict[tuple[str | None, str, str], Image] = {}
"""Images never change, so each process asks once."""


def of(aws: Aws, config: AwsConfig, region: str, instance_type: str) -> Image:
    """The image for an instance type. Raises LaunchFailed (`ami`), SourceFailed."""
    image_id = in_region(config.ami, region) or _published(aws, config, region, instance_type)
    key = (config.endpoint_url, region, image_id)
    if key not in _images:
        _images[key] = _look_up(config, region, image_id, lambda: _described(aws, region, image_id))
    return _images[key]


def is_published_for(family: str) -> bool:
    """Whether AWS publishes an image for a family, such as `g5`."""
    return family not in WITHOUT_DRIVER


def forget(region: str = "") -> None:
    """Forget the images of a region, or of all."""
    for cache in (_ids, _images):
        for key in [key for key in cache if region in ("", key[1])]:
            del cache[key]


def _look_up(config: AwsConfig, region: str, what: str, look: Callable[[], T]) -> T:
    """Look up what depends on the region alone, not on the run. After AWS has said that there is none, no process
    asks again for a time that doubles. Raises LaunchFailed, SourceFailed."""
    account = json.dumps([config.endpoint_url, config.credentials.model_dump(mode="json"), region, what])
    digest = hashlib.sha256(account.encode()).hexdigest()[:40]
    texts = {
        LaunchFailure.AMI: f"{region} has no image {what}",
        LaunchFailure.NOT_ALLOWED: f"{what} may not be looked up in {region}",
    }
    probed = []
    for code, text in texts.items():
        try:
            if Circuit.enter(f"image:{digest}:{code}", timezone.now()):
                probed.append(code)
        except Open:
            raise LaunchFailed(code, text) from None
    try:
        value = look()
    except (LaunchFailed, SourceFailed) as failed:
        refused = failed if isinstance(failed, LaunchFailed) else refusal(failed)
        if refused is None or refused.code not in texts:
            for code in probed:
                Circuit.failed(f"image:{digest}:{code}")
            raise
        Circuit.throttled(f"image:{digest}:{refused.code}", timezone.now(), lambda: 1.0)
        forget(region)  # a published image may be withdrawn
        raise refused from failed
    for code in probed:
        Circuit.succeeded(f"image:{digest}:{code}")
    return value


def _published(aws: Aws, config: AwsConfig, region: str, instance_type: str) -> str:
    family = instance_type.partition(".")[0]
    if not is_published_for(family):
        raise LaunchFailed(LaunchFailure.AMI, f"no public image has a driver for {family}", instance_type=instance_type)
    described = describe(aws, region, [instance_type]).get(instance_type)
    if described is None:
        raise nonsense("ec2:DescribeInstanceTypes", NonsenseAnswer.MISSING, region=region, key=instance_type)
    architectures = described.get("ProcessorInfo", {}).get("SupportedArchitectures", ())
    architecture = next((one for one in config.architectures if one in architectures), "x86_64")
    name = PARAMETERS[architecture, bool(described.get("GpuInfo", {}).get("Gpus"))]
    key = (config.endpoint_url, region, name)
    asked_at, image_id = _ids.get(key, (0.0, ""))
    if not image_id or not 0 <= time.monotonic() - asked_at < KEPT_S:
        image_id = _look_up(config, region, name, lambda: _read_parameter(aws, region, name))
        _ids[key] = time.monotonic(), image_id
    return image_id


def _read_parameter(aws: Aws, region: str, name: str) -> str:
    try:
        answer = aws.call("ssm", region, "GetParameter", key="Parameter", Name=name)
    except SourceFailed as failed:
        if aws_error(failed).code == "ParameterNotFound":
            raise LaunchFailed(LaunchFailure.AMI, f"{region} has no public image {name}", parameter=name) from failed
        raise
    image_id = str(answer["Parameter"].get("Value"))
    if not image_id.startswith("ami-"):
        raise nonsense("ssm:GetParameter", NonsenseAnswer.MISSING, region=region, key="Value")
    return image_id


def _described(aws: Aws, region: str, image_id: str) -> Image:
    answer = aws.call("ec2", region, "DescribeImages", key="Images", ImageIds=[image_id])
    images: list[dict[str, Any]] = answer["Images"]
    if not images:
        raise LaunchFailed(LaunchFailure.AMI, f"{region} has no image {image_id} for this account", image=image_id)
    root = images[0].get("RootDeviceName", "")
    disks = {disk.get("DeviceName"): disk.get("Ebs", {}) for disk in images[0].get("BlockDeviceMappings", ())}
    return Image(image_id, root, int(disks.get(root, {}).get("VolumeSize", 0)))
