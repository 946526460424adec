"""The EC2 instances of a deployment: launched once, whatever is lost on the way, listed and terminated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dstackweb.backends.aws import ami, instance_types
from dstackweb.backends.aws.config import AwsConfig, in_region
from dstackweb.backends.aws.errors import (
    ALREADY_LAUNCHED,
    ODD,
    OTHER_SUBNET,
    aws_error,
    is_zonal,
    launch_failure,
    refusal,
)
from dstackweb.backends.contract import (
    CloudInstance,
    InstanceEnd,
    InstanceOrder,
    InstanceState,
    LaunchFailed,
    LaunchFailure,
    NonsenseAnswer,
    SourceFailed,
    SourceFailure,
    nonsense,
)

if TYPE_CHECKING:
    from dstackweb.backends.aws.client import Aws

DEPLOYMENT_TAG = "dstackweb:deployment"
INSTANCE_TAG = "dstackweb:instance"
MAX_TAG = 256
"""Characters in a tag's value."""

STATES: Mapping[str, InstanceState] = {
    "pending": InstanceState.STARTING,
    "running": InstanceState.RUNNING,
    "shutting-down": InstanceState.ENDING,
    "stopping": InstanceState.STOPPED,
    "stopped": InstanceState.STOPPED,
    "terminated": InstanceState.GONE,
}
INTERRUPTED = {"Server.SpotInstanceTermination", "Server.SpotInstanceShutdown"}
"""State reasons of a reclaimed spot instance."""

PAGE = 1000
MAX_IDS = 100
_ID = re.compile(r"\bi-[0-9a-f]+\b")
_UNKNOWN_IDS = {"InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed"}
_PROTECTED = "OperationNotPermitted"
"""One of them has termination protection, and EC2 terminates none in its zone."""


def terminate(aws: Aws, region: str, cloud_ids: Sequence[str]) -> None:
    """Unknown IDs are no error. Raises SourceFailed."""
    wanted = list(dict.fromkeys(cloud_ids))
    for start in range(0, len(wanted), MAX_IDS):
        _terminate(aws, region, wanted[start : start + MAX_IDS])


def launch(aws: Aws, config: AwsConfig, order: InstanceOrder) -> CloudInstance:
    """The order's instance, which an earlier try may have launched. Raises LaunchFailed, SourceFailed.

    EC2 recognizes a repeated order by its token, but only within a zone and with the same parameters. So an instance
    with its tag is looked for before it is repeated: the answer may have been lost, and the settings changed since.
    """
    try:
        launched = None if order.is_new else _find_by_order(aws, order)
        return launched or _run(aws, config, order, ami.of(aws, config, order.region, order.instance_type))
    except SourceFailed as failed:
        refused = refusal(failed)
        if refused is None:
            raise
        if refused.code is LaunchFailure.AMI:
            ami.forget(order.region)  # a published image may be withdrawn
        raise refused from failed


def parameters(
    config: AwsConfig, order: InstanceOrder, image: ami.Image, subnet: str | None, zone: str = ""
) -> dict[str, Any]:
    """The parameters of RunInstances for an order, in a subnet or in a zone of the default VPC."""
    tags = [{"Key": name, "Value": value} for name, value in _tags(config, order).items()]
    params: dict[str, Any] = {
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": order.instance,
        "ImageId": image.id,
        "InstanceType": order.instance_type,
        "UserData": order.user_data,
        "InstanceInitiatedShutdownBehavior": "terminate",
        # One hop: to processes on the instance, and not to containers in a network of their own.
        "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")],
    }
    if image.root_device:
        disk = {"VolumeSize": max(config.disk_gb, image.least_gb), "VolumeType": "gp3", "DeleteOnTermination": True}
        params["BlockDeviceMappings"] = [{"DeviceName": image.root_device, "Ebs": disk}]
    if zone and not subnet:
        params["Placement"] = {"AvailabilityZone": zone}
    if order.spot:
        spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        params["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
    if profile := in_region(config.instance_profile, order.region):
        params["IamInstanceProfile"] = {"Arn" if profile.startswith("arn:") else "Name": profile}
    if ssh_key := in_region(config.ssh_key, order.region):
        params["KeyName"] = ssh_key
    groups = list(in_region(config.security_groups, order.region) or ())
    if subnet or not config.public_ip:
        # A public address is a property of an interface, which then has the subnet and the groups too.
        interface: dict[str, Any] = {"DeviceIndex": 0, "AssociatePublicIpAddress": config.public_ip}
        params["NetworkInterfaces"] = [
            {**interface, **({"SubnetId": subnet} if subnet else {}), **({"Groups": groups} if groups else {})}
        ]
    elif groups:
        params["SecurityGroupIds"] = groups
    return params


def read(instance: Mapping[str, Any], region: str) -> CloudInstance:
    """An instance as EC2 describes it. One whose state can't be read counts as running: nothing follows from that."""
    tags = {tag.get("Key"): tag.get("Value") or "" for tag in instance.get("Tags") or () if tag}
    state = STATES.get((instance.get("State") or {}).get("Name", ""), InstanceState.RUNNING)
    why, text = "", ""
    if state in (InstanceState.STOPPED, InstanceState.ENDING, InstanceState.GONE):
        reason = instance.get("StateReason") or {}
        code, text = reason.get("Code") or "", reason.get("Message") or instance.get("StateTransitionReason") or ""
        why = InstanceEnd.INTERRUPTED if code in INTERRUPTED else InstanceEnd.CLOUD if code else ""
    return CloudInstance(
        instance=tags.get(INSTANCE_TAG, ""),
        cloud_id=instance["InstanceId"],
        region=region,
        state=state,
        zone=(instance.get("Placement") or {}).get("AvailabilityZone") or "",
        address=instance.get("PrivateIpAddress") or "",
        launched_at=instance.get("LaunchTime"),
        why=why,
        text=text,
    )


def _run(aws: Aws, config: AwsConfig, order: InstanceOrder, image: ami.Image) -> CloudInstance:
    """Launch it in the first place that is left. After one without capacity the next is for another call; those that
    don't offer the type at all, or have no address left, are passed over."""
    subnets = config.subnets_in(order.region)
    zones: Mapping[str, str] = {}
    if subnets and (order.zones or order.full_zones):
        zones = instance_types.fetch_subnets(aws, config, order.region)
    places = _places(config, order, zones)
    if not places:
        raise LaunchFailed(LaunchFailure.NETWORK, f"no subnet is in {', '.join(order.zones)}")
    full = set(order.full_zones)
    if all(_zone_of(place, zones) in full for place in places):
        full.clear()  # it is asked for nevertheless
    failures: list[SourceFailed] = []
    for place in places:
        subnet, zone = place
        if _zone_of(place, zones) in full:
            continue
        try:
            return _run_in(aws, order, parameters(config, order, image, subnet, zone), waits=bool(failures))
        except SourceFailed as failed:
            code = aws_error(failed).code
            if not is_zonal(code) and code not in OTHER_SUBNET:
                raise
            failures.append(failed)
            if not is_zonal(code):
                continue
            if len(subnets) > 1 and not zones:
                zones = instance_types.fetch_subnets(aws, config, order.region)
            full.add(_zone_of(place, zones))
            if launch_failure(code) is LaunchFailure.NO_CAPACITY:
                elsewhere = any(_zone_of(candidate, zones) not in full for candidate in places)
                text = aws_error(failed).text
                refused = LaunchFailed(
                    LaunchFailure.NO_CAPACITY, text, zone=_zone_of(place, zones), elsewhere=elsewhere
                )
                raise refused from failed
    # A zone without an address matters more than one without the instance type.
    raise max(failures, key=lambda failed: launch_failure(aws_error(failed).code) is not None)


def _zone_of(place: tuple[str | None, str], zones: Mapping[str, str]) -> str:
    """The zone of a subnet or a zone; empty where EC2 chooses it, or it is not known."""
    subnet, zone = place
    return zone or zones.get(subnet or "", "")


def _places(config: AwsConfig, order: InstanceOrder, zones: Mapping[str, str]) -> list[tuple[str | None, str]]:
    """Subnets and zones to try, in order; None and empty for any. `zones`: those of the subnets."""
    subnets = config.subnets_in(order.region)
    if not order.zones:
        return [(subnet, "") for subnet in subnets] or [(None, "")]
    if not subnets:
        return [(None, zone) for zone in order.zones]
    return [(subnet, zone) for zone in order.zones for subnet in subnets if zones.get(subnet) == zone]


def _run_in(aws: Aws, order: InstanceOrder, params: Mapping[str, Any], *, waits: bool) -> CloudInstance:
    """Launch with these parameters. Unless it `waits`, raise SourceFailed where the rate limit has no turn now."""
    from dstackweb.backends.aws.client import ONCE

    patience = ONCE if waits else replace(ONCE, turn_s=0.0)
    try:
        answer = aws.call("ec2", order.region, "RunInstances", key="Instances", patience=patience, **params)
    except SourceFailed as failed:
        code = aws_error(failed).code
        if code not in ALREADY_LAUNCHED:
            raise
        if (launched := _find_by_order(aws, order)) is not None:
            return launched
        if code == "IdempotentInstanceTerminated":
            raise LaunchFailed(LaunchFailure.REFUSED, "its instance was launched before and has ended") from failed
        # It exists, but is not listed yet: the next try finds it.
        raise SourceFailed(
            SourceFailure.SERVICE_ERROR, api="ec2:RunInstances", region=order.region, text=code
        ) from None
    try:
        return read(answer["Instances"][0], order.region)
    except ODD as error:  # it was launched: the next try finds it by its tag
        raise nonsense("ec2:RunInstances", NonsenseAnswer.ITEMS, region=order.region) from error


def _find_by_order(aws: Aws, order: InstanceOrder) -> CloudInstance | None:
    """The instance of an order; of several, one that is alive."""
    tags = {DEPLOYMENT_TAG: order.deployment, INSTANCE_TAG: order.instance}
    preferred = list(InstanceState)  # GONE is last
    return min(tagged(aws, order.region, tags), key=lambda one: preferred.index(one.state), default=None)


def tagged(aws: Aws, region: str, tags: Mapping[str, str]) -> Iterable[CloudInstance]:
    """Instances with these tags, including those terminated in the last hour. Raises SourceFailed."""
    for instance in described(aws, region, {f"tag:{name}": [value] for name, value in tags.items()}):
        yield read(instance, region)


def described(aws: Aws, region: str, filters: Mapping[str, Sequence[str]]) -> Iterable[dict[str, Any]]:
    """Fetch EC2's instances with these values by filter.

    Raises SourceFailed, also for an instance without an ID: left out, it would count as ended.
    """
    params = {"Filters": [{"Name": name, "Values": values} for name, values in filters.items()], "MaxResults": PAGE}
    for reservation in aws.items("ec2", region, "DescribeInstances", "Reservations", lambda item: item, **params):
        for instance in (reservation or {}).get("Instances") or [None]:
            if instance is None or not instance.get("InstanceId"):
                raise nonsense("ec2:DescribeInstances", NonsenseAnswer.MISSING, region=region, key="InstanceId")
            yield instance


def _tags(config: AwsConfig, order: InstanceOrder) -> dict[str, str]:
    """The configured tags, those that identify the instance, and those for people at the AWS console."""
    for_people = {"dstackweb:project": order.project, "dstackweb:run": order.run}
    return {
        "Name": f"dstackweb {order.run}".strip()[:MAX_TAG],
        **config.tags,
        **{name: value[:MAX_TAG] for name, value in for_people.items() if value},
        DEPLOYMENT_TAG: order.deployment,
        INSTANCE_TAG: order.instance,
    }


def _terminate(aws: Aws, region: str, cloud_ids: list[str]) -> None:
    """Because of one unknown ID EC2 refuses all, so the call is repeated without it. A protected instance must not keep
    the others alive."""
    while cloud_ids:
        try:
            aws.call("ec2", region, "TerminateInstances", key="TerminatingInstances", InstanceIds=cloud_ids)
            return
        except SourceFailed as failed:
            answer = aws_error(failed)
            if answer.code not in {*_UNKNOWN_IDS, _PROTECTED} or (answer.code == _PROTECTED and len(cloud_ids) == 1):
                raise
            unknown = set(_ID.findall(answer.text)) & set(cloud_ids) if answer.code in _UNKNOWN_IDS else set()
            if not unknown:
                return _terminate_each(aws, region, cloud_ids)
            cloud_ids = [cloud_id for cloud_id in cloud_ids if cloud_id not in unknown]


def _terminate_each(aws: Aws, region: str, cloud_ids: list[str]) -> None:
    """One at a time; a failure is raised after the last. A single unknown ID needs no call."""
    failures: list[SourceFailed] = []
    for cloud_id in cloud_ids if len(cloud_ids) > 1 else ():
        try:
            _terminate(aws, region, [cloud_id])
        except SourceFailed as failed:
            if aws_error(failed).code != _PROTECTED:
                raise
            failures.append(failed)
    if failures:
        raise failures[0]
