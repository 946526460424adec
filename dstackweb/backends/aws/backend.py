"""AWS as a backend: what it offers comes from its sources, and its machines are EC2's instances."""

from __future__ import annotations

from collections.abc import Sequence

from dstackweb.backends.aws import instances, launch
from dstackweb.backends.aws.sources import AwsSources
from dstackweb.backends.contract import Cloud, CloudInstance, InstanceOrder


class AwsBackend(AwsSources, Cloud):
    """One account. All calls wait for their turn in the limits that all processes share (docs/aws.md)."""

    def launch(self, order: InstanceOrder) -> CloudInstance:
        """As `contract.Cloud.launch`. Raises LaunchFailed, SourceFailed."""
        with self.reached(order.region) as aws:
            return launch.launch(aws, self.config, order)

    def instances(self, region: str, deployment: str) -> list[CloudInstance]:
        """As `contract.Cloud.instances`. Raises SourceFailed."""
        with self.reached(region) as aws:
            return instances.find_by_deployment(aws, region, deployment)

    def terminate(self, region: str, cloud_ids: Sequence[str]) -> None:
        """As `contract.Cloud.terminate`. Raises SourceFailed."""
        with self.reached(region) as aws:
            instances.terminate(aws, region, cloud_ids)

    def regions(self) -> tuple[str, ...]:
        """The configured regions. Raises Invalid."""
        return self.config.regions
