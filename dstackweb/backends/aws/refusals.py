"""What EC2 answers to a launch: which refusals are about this machine, and which say nothing about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from dstackweb.backends.contract import LaunchFailed, LaunchFailure, SourceFailed

CODES: Mapping[str, LaunchFailure] = {
    **dict.fromkeys(
        (
            "InsufficientCapacity",
            "InsufficientCapacityOnHost",
            "InsufficientHostCapacity",
            "InsufficientInstanceCapacity",
            "InsufficientReservedInstanceCapacity",
            "InsufficientVolumeCapacity",
            "ReservationCapacityExceeded",
            "UnfulfillableCapacity",
        ),
        LaunchFailure.NO_CAPACITY,
    ),
    **dict.fromkeys(
        (
            "AddressLimitExceeded",
            "InstanceLimitExceeded",
            "MaxIOPSLimitExceeded",
            "MaxSpotInstanceCountExceeded",
            "NetworkInterfaceLimitExceeded",
            "PrivateIpAddressLimitExceeded",
            "ResourceLimitExceeded",
            "VcpuLimitExceeded",
            "VolumeLimitExceeded",
        ),
        LaunchFailure.QUOTA,
    ),
    **dict.fromkeys(("SpotMaxPriceTooLow",), LaunchFailure.SPOT_PRICE),
    **dict.fromkeys(
        (
            "InvalidAMIAttributeItemValue",
            "InvalidAMIID.Malformed",
            "InvalidAMIID.NotFound",
            "InvalidAMIID.Unavailable",
            "InvalidAMIName.NotFound",
        ),
        LaunchFailure.AMI,
    ),
    **dict.fromkeys(
        (
            "DefaultVpcDoesNotExist",
            "InsufficientAddressCapacity",
            "InsufficientFreeAddressesInSubnet",
            "InvalidGroup.NotFound",
            "InvalidGroupId.Malformed",
            "InvalidSecurityGroupID.NotFound",
            "InvalidSecurityGroupId.Malformed",
            "InvalidSubnet",
            "InvalidSubnetID.Malformed",
            "InvalidSubnetID.NotFound",
            "InvalidVpcID.NotFound",
            "MissingInput",
            "SecurityGroupsPerInstanceLimitExceeded",
            "SecurityGroupsPerInterfaceLimitExceeded",
            "VPCIdNotSpecified",
        ),
        LaunchFailure.NETWORK,
    ),
}
"""EC2's codes (https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html) as those of LaunchFailed.

All others of the kind "the request is wrong" are `refused`, and those of the kind "the service is" say nothing.
"""

OF_THE_ZONE = {
    "Unsupported",
    "VolumeTypeNotAvailableInZone",
    *(code for code, means in CODES.items() if means == LaunchFailure.NO_CAPACITY),
}
OF_THE_SUBNET = {"InsufficientFreeAddressesInSubnet"}
"""Another subnet may do, where there is one: for the former codes one in another zone."""
MADE_ALREADY = {"IdempotentParameterMismatch", "IdempotentInstanceTerminated"}
"""The order was carried out before: its machine is found by its tag."""


_NOT_FOR_PEOPLE = re.compile(r"\s*(?:Encoded authorization failure message|The Canonical String for this request)")
"""What follows are thousands of characters that only AWS can read, or the request with its session token."""


class AwsError(NamedTuple):
    """AWS's own words for why it failed; empty where it gave no answer."""

    code: str
    text: str
    status: int


def said(failed: SourceFailed) -> AwsError:
    """What AWS said that made this failure."""
    response = getattr(failed.__cause__, "response", None) or {}
    told = response.get("Error", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return AwsError(told.get("Code", ""), plain(told.get("Message", "")), int(status))


def plain(text: str) -> str:
    """What AWS said, as far as it is for people."""
    return _NOT_FOR_PEOPLE.split(text, maxsplit=1)[0]


def refusal(failed: SourceFailed) -> LaunchFailed | None:
    """What a failed launch says of the machine that was asked for; None: nothing, so it may be asked for again."""
    answer = said(failed)
    if failed.code == "access_denied":
        return LaunchFailed(LaunchFailure.NOT_ALLOWED, answer.text, action=failed.data["action"])
    if answer.code == "AuthFailure.ServiceLinkedRoleCreationNotPermitted":
        return LaunchFailed(LaunchFailure.NOT_ALLOWED, answer.text, action="iam:CreateServiceLinkedRole")
    if answer.code == "AuthFailure" and "images" in answer.text:
        return LaunchFailed(LaunchFailure.AMI, answer.text)
    if answer.code == "OptInRequired" and "arketplace" in answer.text:
        return LaunchFailed(LaunchFailure.AMI, answer.text)
    if answer.code in CODES:
        return LaunchFailed(CODES[answer.code], answer.text)
    if failed.code == "service_error" and answer.code and answer.status < 500:
        return LaunchFailed(LaunchFailure.REFUSED, f"{answer.code}: {answer.text}")
    return None
