"""What AWS and botocore say went wrong, as codes that a person can act on."""

from __future__ import annotations

import re

from botocore import exceptions as boto

from dstackweb.backends.aws.refusals import plain
from dstackweb.backends.contract import SourceFailed

THROTTLED = {
    "BandwidthLimitExceeded",
    "EC2ThrottledException",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestThrottledException",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "ThrottledException",
    "TooManyRequestsException",
}
DENIED = {"AccessDenied", "AccessDeniedException", "AuthorizationError", "NotAuthorized", "UnauthorizedOperation"}
EXPIRED = {"ExpiredToken", "ExpiredTokenException"}
CLOCK = {"RequestExpired", "RequestInTheFuture", "RequestTimeTooSkewed"}
REFUSED = {
    "AuthFailure",
    "IncompleteSignature",
    "IncompleteSignatureException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidSecurity",
    "InvalidSignatureException",
    "MissingAuthenticationToken",
    "MissingAuthenticationTokenException",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
NOT_ENABLED = {"OptInRequired", "RegionDisabledException", "SubscriptionRequiredException"}
REFUSED_WHERE_NOT_ENABLED = {"AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException"}

ALWAYS_ENABLED = {
    "ap-northeast-1", "ap-northeast-2", "ap-northeast-3", "ap-south-1", "ap-southeast-1", "ap-southeast-2",
    "ca-central-1", "eu-central-1", "eu-north-1", "eu-west-1", "eu-west-2", "eu-west-3",
    "sa-east-1", "us-east-1", "us-east-2", "us-west-1", "us-west-2",
}  # fmt: skip
"""Regions that no account has to enable. Elsewhere valid credentials are refused until it is done."""

IAM_PREFIX = {"service-quotas": "servicequotas"}
_OPERATION_OF_STS = re.compile(r"AssumeRole|GetCallerIdentity")
_ACTION = re.compile(r"not authorized to perform:? ([a-z0-9-]+:\w+)")
_PASSWORD = re.compile(r"(?<=://)[^/@\s]*@")
_WHO = re.compile(r"(?:User|user): (arn:\S+)")

_NO_CREDENTIALS = (boto.NoCredentialsError, boto.NoAuthTokenError)
_BAD_CREDENTIALS = (
    boto.ConfigNotFound,
    boto.ConfigParseError,
    boto.CredentialRetrievalError,
    boto.InvalidConfigError,
    boto.LoginError,
    boto.PartialCredentialsError,
    boto.ProfileNotFound,
    boto.RefreshWithMFAUnsupportedError,
    boto.SSOError,
    boto.TokenRetrievalError,
    boto.UnknownCredentialError,
)


def throttle(error: Exception) -> str | None:
    """AWS's code, where it says that it is asked too often."""
    code = error.response.get("Error", {}).get("Code", "") if isinstance(error, boto.ClientError) else ""
    return code if code in THROTTLED else None


def explained(error: Exception, service: str, operation: str, region: str) -> SourceFailed:
    """Why `operation` failed, unless it was throttled."""
    text = _without_passwords(str(error))
    if isinstance(error, boto.ClientError):
        return _said(error, service, region)
    if isinstance(error, _NO_CREDENTIALS):
        return SourceFailed("no_credentials")
    if isinstance(error, _BAD_CREDENTIALS):
        return SourceFailed("bad_credentials", why="config", region=region, text=text)
    if isinstance(error, boto.ConnectionError | boto.HTTPClientError):
        url = error.kwargs.get("endpoint_url") or f"{service}.{region}"
        return SourceFailed("unreachable", endpoint=_without_passwords(str(url)), region=region, text=text)
    return SourceFailed("service_error", api=f"{service}:{operation}", region=region, text=text)


def _said(error: boto.ClientError, service: str, region: str) -> SourceFailed:
    said = error.response.get("Error", {})
    code, text = said.get("Code", ""), plain(said.get("Message", ""))
    if _OPERATION_OF_STS.match(error.operation_name):
        service = "sts"
    if code in DENIED:
        action = _ACTION.search(text)
        who = _WHO.search(text)
        derived = f"{IAM_PREFIX.get(service, service)}:{error.operation_name}"
        data = {"action": action[1] if action else derived, "who": who[1] if who else "", "text": text}
        return SourceFailed("access_denied", region=region, **data)
    if code in NOT_ENABLED:
        return SourceFailed("region_disabled", region=region, sure=True)
    if code in REFUSED_WHERE_NOT_ENABLED and _must_be_enabled(region):
        return SourceFailed("region_disabled", region=region, sure=False)
    for why, codes in (("expired", EXPIRED), ("clock", CLOCK), ("refused", REFUSED)):
        if code in codes:
            return SourceFailed("bad_credentials", why=why, region=region, text=text)
    return SourceFailed("service_error", api=f"{service}:{error.operation_name}", region=region, text=f"{code}: {text}")


def _without_passwords(text: str) -> str:
    """What botocore says, which quotes URLs as they are."""
    return _PASSWORD.sub("", text)


def _must_be_enabled(region: str) -> bool:
    return region not in ALWAYS_ENABLED and not region.startswith(("cn-", "us-gov-"))
