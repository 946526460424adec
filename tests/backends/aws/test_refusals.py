"""What EC2's answers to a launch mean, as it words them."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError, ReadTimeoutError

from dstackweb.backends.aws import errors
from dstackweb.backends.aws.errors import refusal
from dstackweb.backends.contract import LaunchFailed, SourceFailed

REGION = "eu-west-1"


def answered(code: str, text: str = "", status: int = 400, region: str = REGION) -> LaunchFailed | None:
    said = {"Error": {"Code": code, "Message": text}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = ClientError(said, "RunInstances")  # type: ignore[arg-type]
    try:
        raise errors.explained(error, "ec2", "RunInstances", region) from error
    except SourceFailed as failed:
        return refusal(failed)


@pytest.mark.parametrize(
    ("code", "status", "means"),
    [
        ("InsufficientInstanceCapacity", 500, "no_capacity"),
        ("InsufficientHostCapacity", 500, "no_capacity"),
        ("InsufficientAddressCapacity", 500, "network"),
        ("VolumeTypeNotAvailableInZone", 400, "refused"),
        ("VcpuLimitExceeded", 400, "quota"),
        ("MaxSpotInstanceCountExceeded", 400, "quota"),
        ("SpotMaxPriceTooLow", 400, "spot_price"),
        ("InvalidAMIID.Unavailable", 400, "ami"),
        ("InsufficientFreeAddressesInSubnet", 400, "network"),
        ("VPCIdNotSpecified", 400, "network"),
        ("MissingInput", 400, "network"),
        ("Unsupported", 400, "refused"),
        ("InvalidParameterValue", 400, "refused"),
        ("ACodeThatCameLater", 400, "refused"),
    ],
)
def test_a_refusal_of_this_machine_has_a_code(code: str, status: int, means: str) -> None:
    failed = answered(code, "so it is", status)
    assert failed is not None
    assert failed.code == means
    assert "so it is" in failed.text


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("InternalError", 500),
        ("Unavailable", 503),
        ("ServiceUnavailable", 503),
        ("ExpiredToken", 400),
        ("RequestExpired", 400),
        ("InvalidClientTokenId", 403),
    ],
)
def test_errors_that_do_not_concern_the_instance_are_no_refusal(code: str, status: int) -> None:
    assert answered(code, "so it is", status) is None


def test_no_answer_refuses_nothing() -> None:
    error = ReadTimeoutError(endpoint_url="https://ec2")
    assert refusal(errors.explained(error, "ec2", "RunInstances", REGION)) is None


def test_a_missing_permission_is_named_without_the_encoded_message_of_aws() -> None:
    text = (
        "You are not authorized to perform this operation. User: arn:aws:iam::123456789012:user/x is not authorized to "
        "perform: iam:PassRole on resource: arn:aws:iam::123456789012:role/runs"
    )
    failed = answered("UnauthorizedOperation", f"{text}. Encoded authorization failure message: {'x' * 3000}", 403)
    assert failed is not None
    assert (failed.code, failed.data, failed.text) == ("not_allowed", {"action": "iam:PassRole"}, f"{text}.")


def test_the_first_spot_instance_may_need_a_permission_of_its_own() -> None:
    failed = answered("AuthFailure.ServiceLinkedRoleCreationNotPermitted", "The provided credentials do not …", 403)
    assert failed is not None
    assert (failed.code, failed.data) == ("not_allowed", {"action": "iam:CreateServiceLinkedRole"})


@pytest.mark.parametrize("region", [REGION, "me-south-1"])
def test_an_image_that_is_not_shared_is_distinguished_from_bad_credentials(region: str) -> None:
    failed = answered("AuthFailure", "Not authorized for images: [ami-1]", 403, region)
    assert failed is not None
    assert failed.code == "ami"
    assert answered("AuthFailure", "AWS was not able to validate the provided access credentials", 401, region) is None


def test_a_marketplace_image_is_distinguished_from_a_disabled_region() -> None:
    failed = answered("OptInRequired", "In order to use this AWS Marketplace product you need to accept terms", 401)
    assert failed is not None
    assert failed.code == "ami"
    assert answered("OptInRequired", "You are not subscribed to this service", 401) is None
