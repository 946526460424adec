"""The zones that the configured subnets of a region are in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstackweb.backends.aws.config import AwsConfig

if TYPE_CHECKING:
    from dstackweb.backends.aws.client import Aws


def fetch(aws: Aws, config: AwsConfig, region: str) -> dict[str, str]:
    """Each subnet's zone, by its ID. Raises SourceFailed, also where one of them isn't there."""
    found = {}
    for page in aws.pages("ec2", region, "DescribeSubnets", SubnetIds=list(config.subnets_in(region))):
        for subnet in page.get("Subnets", ()):
            found[subnet["SubnetId"]] = subnet["AvailabilityZone"]
    return found
