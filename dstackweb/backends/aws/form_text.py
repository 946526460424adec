"""An AWS backend's configuration as the fields of a form, and back. Pure; `config.settle` checks what comes of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dstackweb.backends.aws.config import EVERY_REGION
from dstackweb.backends.aws.regions import NAMES

LISTS_BY_REGION = ("subnets", "security_groups")
TEXTS_BY_REGION = ("instance_profile", "ami", "ssh_key")
_FOR_REGION = re.compile(r"(\*|[a-z]{2,4}(?:-[a-z]+)+-[0-9]{1,2})\s*:\s*(.*)")
_APART = re.compile(r"[\s,;]+")


def words(text: str) -> list[str]:
    """What stands between commas and white space."""
    return [word for word in _APART.split(text) if word]


def by_region(text: str, *, several: bool) -> Any:
    """What is typed for all regions, or in lines `region: …`, as the configuration has it; "" for nothing.

    Raises ValueError for what can't be told apart.
    """
    found: dict[str, list[str]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        named = _FOR_REGION.fullmatch(line)
        region, said = (named[1], named[2]) if named else (EVERY_REGION, line)
        if not words(said):
            raise ValueError(f"nothing is said for {region}")
        found.setdefault(region, []).extend(words(said))
    if not several and (more := next((region for region, said in found.items() if len(said) > 1), None)):
        raise ValueError(
            "one is expected" + ("" if more == EVERY_REGION else f" for {more}") + ", or one line for each region"
        )
    plain = {region: said if several else said[0] for region, said in found.items()}
    return plain.get(EVERY_REGION, "") if set(plain) <= {EVERY_REGION} else plain


def by_region_text(said: Any) -> str:
    """The inverse of `by_region`."""
    if not isinstance(said, Mapping):
        return _joined(said)
    if set(said) == {EVERY_REGION}:
        return _joined(said[EVERY_REGION])
    return "\n".join(f"{region}: {_joined(one)}" for region, one in said.items())


def tags(text: str) -> dict[str, str]:
    """Lines `name=value`. Raises ValueError."""
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"{line[:80]!r} is no name=value")
        found[name.strip()] = value.strip()
    return found


def tags_text(said: Mapping[str, str]) -> str:
    """The inverse of `tags`."""
    return "\n".join(f"{name}={value}" for name, value in said.items())


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the form's fields say for a configuration, as `config.settle` keeps it. There is no secret in it."""
    said = config.get("credentials")
    credentials = said if isinstance(said, Mapping) else {}
    regions = _listed(config.get("regions"))
    return {
        "regions": [region for region in regions if region in NAMES],
        "other_regions": ", ".join(region for region in regions if region not in NAMES),
        "sign_in": next((way for way in ("access_key_id", "profile") if credentials.get(way)), "default"),
        **{name: credentials.get(name) or "" for name in ("access_key_id", "profile", "role_arn", "external_id")},
        **{name: _joined(config.get(name)) for name in ("families", "instance_types")},
        "architectures": _listed(config.get("architectures")) or ["x86_64"],
        **{name: by_region_text(config.get(name, "")) for name in (*LISTS_BY_REGION, *TEXTS_BY_REGION)},
        "public_ip": config.get("public_ip", True),
        "disk_gb": config.get("disk_gb", 100),
        "tags": tags_text(config.get("tags") or {}),
        "allow_private_url": config.get("allow_private_url", False),
        "endpoint_url": config.get("endpoint_url") or "",
    }


def config_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What an admin said, as `config.settle` takes it; `fields` are the form's cleaned ones. Defaults are left out."""
    sign_in = fields["sign_in"]
    credentials = {name: fields[name] for name in ("role_arn", "external_id") if fields[name]}
    if sign_in != "default":
        credentials[sign_in] = fields[sign_in]
    if sign_in == "access_key_id" and fields["secret_access_key"]:
        credentials["secret_access_key"] = fields["secret_access_key"]
    said = {
        "regions": [*fields["regions"], *words(fields["other_regions"])],
        "credentials": credentials,
        **{name: words(fields[name]) for name in ("families", "instance_types")},
        "architectures": list(fields["architectures"]),
        **{name: fields[name] for name in (*LISTS_BY_REGION, *TEXTS_BY_REGION, "tags", "endpoint_url")},
        **{name: fields[name] for name in ("public_ip", "disk_gb", "allow_private_url")},
    }
    usual = {"architectures": ["x86_64"], "public_ip": True, "disk_gb": 100, "allow_private_url": False}
    empty: tuple[Any, ...] = ("", [], {})
    return {
        name: value
        for name, value in said.items()
        if name == "regions" or (value not in empty and usual.get(name) != value)
    }


def _listed(said: Any) -> list[str]:
    return [said] if isinstance(said, str) else list(said) if isinstance(said, Sequence) else []


def _joined(said: Any) -> str:
    return ", ".join(_listed(said))
