"""A machine ordered from EC2: once, whatever is lost on the way, in the first subnet whose zone has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dstackweb.backends.aws import ami, instances, refusals, subnets
from dstackweb.backends.aws.config import AwsConfig, in_region
from dstackweb.backends.contract import CloudInstance, InstanceOrder, LaunchFailed, LaunchFailure, SourceFailed

if TYPE_CHECKING:
    from dstackweb.backends.aws.client import Aws

MOST_OF_A_TAG = 256


def launch(aws: Aws, config: AwsConfig, order: InstanceOrder) -> CloudInstance:
    """The order's machine, which an earlier try may have started. Raises LaunchFailed, SourceFailed.

    EC2 knows the order again by its token, but in each zone apart, and only with the same parameters. So a machine
    with its tag is looked for first: the answer to an earlier try may have been lost, and what is configured changed.
    """
    try:
        made = instances.find_by_order(aws, order.region, order.deployment, order.instance)
        return made or _run(aws, config, order, ami.of(aws, config, order.region, order.instance_type))
    except SourceFailed as failed:
        refusal = refusals.refusal(failed)
        if refusal is None:
            raise
        if refusal.code is LaunchFailure.AMI:
            ami.forget()  # a published image may be withdrawn
        raise refusal from failed


def _run(aws: Aws, config: AwsConfig, order: InstanceOrder, image: ami.Image) -> CloudInstance:
    """In one place after the other, as long as it is for the zone or the subnet that there is no machine."""
    zones: Mapping[str, str] = {}
    if order.zones and config.subnets_in(order.region):
        zones = subnets.fetch(aws, config, order.region)
    wanted = places(config, order, zones)
    if not wanted:
        raise LaunchFailed(LaunchFailure.NETWORK, f"no subnet is in {', '.join(order.zones)}")
    failures: list[SourceFailed] = []
    while wanted:
        subnet, zone = wanted.pop(0)
        try:
            return _run_in(aws, config, order, image, subnet, zone)
        except SourceFailed as failed:
            code = refusals.said(failed).code
            if code not in refusals.OF_THE_ZONE | refusals.OF_THE_SUBNET:
                raise
            failures.append(failed)
            if subnet and wanted and code in refusals.OF_THE_ZONE:
                zones = zones or subnets.fetch(aws, config, order.region)
                wanted = [other for other in wanted if other[0] and zones.get(other[0]) != zones.get(subnet)]
    # That one zone doesn't know the instance type matters less than that another has none left.
    raise max(failures, key=lambda failed: refusals.said(failed).code in refusals.CODES)


def places(config: AwsConfig, order: InstanceOrder, zones: Mapping[str, str]) -> list[tuple[str | None, str]]:
    """Where to try, in this order: subnet and zone, None and empty where it doesn't matter. `zones`: the subnets'."""
    own = config.subnets_in(order.region)
    if not order.zones:
        return [(subnet, "") for subnet in own] or [(None, "")]
    if not own:
        return [(None, zone) for zone in order.zones]
    return [(subnet, zone) for zone in order.zones for subnet in own if zones.get(subnet) == zone]


def _run_in(
    aws: Aws, config: AwsConfig, order: InstanceOrder, image: ami.Image, subnet: str | None, zone: str
) -> CloudInstance:
    from dstackweb.backends.aws.client import ONCE

    asked = parameters(config, order, image, subnet, zone)
    try:
        answer = aws.call("ec2", order.region, "RunInstances", patience=ONCE, **asked)
    except SourceFailed as failed:
        code = refusals.said(failed).code
        if code not in refusals.MADE_ALREADY:
            raise
        made = instances.find_by_order(aws, order.region, order.deployment, order.instance)
        if made is not None:
            return made
        if code == "IdempotentInstanceTerminated":
            raise LaunchFailed(LaunchFailure.REFUSED, "its machine was started before, and has ended") from failed
        # It is there, and not yet in the list: the next try finds it.
        raise SourceFailed("service_error", api="ec2:RunInstances", region=order.region, text=code) from None
    return instances.read(answer["Instances"][0], order.region)


def parameters(
    config: AwsConfig, order: InstanceOrder, image: ami.Image, subnet: str | None, zone: str = ""
) -> dict[str, Any]:
    """RunInstances' own words for an order, in a subnet, or in a zone of the default network."""
    asked: dict[str, Any] = {
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": order.instance,
        "ImageId": image.id,
        "InstanceType": order.instance_type,
        "UserData": order.user_data,
        "InstanceInitiatedShutdownBehavior": "terminate",
        # One hop: to what runs on the machine, and not to containers in a network of their own.
        "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "TagSpecifications": [
            {
                "ResourceType": kind,
                "Tags": [{"Key": name, "Value": value} for name, value in tags(config, order).items()],
            }
            for kind in ("instance", "volume")
        ],
    }
    if image.root_device:
        disk = {"VolumeSize": max(config.disk_gb, image.least_gb), "VolumeType": "gp3", "DeleteOnTermination": True}
        asked["BlockDeviceMappings"] = [{"DeviceName": image.root_device, "Ebs": disk}]
    if zone and not subnet:
        asked["Placement"] = {"AvailabilityZone": zone}
    if order.spot:
        spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        asked["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
    if profile := in_region(config.instance_profile, order.region):
        asked["IamInstanceProfile"] = {"Arn" if profile.startswith("arn:") else "Name": profile}
    if ssh_key := in_region(config.ssh_key, order.region):
        asked["KeyName"] = ssh_key
    groups = list(in_region(config.security_groups, order.region) or ())
    if subnet or not config.public_ip:
        # A public address is a property of an interface, which then has the subnet and the groups too.
        interface: dict[str, Any] = {"DeviceIndex": 0, "AssociatePublicIpAddress": config.public_ip}
        asked["NetworkInterfaces"] = [
            {**interface, **({"SubnetId": subnet} if subnet else {}), **({"Groups": groups} if groups else {})}
        ]
    elif groups:
        asked["SecurityGroupIds"] = groups
    return asked


def tags(config: AwsConfig, order: InstanceOrder) -> dict[str, str]:
    """The configured ones, those by which machines are found again, and what people look for in AWS's console."""
    for_people = {"dstackweb:project": order.project, "dstackweb:run": order.run}
    return {
        "Name": f"dstackweb {order.run}".strip()[:MOST_OF_A_TAG],
        **config.tags,
        **{name: value[:MOST_OF_A_TAG] for name, value in for_people.items() if value},
        instances.DEPLOYMENT_TAG: order.deployment,
        instances.INSTANCE_TAG: order.instance,
    }
