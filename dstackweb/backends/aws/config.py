"""What an admin says of an AWS backend: checked, with each error at its place, and its secret kept apart.

`Backend.config` holds what was said without the secret, `Backend.secret` the secret, encrypted.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from dstackweb.lib.errors import Invalid
from dstackweb.lib.secrets import decrypt, encrypt
from dstackweb.spec.fields import Keys, Names, Text, key
from dstackweb.spec.source import Source
from dstackweb.spec.wording import field_errors

Said = TypeVar("Said")
EVERY_REGION = "*"
MOST_TAGS = 45
"""EC2 takes 50; up to five are dstackweb's."""
_REGION = re.compile(r"[a-z]{2,4}(-[a-z]+)+-[0-9]{1,2}")
_FAMILY = re.compile(r"[a-z][a-z0-9-]*")
_INSTANCE_TYPE = re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[\w+=,.@/-]+")
_KEY_ID = re.compile(r"[A-Za-z0-9_]{8,128}")

_IN_DSTACKS_WORDS = {"access_key": "access_key_id", "secret_key": "secret_access_key"}


def _like(pattern: re.Pattern[str]) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"{text[:80]!r} is none")
        return text

    return AfterValidator(check)


def _all_like(pattern: re.Pattern[str]) -> AfterValidator:
    def check(texts: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [text[:80] for text in texts if not pattern.fullmatch(text)]:
            raise ValueError(f"{', '.join(map(repr, wrong))} is none")
        return texts

    return AfterValidator(check)


def _url(text: str) -> str:
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise ValueError("this one has a name or a password in it")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text[:80]!r} is none")
    return text.rstrip("/")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("text is expected")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not listed:
        raise ValueError("text or a list of texts is expected")
    return tuple(dict.fromkeys(_text(item) for item in listed))


def _by_region(read: Callable[[Any], Any]) -> BeforeValidator:
    """Reads what is said once for all regions, or as a mapping from regions."""

    def by_region(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {EVERY_REGION: read(value)}
        if wrong := [name for name in value if not _REGION.fullmatch(str(name)) and name != EVERY_REGION]:
            raise ValueError(f"{str(wrong[0])[:80]!r} is no region")
        return {region: read(item) for region, item in value.items()}

    return BeforeValidator(by_region)


def _tags(tags: dict[str, str]) -> dict[str, str]:
    """As EC2 takes them, which would refuse each launch otherwise."""
    if wrong := [text for text in (*tags, *tags.values()) if text.lower().startswith("aws:")]:
        raise ValueError(f"{wrong[0][:80]!r} begins with aws:, which is AWS's own")
    if len(tags) > MOST_TAGS:
        raise ValueError(f"at most {MOST_TAGS} are allowed")
    return tags


TextByRegion = Annotated[dict[str, str], _by_region(_text)]
TextsByRegion = Annotated[dict[str, tuple[str, ...]], _by_region(_texts)]


class CredentialsFields(Keys):
    """As whom AWS is asked: boto3's default chain, unless something is said; then, maybe, as a role."""

    access_key_id: Annotated[Text, _like(_KEY_ID)] | None = key(
        "the ID of an access key, such as AKIAIOSFODNN7EXAMPLE", "an access key's ID", default=None
    )
    profile: Text | None = key("a profile's name", "a profile of boto3's configuration files", default=None)
    role_arn: Annotated[Text, _like(_ROLE)] | None = key(
        "a role's ARN, such as arn:aws:iam::123456789012:role/dstackweb", "the role to assume", default=None
    )
    external_id: Text | None = key("text", "what the role's trust policy asks for", default=None)

    @model_validator(mode="after")
    def _one_way(self) -> CredentialsFields:
        if self.access_key_id and self.profile:
            raise ValueError("an access key and a profile exclude each other")
        if self.external_id and not self.role_arn:
            raise ValueError("external_id belongs to a role_arn")
        return self


class AwsConfig(Keys):
    """An AWS account as a backend. What is said by region is for all regions, or a mapping from regions."""

    regions: Annotated[Names, _all_like(_REGION)] = key(
        "a list of at least one region, such as eu-west-1", "where offers are looked for"
    )
    credentials: CredentialsFields = key(
        "`default`, or a mapping with an access_key_id and its secret_access_key, or a profile; and maybe a role_arn",
        "as whom AWS is asked",
        default=CredentialsFields(),
    )
    endpoint_url: Annotated[str, AfterValidator(_url)] | None = key(
        "an http(s) URL", "what stands in for AWS, for all its services", default=None
    )
    families: Annotated[Names, _all_like(_FAMILY)] | None = key(
        "a list of families, such as g5 and p4d", "the only families of instance types to offer", default=None
    )
    instance_types: Annotated[Names, _all_like(_INSTANCE_TYPE)] | None = key(
        "a list of instance types, such as g5.xlarge", "the only instance types to offer", default=None
    )
    architectures: Annotated[tuple[Literal["x86_64", "arm64"], ...], Field(min_length=1)] = key(
        "a list of x86_64, arm64 or both",
        "processors to offer; a run file can't ask for one, and few programs run on both",
        default=("x86_64",),
    )
    subnets: TextsByRegion = key(
        "a subnet's ID, a list of them, or a mapping from regions to these", "where instances start", default={}
    )
    security_groups: TextsByRegion = key(
        "a security group's ID, a list of them, or a mapping from regions to these", "what guards them", default={}
    )
    instance_profile: TextByRegion = key(
        "an instance profile's name or ARN, or a mapping from regions to these", "what instances may do", default={}
    )
    ami: TextByRegion = key("an AMI's ID, or a mapping from regions to these", "what instances start from", default={})
    ssh_key: TextByRegion = key(
        "a key pair's name, or a mapping from regions to these", "who may log in to instances", default={}
    )
    public_ip: bool = key("true or false", "whether instances get a public address", default=True)
    disk_gb: Annotated[int, Field(strict=True, ge=8, le=16384)] = key(
        "a whole number from 8 to 16384", "size of an instance's disk", default=100
    )
    tags: Annotated[
        dict[Annotated[str, Field(min_length=1, max_length=128)], Annotated[str, Field(max_length=256)]],
        AfterValidator(_tags),
    ] = key("a mapping from names to texts", "tags of all that is started", default={})
    allow_private_url: bool = key(
        "true or false",
        "whether instances reach a DSTACKWEB_PUBLIC_URL that is private, or this machine's own",
        default=False,
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
            raise ValueError(f"it names {', '.join(others)}, which `regions` doesn't have")
        return found

    def subnets_in(self, region: str) -> tuple[str, ...]:
        """The subnets to start in; none: those of the default VPC."""
        return in_region(self.subnets, region) or ()

    def allows(self, instance_type: str) -> bool:
        """Whether an instance type may be offered. Without a word about it, any may."""
        if self.families is None and self.instance_types is None:
            return True
        family = instance_type.partition(".")[0]
        return family in (self.families or ()) or instance_type in (self.instance_types or ())


def in_region(said: Mapping[str, Said], region: str) -> Said | None:
    """What is said for a region, or for all of them."""
    return said.get(region, said.get(EVERY_REGION))


def read(config: Mapping[str, Any]) -> AwsConfig:
    """A backend's config, which has no secret. Raises Invalid."""
    try:
        return AwsConfig.model_validate(dict(config))
    except ValidationError as error:
        errors = field_errors(error, AwsConfig, Source(dict(config)))
        raise Invalid(errors[0]["msg"], errors) from None


def settle(said: Mapping[str, Any], kept: str = "") -> tuple[dict[str, Any], str]:
    """What to keep of what an admin said: the config, and its secret, encrypted. Raises Invalid.

    An access key whose secret isn't said keeps the one that was `kept` for that same key.
    """
    config = copy.deepcopy(dict(said))
    credentials = config.get("credentials")
    secret = None
    if isinstance(credentials, dict):
        credentials = {_IN_DSTACKS_WORDS.get(name, name): value for name, value in credentials.items()}
        if credentials.get("type") in ("default", "access_key"):
            del credentials["type"]
        secret = credentials.pop("secret_access_key", None)
        config["credentials"] = credentials
    key_id = read(config).credentials.access_key_id
    place = ("credentials", "secret_access_key")
    if secret is not None and (not isinstance(secret, str) or not secret.strip()):
        raise Invalid.at(*place, msg="`credentials.secret_access_key` should be text")
    if key_id is None:
        if secret is not None:
            raise Invalid.at(*place, msg="`credentials.secret_access_key` belongs to an `access_key_id`")
        return config, ""
    if secret is not None:
        return config, encrypt(json.dumps({key_id: secret.strip()}))
    if kept and key_id in json.loads(decrypt(kept)):
        return config, kept
    raise Invalid.at(*place, msg=f"`credentials.secret_access_key` is missing: the secret of {key_id}")


def secret_of(key_id: str, kept: str) -> str:
    """The secret of an access key; empty when there is none of it."""
    return str(json.loads(decrypt(kept)).get(key_id, "")) if kept else ""
