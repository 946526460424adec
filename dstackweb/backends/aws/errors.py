"""The errors of AWS and botocore as codes that a person can act on, and what they mean for a launch."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from dstackweb.backends.contract import LaunchFailed, LaunchFailure, SourceFailed, SourceFailure

THROTTLED = {
    "BandwidthLimitExceeded", "EC2ThrottledException", "RequestLimitExceeded", "RequestThrottled",
    "RequestThrottledException", "SlowDown", "Throttling", "ThrottlingException", "ThrottledException",
    "TooManyRequestsException",
}  # fmt: skip
DENIED = {"AccessDenied", "AccessDeniedException", "AuthorizationError", "NotAuthorized", "UnauthorizedOperation"}
NOT_ENABLED = {"OptInRequired", "RegionDisabledException", "SubscriptionRequiredException"}
REFUSED_WHERE_NOT_ENABLED = {"AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException"}
BAD_CREDENTIALS = {
    "expired": {"ExpiredToken", "ExpiredTokenException"},
    "clock": {"RequestExpired", "RequestInTheFuture", "RequestTimeTooSkewed"},
    "refused": {
        *REFUSED_WHERE_NOT_ENABLED,
        "IncompleteSignature", "IncompleteSignatureException", "InvalidAccessKeyId", "InvalidSecurity",
        "InvalidSignatureException", "MissingAuthenticationToken", "MissingAuthenticationTokenException",
        "SignatureDoesNotMatch",
    },
}  # fmt: skip
ALWAYS_ENABLED = {
    "ap-northeast-1", "ap-northeast-2", "ap-northeast-3", "ap-south-1", "ap-southeast-1", "ap-southeast-2",
    "ca-central-1", "eu-central-1", "eu-north-1", "eu-west-1", "eu-west-2", "eu-west-3",
    "sa-east-1", "us-east-1", "us-east-2", "us-west-1", "us-west-2",
}  # fmt: skip
"""Regions that no account has to enable. The others refuse valid credentials until they are enabled."""

_NO_CREDENTIALS = {"NoCredentialsError", "NoAuthTokenError"}
_UNUSABLE_CREDENTIALS = {
    "ConfigNotFound", "ConfigParseError", "CredentialRetrievalError", "InvalidConfigError", "LoginError",
    "PartialCredentialsError", "ProfileNotFound", "RefreshWithMFAUnsupportedError", "SSOError", "TokenRetrievalError",
    "UnknownCredentialError",
}  # fmt: skip
_UNREACHABLE = {"ConnectionError", "HTTPClientError"}
"""Classes of botocore by name: whatever reads offers imports this module, and does without botocore's memory."""

LAUNCH_FAILURES = (
    (LaunchFailure.NETWORK, re.compile(
        r"DefaultVpcDoesNotExist|Insufficient(Address|FreeAddresses)\w+|MissingInput|VPCIdNotSpecified"
        r"|Invalid(Group|GroupId|SecurityGroupI[dD]|Subnet|SubnetID|VpcID)(\.\w+)?|SecurityGroups\w+LimitExceeded"
    )),
    (LaunchFailure.NO_CAPACITY, re.compile(
        r"Insufficient\w*Capacity(OnHost)?|ReservationCapacityExceeded|UnfulfillableCapacity"
    )),
    (LaunchFailure.QUOTA, re.compile(
        r"(Address|Instance|MaxIOPS|NetworkInterface|PrivateIpAddress|Resource|Vcpu|Volume)LimitExceeded"
        r"|MaxSpotInstanceCountExceeded"
    )),
    (LaunchFailure.SPOT_PRICE, re.compile(r"SpotMaxPriceTooLow")),
    (LaunchFailure.AMI, re.compile(r"InvalidAMI\w+(\.\w+)?")),
)  # fmt: skip
"""EC2's codes (https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html); the first match counts.

Other errors of the client's kind (4xx) are `refused`. Those of the server's kind say nothing about the instance.
"""

OTHER_SUBNET = {"InsufficientFreeAddressesInSubnet"}
"""Another subnet may have room."""
ALREADY_LAUNCHED = {"IdempotentParameterMismatch", "IdempotentInstanceTerminated"}
"""The order was carried out before: its instance is found by its tag."""

ODD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Exceptions from reading a value that is not as expected."""

IAM_PREFIX = {"service-quotas": "servicequotas"}
_OPERATION_OF_STS = re.compile(r"AssumeRole|GetCallerIdentity")
_ACTION = re.compile(r"not authorized to perform:? ([a-z0-9-]+:\w+)")
_WHO = re.compile(r"(?:User|user): (arn:\S+)")
_PASSWORD = re.compile(r"(?<=://)[^/@\s]*@")
_NOT_FOR_PEOPLE = re.compile(r"\s*(?:Encoded authorization failure message|The Canonical String for this request)")
"""Followed by thousands of characters that only AWS can read, or by the request with its session token."""


class AwsError(NamedTuple):
    """AWS's own error, readable; empty if AWS did not answer."""

    code: str
    text: str
    status: int


def is_throttle(error: Exception) -> bool:
    """Whether AWS throttled the call."""
    return _read(error).code in THROTTLED


def explained(error: Any, service: str, operation: str, region: str) -> SourceFailed:
    """Why `operation` failed, unless it was throttled; `error` is boto3's."""
    classes = {one.__name__ for one in type(error).__mro__}
    if "ClientError" in classes:
        return _refused(_read(error), error.operation_name, service, region)
    text = _PASSWORD.sub("", str(error))  # botocore quotes URLs as they are
    if classes & _NO_CREDENTIALS:
        return SourceFailed(SourceFailure.NO_CREDENTIALS)
    if classes & _UNUSABLE_CREDENTIALS:
        return SourceFailed(SourceFailure.BAD_CREDENTIALS, why="config", region=region, text=text)
    if classes & _UNREACHABLE:
        url = str(error.kwargs.get("endpoint_url") or f"{service}.{region}")
        return SourceFailed(SourceFailure.UNREACHABLE, endpoint=_PASSWORD.sub("", url), region=region, text=text)
    return SourceFailed(SourceFailure.SERVICE_ERROR, api=f"{service}:{operation}", region=region, text=text)


def _refused(error: AwsError, operation: str, service: str, region: str) -> SourceFailed:
    code, text, _ = error
    if _OPERATION_OF_STS.match(operation):
        service = "sts"
    if code in DENIED:
        action, who = _ACTION.search(text), _WHO.search(text)
        derived = f"{IAM_PREFIX.get(service, service)}:{operation}"
        data = {"action": action[1] if action else derived, "who": who[1] if who else "", "text": text}
        return SourceFailed(SourceFailure.ACCESS_DENIED, region=region, **data)
    if code in NOT_ENABLED:
        return SourceFailed(SourceFailure.REGION_DISABLED, region=region, sure=True)
    is_optional = region not in ALWAYS_ENABLED and not region.startswith(("cn-", "us-gov-"))
    if code in REFUSED_WHERE_NOT_ENABLED and is_optional:
        return SourceFailed(SourceFailure.REGION_DISABLED, region=region, sure=False)
    for why, codes in BAD_CREDENTIALS.items():
        if code in codes:
            return SourceFailed(SourceFailure.BAD_CREDENTIALS, why=why, region=region, text=text)
    return SourceFailed(
        SourceFailure.SERVICE_ERROR, api=f"{service}:{operation}", region=region, text=f"{code}: {text}"
    )


def aws_error(failed: SourceFailed) -> AwsError:
    return _read(failed.__cause__)


def _read(error: BaseException | None) -> AwsError:
    response = getattr(error, "response", None) or {}
    body = response.get("Error", {})
    text = _NOT_FOR_PEOPLE.split(body.get("Message", ""), maxsplit=1)[0]
    return AwsError(body.get("Code", ""), text, int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)))


def launch_failure(code: str) -> LaunchFailure | None:
    """The meaning of EC2's code for a launch; None for a code without a special one."""
    return next((failure for failure, codes in LAUNCH_FAILURES if codes.fullmatch(code)), None)


def is_zonal(code: str) -> bool:
    """Whether a subnet in another zone may have the instance."""
    in_zone = code in ("Unsupported", "VolumeTypeNotAvailableInZone")
    return in_zone or launch_failure(code) is LaunchFailure.NO_CAPACITY


def refusal(failed: SourceFailed) -> LaunchFailed | None:
    """What a failed launch says about the instance; None: nothing, so the launch may be repeated."""
    code, text, status = aws_error(failed)
    if failed.code == SourceFailure.ACCESS_DENIED:
        return LaunchFailed(LaunchFailure.NOT_ALLOWED, text, action=failed.data["action"])
    if code == "AuthFailure.ServiceLinkedRoleCreationNotPermitted":
        return LaunchFailed(LaunchFailure.NOT_ALLOWED, text, action="iam:CreateServiceLinkedRole")
    if (code == "AuthFailure" and "images" in text) or (code == "OptInRequired" and "arketplace" in text):
        return LaunchFailed(LaunchFailure.AMI, text)
    if (failure := launch_failure(code)) is not None:
        return LaunchFailed(failure, text)
    if failed.code == SourceFailure.SERVICE_ERROR and code and status < 500:
        return LaunchFailed(LaunchFailure.REFUSED, f"{code}: {text}")
    return None
