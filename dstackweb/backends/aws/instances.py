"""EC2's instances as machines: those of a deployment, one that an order made, and their ends."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dstackweb.backends.aws.refusals import said
from dstackweb.backends.contract import CloudInstance, InstanceEnd, InstanceState, SourceFailed

if TYPE_CHECKING:
    from dstackweb.backends.aws.client import Aws

DEPLOYMENT_TAG = "dstackweb:deployment"
INSTANCE_TAG = "dstackweb:instance"

STATES: Mapping[str, InstanceState] = {
    "pending": InstanceState.STARTING,
    "running": InstanceState.RUNNING,
    "shutting-down": InstanceState.ENDING,
    "stopping": InstanceState.STOPPED,
    "stopped": InstanceState.STOPPED,
    "terminated": InstanceState.GONE,
}
INTERRUPTED = {"Server.SpotInstanceTermination", "Server.SpotInstanceShutdown"}
"""State reasons of a spot instance that AWS took back."""

PAGE = 1000
MOST_IDS = 100
_ID = re.compile(r"\bi-[0-9a-f]+\b")
_UNKNOWN_IDS = {"InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed"}
_PROTECTED = "OperationNotPermitted"
"""Somebody forbade the end of one of them, and EC2 then ends none in its zone."""


def find_by_deployment(aws: Aws, region: str, deployment: str) -> list[CloudInstance]:
    """Those that carry the deployment's tag, for about an hour also those that were terminated. Raises SourceFailed."""
    return list(_tagged(aws, region, {DEPLOYMENT_TAG: deployment}))


def find_by_order(aws: Aws, region: str, deployment: str, instance: str) -> CloudInstance | None:
    """The machine that an order made: of several, one that lives. Raises SourceFailed."""
    found = list(_tagged(aws, region, {DEPLOYMENT_TAG: deployment, INSTANCE_TAG: instance}))
    order = list(InstanceState)
    return min(
        found, key=lambda machine: (machine.state == InstanceState.GONE, order.index(machine.state)), default=None
    )


def terminate(aws: Aws, region: str, cloud_ids: Sequence[str]) -> None:
    """Those that aren't there are no error. Raises SourceFailed."""
    wanted = list(dict.fromkeys(cloud_ids))
    for start in range(0, len(wanted), MOST_IDS):
        _terminate(aws, region, wanted[start : start + MOST_IDS])


def read(described: Mapping[str, Any], region: str) -> CloudInstance:
    """What EC2 says of an instance."""
    tags = {tag["Key"]: tag["Value"] for tag in described.get("Tags", ())}
    state = STATES.get(described["State"]["Name"], InstanceState.RUNNING)
    why, text = "", ""
    if state in (InstanceState.STOPPED, InstanceState.ENDING, InstanceState.GONE):
        reason = described.get("StateReason") or {}
        code, text = reason.get("Code", ""), reason.get("Message", "") or described.get("StateTransitionReason", "")
        why = InstanceEnd.INTERRUPTED if code in INTERRUPTED else InstanceEnd.CLOUD if code else ""
    return CloudInstance(
        instance=tags.get(INSTANCE_TAG, ""),
        cloud_id=described["InstanceId"],
        region=region,
        state=state,
        zone=described.get("Placement", {}).get("AvailabilityZone", ""),
        address=described.get("PrivateIpAddress", ""),
        launched_at=described.get("LaunchTime"),
        why=why,
        text=text,
    )


def _tagged(aws: Aws, region: str, tags: Mapping[str, str]) -> Iterable[CloudInstance]:
    filters = [{"Name": f"tag:{name}", "Values": [value]} for name, value in tags.items()]
    for page in aws.pages("ec2", region, "DescribeInstances", Filters=filters, MaxResults=PAGE):
        for reservation in page.get("Reservations", ()):
            for described in reservation.get("Instances", ()):
                yield read(described, region)


def _terminate(aws: Aws, region: str, cloud_ids: list[str]) -> None:
    """One unknown ID makes EC2 refuse all of them, so that they are asked again without it. One that may not be ended
    keeps no other alive."""
    while cloud_ids:
        try:
            aws.call("ec2", region, "TerminateInstances", InstanceIds=cloud_ids)
        except SourceFailed as failed:
            answer = said(failed)
            if answer.code == _PROTECTED and len(cloud_ids) > 1:
                _each(aws, region, cloud_ids)
                return
            if answer.code not in _UNKNOWN_IDS:
                raise
            unknown = set(_ID.findall(answer.text)) & set(cloud_ids)
            if not unknown:
                if len(cloud_ids) > 1:
                    _each(aws, region, cloud_ids)
                return
            cloud_ids = [cloud_id for cloud_id in cloud_ids if cloud_id not in unknown]
        else:
            return


def _each(aws: Aws, region: str, cloud_ids: list[str]) -> None:
    """One after the other; what failed is told after the last."""
    failures: list[SourceFailed] = []
    for cloud_id in cloud_ids:
        try:
            _terminate(aws, region, [cloud_id])
        except SourceFailed as failed:
            if said(failed).code != _PROTECTED:
                raise
            failures.append(failed)
    if failures:
        raise failures[0]
