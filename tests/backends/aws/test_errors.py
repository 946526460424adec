"""What AWS and botocore say went wrong, as codes, and as sentences that say what to do."""

from __future__ import annotations

from typing import Any

import pytest
from botocore import exceptions as boto
from django.utils import translation

from dstackweb.backends.aws import errors
from dstackweb.backends.aws.kind import AwsKind
from dstackweb.backends.contract import SourceFailed
from dstackweb.spec.effective import Requirements
from dstackweb.wording import offers as offer_words

USER = "arn:aws:iam::123456789012:user/dstackweb"


def said(code: str, message: str = "", operation: str = "DescribeInstances") -> boto.ClientError:
    return boto.ClientError({"Error": {"Code": code, "Message": message}}, operation)


def explained(error: Exception, region: str = "eu-west-1", service: str = "ec2") -> dict[str, Any]:
    failed = errors.explained(error, service, "DescribeInstances", region)
    assert isinstance(failed, SourceFailed)
    return {"code": failed.code, **failed.data}


@pytest.mark.parametrize(
    "code",
    ["RequestLimitExceeded", "TooManyRequestsException", "Throttling", "ThrottlingException", "EC2ThrottledException"],
)
def test_throttles_are_distinguished_from_other_errors(code: str) -> None:
    assert errors.is_throttle(said(code))
    assert not errors.is_throttle(said("AuthFailure"))
    assert not errors.is_throttle(boto.NoCredentialsError())


def test_a_denial_names_the_identity_and_the_missing_permission() -> None:
    text = f"User: {USER} is not authorized to perform: servicequotas:ListServiceQuotas because no policy allows it"
    problem = explained(said("AccessDeniedException", text, "ListServiceQuotas"), service="service-quotas")
    assert (problem["code"], problem["action"], problem["who"]) == (
        "access_denied",
        "servicequotas:ListServiceQuotas",
        USER,
    )
    assert AwsKind().source_failure(problem) == (
        f"Access denied in eu-west-1: the policy of {USER} lacks servicequotas:ListServiceQuotas. Allow it in IAM."
    )


def test_the_error_of_a_refused_signature_does_not_contain_the_session_token() -> None:
    """AWS quotes the request that it would have signed, headers and all."""
    text = (
        "The request signature we calculated does not match the signature you provided. Check your AWS Secret Access "
        "Key and signing method. Consult the service documentation for details."
    )
    quoted = "'POST\n/\n\nhost:servicequotas.eu-west-1.amazonaws.com\nx-amz-security-token:IQoJb3JpZ2luX2Vj\n'"
    for code in ("InvalidSignatureException", "SignatureDoesNotMatch"):
        error = said(code, f"{text}\n\nThe Canonical String for this request should have been\n{quoted}")
        problem = explained(error, service="service-quotas")
        assert (problem["code"], problem["text"]) == ("bad_credentials", text)


def test_a_password_in_an_address_is_not_in_the_error() -> None:
    """`AWS_ENDPOINT_URL` and proxies come from the server's environment, and may have one."""
    url = "https://gpus:hunter2@proxy.example.org:3128/"
    for error in (boto.EndpointConnectionError(endpoint_url=url), boto.InvalidConfigError(error_msg=f"not {url}")):
        problem = explained(error)
        assert "hunter2" not in str(problem)
        assert "https://proxy.example.org:3128/" in problem["text"]


@pytest.mark.parametrize(
    ("service", "operation", "action"),
    [
        ("ec2", "DescribeInstanceTypes", "ec2:DescribeInstanceTypes"),
        ("service-quotas", "ListServiceQuotas", "servicequotas:ListServiceQuotas"),
        ("pricing", "GetProducts", "pricing:GetProducts"),
        ("ec2", "AssumeRole", "sts:AssumeRole"),
    ],
)
def test_where_aws_names_no_permission_it_follows_from_the_call(service: str, operation: str, action: str) -> None:
    denied = said("UnauthorizedOperation", "You are not authorized to perform this operation.", operation)
    problem = explained(denied, service=service)
    assert problem["action"] == action
    assert (
        AwsKind().source_failure(problem) == f"Access denied in eu-west-1: the policy lacks {action}. Allow it in IAM."
    )


@pytest.mark.parametrize(
    ("error", "region", "code", "words"),
    [
        (said("AuthFailure", "Not valid."), "eu-west-1", "bad_credentials", "AWS rejected the credentials: Not valid."),
        (said("UnrecognizedClientException"), "us-gov-west-1", "bad_credentials", "Set an active access key"),
        (said("ExpiredToken"), "af-south-1", "bad_credentials", "have expired. Sign in again"),
        (said("RequestExpired"), "eu-west-1", "bad_credentials", "Set the clock"),
        (said("AuthFailure"), "af-south-1", "region_disabled", "Region af-south-1 seems not enabled"),
        (said("InvalidClientTokenId"), "ap-east-1", "region_disabled", "Enable it, or remove it"),
        (said("OptInRequired"), "eu-west-1", "region_disabled", "Region eu-west-1 is not enabled in this account."),
        (boto.NoCredentialsError(), "eu-west-1", "no_credentials", "No AWS credentials found"),
        (boto.ProfileNotFound(profile="gpus"), "eu-west-1", "bad_credentials", "(gpus) could not be found"),
        (
            boto.PartialCredentialsError(provider="env", cred_var="AWS_SECRET_ACCESS_KEY"),
            "eu-west-1",
            "bad_credentials",
            "AWS_SECRET_ACCESS_KEY",
        ),
        (
            boto.EndpointConnectionError(endpoint_url="https://ec2.eu-west-9.amazonaws.com/"),
            "eu-west-9",
            "unreachable",
            "https://ec2.eu-west-9.amazonaws.com/ is unreachable",
        ),
        (boto.ReadTimeoutError(endpoint_url="https://x/"), "eu-west-1", "unreachable", "Check the region name"),
        (
            said("InternalError", "Try later."),
            "eu-west-1",
            "service_error",
            "ec2:DescribeInstances failed in eu-west-1: InternalError: Try later.",
        ),
    ],
)
def test_other_failures_have_a_message_with_a_remedy(error: Exception, region: str, code: str, words: str) -> None:
    problem = explained(error, region)
    assert problem["code"] == code
    assert words in AwsKind().source_failure(problem)


def test_an_unexpected_error_is_shown_with_its_text() -> None:
    error = {"code": "service_error", "text": "ZeroDivisionError: division by zero"}
    assert AwsKind().source_failure(error) == "Failed: ZeroDivisionError: division by zero"


def test_a_throttle_error_has_the_time_of_the_next_call() -> None:
    problem = {
        "code": "throttled",
        "until": "2026-11-21T14:02:05+00:00",
        "api": "ec2:DescribeInstances",
        "region": "x-1",
    }
    assert AwsKind().source_failure(problem) == ("ec2:DescribeInstances is throttled in x-1. Retry at 14:02:05 UTC.")


def test_a_wait_for_our_own_rate_limit_is_not_blamed_on_aws() -> None:
    problem = {
        "code": "throttled",
        "until": "2026-11-21T14:02:05+00:00",
        "api": "ec2:X",
        "region": "x-1",
        "by": "limiter",
    }
    assert AwsKind().source_failure(problem).startswith("Rate limit of ec2:X in x-1 reached")


def test_a_code_of_a_newer_server_is_shown_as_it_is() -> None:
    assert offer_words.failure("aws", {"code": "eclipse"}) == "eclipse"
    assert offer_words.failure("aws", {"code": "eclipse", "text": "It is dark."}) == "It is dark."
    assert offer_words.detail_text("aws", {"code": "eclipse"}, Requirements()) == "eclipse"


def test_a_disabled_region_is_not_blamed_on_the_credentials() -> None:
    text = offer_words.failure("aws", {"code": "region_disabled", "region": "ap-east-1"})
    assert text == ("Region ap-east-1 is not enabled in this account. Enable it, or remove it from the backend.")


@pytest.mark.parametrize(
    ("detail", "words"),
    [
        (
            {"code": "quota", "fits": 2, "limit": 64, "used": 48, "needs": 8},
            "Fits 2 more: 48 of 64 vCPUs in use, 8 needed.",
        ),
        (
            {"code": "no_quota", "fits": 0, "limit": 0, "used": 0, "needs": 96},
            "No quota: 0 of 0 vCPUs in use, 96 needed.",
        ),
        ({"code": "quota_unknown", "why": "access_denied"}, "Quota unknown: access denied."),
        (
            {"code": "quota_unknown", "why": "not_documented"},
            "Quota unknown: AWS does not document the quota of this family.",
        ),
        (
            {"code": "not_in_zone", "zones": ["eu-west-1a"], "offered_in": ["eu-west-1b", "eu-west-1c"]},
            "Available in eu-west-1b, eu-west-1c, but the configured subnets are in eu-west-1a.",
        ),
        (
            {"code": "public_url", "why": "missing"},
            "Set DSTACKWEB_PUBLIC_URL so that instances can reach this server.",
        ),
    ],
)
def test_an_offers_availability_is_worded_with_its_numbers(detail: dict[str, Any], words: str) -> None:
    with translation.override("en"):
        assert AwsKind().offer_detail(detail) == words
