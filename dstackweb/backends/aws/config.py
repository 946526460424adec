"""The settings of an AWS backend. `Backend.config` has no secret, `Backend.secret` is encrypted."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from django.utils.translation import gettext, gettext_noop as _
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from dstackweb.backends.kinds import validated
from dstackweb.lib.errors import Invalid
from dstackweb.lib.secrets import decrypt, encrypt
from dstackweb.spec.fields import Keys, Names, Text, key, optional

T = TypeVar("T")
EVERY_REGION = "*"
MAX_TAGS = 45
"""EC2 allows 50; up to five are dstackweb's."""
_REGION = re.compile(r"[a-z]{2,4}(-[a-z]+)+-[0-9]{1,2}")
_FAMILY = re.compile(r"[a-z][a-z0-9-]*")
_INSTANCE_TYPE = re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[\w+=,.@/-]+")
_KEY_ID = re.compile(r"[A-Za-z0-9_]{8,128}")

_DSTACK_NAMES = {"access_key": "access_key_id", "secret_key": "secret_access_key"}


def _like(pattern: re.Pattern[str]) -> AfterValidator:
    """For a text, and for several."""

    def check(value: Any) -> Any:
        texts = [value] if isinstance(value, str) else value
        if wrong := [text[:80] for text in texts if not pattern.fullmatch(text)]:
            raise ValueError(gettext("%(values)s is invalid") % {"values": ", ".join(map(repr, wrong))})
        return value

    return AfterValidator(check)


def _url(text: str) -> str:
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise ValueError(gettext("it contains a user name or a password"))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(gettext("%(text)s is invalid") % {"text": repr(text[:80])})
    return text.rstrip("/")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(gettext("text is expected"))
    return value


def _texts(value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not listed:
        raise ValueError(gettext("text or a list of texts is expected"))
    return tuple(dict.fromkeys(_text(item) for item in listed))


def _by_region(read: Callable[[Any], Any]) -> BeforeValidator:
    """Reads one value for all regions, or a mapping from regions."""

    def by_region(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {EVERY_REGION: read(value)}
        if wrong := [name for name in value if not _REGION.fullmatch(str(name)) and name != EVERY_REGION]:
            raise ValueError(gettext("%(wrong)s is not a region") % {"wrong": repr(str(wrong[0])[:80])})
        return {region: read(item) for region, item in value.items()}

    return BeforeValidator(by_region)


def _tags(tags: dict[str, str]) -> dict[str, str]:
    """EC2's rules: it would refuse each launch otherwise."""
    if wrong := [text for text in (*tags, *tags.values()) if text.lower().startswith("aws:")]:
        raise ValueError(gettext("%(wrong)s begins with aws:, which AWS reserves") % {"wrong": repr(wrong[0][:80])})
    if len(tags) > MAX_TAGS:
        raise ValueError(gettext("at most %(max_tags)s are allowed") % {"max_tags": MAX_TAGS})
    return tags


TextByRegion = Annotated[dict[str, str], _by_region(_text)]
TextsByRegion = Annotated[dict[str, tuple[str, ...]], _by_region(_texts)]


class CredentialsFields(Keys):
    """How to sign in: boto3's default chain unless a key or a profile is set; then, optionally, as a role."""

    # Titles of nested settings are marked: `make messages` finds those of a kind's own ones alone.

    access_key_id: Annotated[Text, _like(_KEY_ID)] | None = optional(
        _("the ID of an access key, such as AKIAIOSFODNN7EXAMPLE"),
        _("In the AWS console: IAM, Users, the user for dstackweb, Security credentials, Create access key."),
        title=_("Access key ID"),
    )
    profile: Text | None = optional(
        _("the name of an AWS profile"),
        _("Profile name in ~/.aws/config or ~/.aws/credentials of the user who runs the server."),
    )
    role_arn: Annotated[Text, _like(_ROLE)] | None = optional(
        _("a role's ARN, such as arn:aws:iam::123456789012:role/dstackweb"),
        _("Only to act as a role, for example in another account."),
        title=_("Role to assume"),
    )
    external_id: Text | None = optional(
        _("text"), _("Only if the role's trust policy requires one."), title=_("External ID")
    )

    @model_validator(mode="after")
    def _one_way(self) -> CredentialsFields:
        if self.access_key_id and self.profile:
            raise ValueError(gettext("an access key and a profile exclude each other"))
        if self.external_id and not self.role_arn:
            raise ValueError(gettext("external_id requires a role_arn"))
        return self


class AwsConfig(Keys):
    """An AWS account as a backend; the admin form shows titles and descriptions. Values by region are one for all
    regions, or a mapping from regions."""

    regions: Annotated[Names, _like(_REGION)] = key(
        _("a list of at least one region, such as eu-west-1"),
        _("Where runs may start. Prices, quotas and GPUs differ by region; start with two or three near you."),
    )
    credentials: CredentialsFields = key(
        _("`default`, or a mapping with access_key_id and secret_access_key, or a profile, and maybe role_arn"),
        _("Sign in with"),
        default=CredentialsFields(),
    )
    families: Annotated[Names, _like(_FAMILY)] | None = optional(
        _("a list of families, such as g5 and p4d"), _("Offer only these, such as g5, g6, p5. Empty: all.")
    )
    instance_types: Annotated[Names, _like(_INSTANCE_TYPE)] | None = optional(
        _("a list of instance types, such as g5.xlarge"),
        _("Offer these in addition to the families, such as g5.xlarge. Empty: all."),
    )
    architectures: Annotated[tuple[Literal["x86_64", "arm64"], ...], Field(min_length=1)] = key(
        _("a list of x86_64, arm64 or both"),
        _(
            "x86_64 is Intel and AMD, arm64 is Graviton. Run files cannot choose a processor, and few programs run on "
            "both. Choose one."
        ),
        title="Processors",
        default=("x86_64",),
    )
    subnets: TextsByRegion = key(
        _("a subnet's ID, a list of them, or a mapping from regions to these"),
        _("Subnet IDs. Empty: the default VPC's subnets."),
        default={},
    )
    security_groups: TextsByRegion = key(
        _("a security group's ID, a list of them, or a mapping from regions to these"),
        _(
            "Group IDs. Empty: the VPC's default group. Instances need only outgoing HTTPS to this server. For runs "
            "with several nodes, members of the group must reach each other."
        ),
        default={},
    )
    instance_profile: TextByRegion = key(
        _("an instance profile's name or ARN, or a mapping from regions to these"),
        _("Name or ARN of the instance profile for runs, for example to read a bucket. Empty: none."),
        default={},
    )
    ami: TextByRegion = key(
        _("an AMI's ID, or a mapping from regions to these"),
        _("Image ID. It needs Python 3.9 or later, and the NVIDIA driver for GPUs. Empty: an AWS image."),
        title="AMI",
        default={},
    )
    ssh_key: TextByRegion = key(
        _("a key pair's name, or a mapping from regions to these"),
        _("Name of the key pair for SSH login. Empty: no login."),
        title="SSH key pair",
        default={},
    )
    public_ip: bool = key(
        _("true or false"),
        _("Without one, subnets need a NAT gateway so that instances can reach this server."),
        title="Instances get a public IP address",
        default=True,
    )
    disk_gb: Annotated[int, Field(strict=True, ge=8, le=16384)] = key(
        _("a whole number from 8 to 16384"),
        _("Per instance. Deleted with the instance."),
        title="Disk in GB",
        default=100,
    )
    tags: Annotated[
        dict[Annotated[str, Field(min_length=1, max_length=128)], Annotated[str, Field(max_length=256)]],
        AfterValidator(_tags),
    ] = key(
        _("a mapping from names to texts"),
        _("One name=value per line, for every instance and disk, for example for cost reports."),
        default={},
    )
    containers: bool = key(
        _("true or false"),
        _(
            "With Docker from the image, else with the distribution's package, which is installed for the first run "
            "that needs it. For GPUs the image needs NVIDIA's container toolkit, as AWS's have it."
        ),
        title="Instances run container images",
        default=True,
    )
    allow_private_url: bool = key(
        _("true or false"),
        _("Only if a VPN or peering connects the subnets to this server."),
        title="Instances can reach a private DSTACKWEB_PUBLIC_URL",
        default=False,
    )
    endpoint_url: Annotated[str, AfterValidator(_url)] | None = optional(
        _("an http(s) URL"), _("An AWS-compatible endpoint for tests. Empty: AWS."), title="Endpoint URL"
    )

    @model_validator(mode="before")
    @classmethod
    def _plain_default(cls, data: Any) -> Any:
        return {**data, "credentials": {}} if isinstance(data, dict) and data.get("credentials") == "default" else data

    @field_validator("subnets", "security_groups", "instance_profile", "ami", "ssh_key")
    @classmethod
    def _of_its_regions(cls, found: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        regions = info.data.get("regions")
        if regions and (others := sorted(set(found) - {EVERY_REGION, *regions})):
            raise ValueError(gettext("%(others)s is not in `regions`") % {"others": ", ".join(others)})
        return found

    def subnets_in(self, region: str) -> tuple[str, ...]:
        """The subnets to launch in; none: those of the default VPC."""
        return in_region(self.subnets, region) or ()

    def allows(self, instance_type: str) -> bool:
        """Whether an instance type may be offered: any, unless families or types are set."""
        if self.families is None and self.instance_types is None:
            return True
        family = instance_type.partition(".")[0]
        return family in (self.families or ()) or instance_type in (self.instance_types or ())


def in_region(values: Mapping[str, T], region: str) -> T | None:
    return values.get(region, values.get(EVERY_REGION))


@functools.cache
def region_names() -> Mapping[str, str]:
    """AWS's regions by code, with names such as Europe (Ireland); those of China and GovCloud are missing.

    From botocore's data, without importing botocore: the web server saves its memory.
    """
    botocore = importlib.util.find_spec("botocore")
    assert botocore is not None
    assert botocore.origin is not None
    partitions = json.loads((Path(botocore.origin).parent / "data/partitions.json").read_text())["partitions"]
    found = partitions[0]["regions"].items()
    return {code: about["description"] for code, about in sorted(found) if _REGION.fullmatch(code)}


def read(config: Mapping[str, Any]) -> AwsConfig:
    """A stored config, which has no secret. Raises Invalid."""
    return validated(AwsConfig, config)


def settle(given: Mapping[str, Any], stored: str = "") -> tuple[dict[str, Any], str]:
    """The config to store, and its encrypted secret. Raises Invalid.

    An access key without its secret keeps the one `stored` for the same key.
    """
    config, secret = dict(given), None
    if isinstance(config.get("credentials"), dict):
        credentials = {_DSTACK_NAMES.get(name, name): value for name, value in config["credentials"].items()}
        if credentials.get("type") in ("default", "access_key"):
            del credentials["type"]
        secret = credentials.pop("secret_access_key", None)
        config["credentials"] = credentials
    key_id = read(config).credentials.access_key_id

    def wrong(msg: str) -> Invalid:
        return Invalid.at("credentials", "secret_access_key", msg=msg)

    if secret is not None and (not isinstance(secret, str) or not secret.strip()):
        raise wrong(gettext("`credentials.secret_access_key` should be text"))
    if key_id is None:
        if secret is not None:
            raise wrong(gettext("`credentials.secret_access_key` belongs to an `access_key_id`"))
        return config, ""
    if secret is not None:
        return config, encrypt(json.dumps({key_id: secret.strip()}))
    if not secret_of(key_id, stored):
        msg = gettext(
            "`credentials.secret_access_key` is missing: the secret of %(key)s, which AWS shows once, when the key is "
            "created"
        )
        raise wrong(msg % {"key": key_id})
    return config, stored


def secret_of(key_id: str, stored: str) -> str:
    """The secret of an access key; empty if it is not stored. Raises DomainError if it can't be decrypted."""
    return str(json.loads(decrypt(stored)).get(key_id, "")) if stored else ""
