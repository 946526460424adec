"""What an admin says of an AWS backend."""

from __future__ import annotations

from typing import Any

import pytest

from dstackweb.backends.aws import config
from dstackweb.lib.errors import Invalid

KEY = "AKIAIOSFODNN7EXAMPLE"
ROLE = "arn:aws:iam::123456789012:role/gpus"


def refusals(said: dict[str, Any]) -> dict[str, str]:
    """Where errors are, and their sentences."""
    with pytest.raises(Invalid) as refused:
        config.settle(said)
    return {".".join(map(str, error["loc"])): error["msg"] for error in refused.value.errors}


def test_regions_are_enough() -> None:
    read = config.read({"regions": ["eu-west-1", "us-gov-east-1", "eu-west-1"]})
    assert read.regions == ("eu-west-1", "us-gov-east-1")
    assert read.credentials == config.CredentialsFields()
    assert read.allows("g5.xlarge")
    assert read.subnets_in("eu-west-1") == ()
    assert read.architectures == ("x86_64",)


@pytest.mark.parametrize(
    ("said", "place", "words"),
    [
        ({}, "regions", "is missing; it should be a list of at least one region"),
        ({"regions": []}, "regions", "should be a list of at least one region, such as eu-west-1, not an empty list"),
        ({"regions": ["Ireland"]}, "regions", "'Ireland' is invalid"),
        ({"regions": ["eu-west-1"], "region": "x"}, "region", "did you mean `regions`?"),
        ({"regions": ["eu-west-1"], "credentials": "mine"}, "credentials", "should be `default`, or a mapping"),
        ({"regions": ["eu-west-1"], "credentials": {"key": 1}}, "credentials.key", "unknown key"),
        (
            {"regions": ["eu-west-1"], "credentials": {"profile": "x", "access_key_id": KEY}},
            "credentials",
            "an access key and a profile exclude each other",
        ),
        ({"regions": ["eu-west-1"], "credentials": {"external_id": "x"}}, "credentials", "requires a role_arn"),
        ({"regions": ["eu-west-1"], "credentials": {"role_arn": "gpus"}}, "credentials.role_arn", "a role's ARN"),
        ({"regions": ["eu-west-1"], "endpoint_url": "localhost:5000"}, "endpoint_url", "should be an http(s) URL"),
        ({"regions": ["eu-west-1"], "families": ["G5!"]}, "families", "'G5!' is invalid"),
        ({"regions": ["eu-west-1"], "instance_types": ["g5"]}, "instance_types", "'g5' is invalid"),
        ({"regions": ["eu-west-1"], "architectures": ["arm"]}, "architectures.0", "x86_64"),
        ({"regions": ["eu-west-1"], "subnets": {"Ireland": "subnet-1"}}, "subnets", "'Ireland' is not a region"),
        ({"regions": ["eu-west-1"], "ami": {"us-east-1": "ami-1"}}, "ami", "us-east-1 is not in `regions`"),
        ({"regions": ["eu-west-1"], "security_groups": []}, "security_groups", "a list of texts is expected"),
        ({"regions": ["eu-west-1"], "tags": {"AWS:team": "x"}}, "tags", "'AWS:team' begins with aws:"),
        ({"regions": ["eu-west-1"], "tags": {"team": "aws:x"}}, "tags", "'aws:x' begins with aws:"),
        ({"regions": ["eu-west-1"], "tags": {f"t{n}": "x" for n in range(46)}}, "tags", "at most 45"),
        ({"regions": ["eu-west-1"], "disk_gb": 4}, "disk_gb", "a whole number from 8 to 16384, not 4"),
    ],
)
def test_each_error_is_reported_at_its_key_with_the_expected_value(
    said: dict[str, Any], place: str, words: str
) -> None:
    assert words in refusals(said)[place]


def test_regional_settings_may_be_given_once_or_per_region() -> None:
    once = config.read({"regions": ["eu-west-1", "us-east-1"], "subnets": "subnet-1"})
    assert once.subnets_in("us-east-1") == ("subnet-1",)
    each = config.read({"regions": ["eu-west-1", "us-east-1"], "subnets": {"eu-west-1": ["subnet-1", "subnet-2"]}})
    assert each.subnets_in("eu-west-1") == ("subnet-1", "subnet-2")
    assert each.subnets_in("us-east-1") == ()


def test_families_and_instance_types_are_allowed_in_addition_to_each_other() -> None:
    read = config.read({"regions": ["eu-west-1"], "families": ["g5"], "instance_types": ["p5.4xlarge"]})
    named = ["g5.xlarge", "p5.4xlarge", "p5.48xlarge", "g5g.xlarge"]
    assert [name for name in named if read.allows(name)] == ["g5.xlarge", "p5.4xlarge"]


def test_the_secret_is_removed_from_the_config_and_stored_encrypted() -> None:
    said = {"regions": ["eu-west-1"], "credentials": {"access_key_id": KEY, "secret_access_key": "hush"}}
    kept, secret = config.settle(said)
    assert kept == {"regions": ["eu-west-1"], "credentials": {"access_key_id": KEY}}
    assert "hush" not in secret
    assert config.secret_of(KEY, secret) == "hush"
    assert said["credentials"] == {"access_key_id": KEY, "secret_access_key": "hush"}


def test_dstacks_words_for_credentials_are_understood() -> None:
    creds = {"type": "access_key", "access_key": KEY, "secret_key": "hush"}
    kept, secret = config.settle({"regions": ["eu-west-1"], "credentials": creds})
    assert (kept["credentials"], config.secret_of(KEY, secret)) == ({"access_key_id": KEY}, "hush")
    assert config.settle({"regions": ["eu-west-1"], "credentials": {"type": "default"}})[1] == ""


def test_an_access_key_given_without_its_secret_keeps_the_stored_secret() -> None:
    said = {"regions": ["eu-west-1"], "credentials": {"access_key_id": KEY, "secret_access_key": "hush"}}
    kept, secret = config.settle(said)
    assert config.settle(kept, secret) == (kept, secret)
    other = {"regions": ["eu-west-1"], "credentials": {"access_key_id": "AKIAOTHER"}}
    with pytest.raises(Invalid, match="is missing: the secret of AKIAOTHER"):
        config.settle(other, secret)


def test_a_secret_without_its_key_is_refused_or_dropped() -> None:
    words = refusals({"regions": ["eu-west-1"], "credentials": {"secret_access_key": "hush"}})
    assert words == {"credentials.secret_access_key": "`credentials.secret_access_key` belongs to an `access_key_id`"}
    _, secret = config.settle(
        {"regions": ["eu-west-1"], "credentials": {"access_key_id": KEY, "secret_access_key": "hush"}}
    )
    assert config.settle({"regions": ["eu-west-1"], "credentials": {"role_arn": ROLE}}, secret)[1] == ""


def test_a_secret_is_in_no_error() -> None:
    for secret in ("hush", 4711, ["hush"]):
        words = refusals(
            {"regions": ["Ireland"], "credentials": {"access_key_id": KEY, "secret_access_key": secret, "x": 1}}
        )
        assert not any("hush" in text or "4711" in text for text in words.values())
