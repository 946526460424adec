"""The admin form of an AWS backend. Its own, because regions and credentials are chosen, not typed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from django import forms
from django.utils.functional import lazy
from django.utils.translation import gettext_lazy as _

from dstackweb.backends.admin.forms import FEW_ROWS, PLAIN_TEXT, BackendForm
from dstackweb.backends.aws.config import EVERY_REGION
from dstackweb.backends.aws.regions import NAMES, REGIONS
from dstackweb.lib.errors import FieldError

LISTS_BY_REGION = ("subnets", "security_groups")
TEXTS_BY_REGION = ("instance_profile", "ami", "ssh_key")
_FOR_REGION = re.compile(r"(\*|[a-z]{2,4}(?:-[a-z]+)+-[0-9]{1,2})\s*:\s*(.*)")
_APART = re.compile(r"[\s,;]+")


def split_words(text: str) -> list[str]:
    """What stands between commas and white space."""
    return [word for word in _APART.split(text) if word]


def parse_by_region(text: str, *, several: bool) -> Any:
    """What is typed for all regions, or in lines `region: …`, as the configuration has it; "" for nothing.

    Raises ValueError for what can't be told apart.
    """
    found: dict[str, list[str]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        named = _FOR_REGION.fullmatch(line)
        region, said = (named[1], named[2]) if named else (EVERY_REGION, line)
        if not split_words(said):
            raise ValueError(f"nothing is said for {region}")
        found.setdefault(region, []).extend(split_words(said))
    if not several and (more := next((region for region, said in found.items() if len(said) > 1), None)):
        raise ValueError(
            "one is expected" + ("" if more == EVERY_REGION else f" for {more}") + ", or one line for each region"
        )
    plain = {region: said if several else said[0] for region, said in found.items()}
    return plain.get(EVERY_REGION, "") if set(plain) <= {EVERY_REGION} else plain


def format_by_region(said: Any) -> str:
    """The inverse of `parse_by_region`."""
    if not isinstance(said, Mapping):
        return _joined(said)
    if set(said) == {EVERY_REGION}:
        return _joined(said[EVERY_REGION])
    return "\n".join(f"{region}: {_joined(one)}" for region, one in said.items())


def parse_tags(text: str) -> dict[str, str]:
    """Lines `name=value`. Raises ValueError."""
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"{line[:80]!r} is no name=value")
        found[name.strip()] = value.strip()
    return found


def format_tags(said: Mapping[str, str]) -> str:
    """The inverse of `parse_tags`."""
    return "\n".join(f"{name}={value}" for name, value in said.items())


def form_values(config: Mapping[str, Any]) -> dict[str, Any]:
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
        **{name: format_by_region(config.get(name, "")) for name in (*LISTS_BY_REGION, *TEXTS_BY_REGION)},
        "public_ip": config.get("public_ip", True),
        "disk_gb": config.get("disk_gb", 100),
        "tags": format_tags(config.get("tags") or {}),
        "allow_private_url": config.get("allow_private_url", False),
        "endpoint_url": config.get("endpoint_url") or "",
    }


def parse_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What an admin said, as `config.settle` takes it; `fields` are the form's cleaned ones. Defaults are left out."""
    sign_in = fields["sign_in"]
    credentials = {name: fields[name] for name in ("role_arn", "external_id") if fields[name]}
    if sign_in != "default":
        credentials[sign_in] = fields[sign_in]
    if sign_in == "access_key_id" and fields["secret_access_key"]:
        credentials["secret_access_key"] = fields["secret_access_key"]
    said = {
        "regions": [*fields["regions"], *split_words(fields["other_regions"])],
        "credentials": credentials,
        **{name: split_words(fields[name]) for name in ("families", "instance_types")},
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


def _with_regions(text: Any, example: str) -> str:
    line = f"eu-west-1: {example}"
    return f"{text} " + _("To set it per region, write one line each, such as %(line)s.") % {"line": line}


def _by_region(example: str, text: Any, label: Any) -> forms.CharField:
    help_text = lazy(_with_regions, str)(text, example)
    return forms.CharField(required=False, label=label, widget=forms.Textarea(attrs=FEW_ROWS), help_text=help_text)


class AwsForm(BackendForm):
    """The settings of `AwsConfig` in groups, most of them closed."""

    regions = forms.MultipleChoiceField(
        label=_("Regions"),
        required=False,
        widget=forms.CheckboxSelectMultiple,
        choices=[
            (part, [(code, f"{code} {place}") for code, place in places.items()]) for part, places in REGIONS.items()
        ],
        help_text=_(
            "Where runs may start. Prices, quotas and GPUs differ by region; start with two or three near you."
        ),
    )
    other_regions = forms.CharField(
        required=False,
        widget=forms.TextInput(attrs=PLAIN_TEXT),
        label=_("Other regions"),
        help_text=_("Region codes not listed above, such as cn-north-1 or us-gov-west-1."),
    )
    sign_in = forms.ChoiceField(
        label=_("Sign in with"),
        widget=forms.RadioSelect,
        initial="default",
        choices=[
            ("default", _("The server's own credentials: instance role, AWS_* variables or ~/.aws")),
            ("access_key_id", _("An access key, stored here")),
            ("profile", _("A profile of the server's ~/.aws files")),
        ],
    )
    access_key_id = forms.CharField(
        required=False,
        widget=forms.TextInput(attrs={**PLAIN_TEXT, "placeholder": "AKIA…"}),
        label=_("Access key ID"),
        help_text=_("In the AWS console: IAM, Users, the user for dstackweb, Security credentials, Create access key."),
    )
    secret_access_key = forms.CharField(
        required=False,
        strip=True,
        label=_("Secret access key"),
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password", "class": "vTextField"}),
        help_text=_("Stored encrypted, never shown again."),
    )
    profile = forms.CharField(
        required=False,
        widget=forms.TextInput(attrs=PLAIN_TEXT),
        label=_("Profile"),
        help_text=_("Profile name in ~/.aws/config or ~/.aws/credentials of the user who runs the server."),
    )
    role_arn = forms.CharField(
        required=False,
        widget=forms.TextInput(attrs={**PLAIN_TEXT, "placeholder": "arn:aws:iam::123456789012:role/dstackweb"}),
        label=_("Role to assume"),
        help_text=_("Only to act as a role, for example in another account."),
    )
    external_id = forms.CharField(
        required=False,
        widget=forms.TextInput(attrs=PLAIN_TEXT),
        label=_("External ID"),
        help_text=_("Only if the role's trust policy requires one."),
    )
    families = forms.CharField(
        required=False,
        widget=forms.TextInput(attrs=PLAIN_TEXT),
        label=_("Families"),
        help_text=_("Offer only these, such as g5, g6, p5. Empty: all."),
    )
    instance_types = forms.CharField(
        required=False,
        widget=forms.TextInput(attrs=PLAIN_TEXT),
        label=_("Instance types"),
        help_text=_("Offer these in addition to the families, such as g5.xlarge. Empty: all."),
    )
    architectures = forms.MultipleChoiceField(
        label=_("Processors"),
        required=False,
        widget=forms.CheckboxSelectMultiple,
        choices=[("x86_64", _("x86_64 (Intel, AMD)")), ("arm64", _("arm64 (Graviton)"))],
        initial=["x86_64"],
        help_text=_("Run files cannot choose a processor, and few programs run on both. Choose one."),
    )
    subnets = _by_region(
        "subnet-0a1b2c3d",
        _("Subnet IDs. Empty: the default VPC's subnets."),
        _("Subnets"),
    )
    security_groups = _by_region(
        "sg-0a1b2c3d",
        _(
            "Group IDs. Empty: the VPC's default group. Instances need only outgoing HTTPS to this server. For runs "
            "with several nodes, members of the group must reach each other."
        ),
        _("Security groups"),
    )
    instance_profile = _by_region(
        "trainer",
        _("Name or ARN of the instance profile for runs, for example to read a bucket. Empty: none."),
        _("Instance profile"),
    )
    ami = _by_region(
        "ami-0a1b2c3d",
        _("Image ID. It needs Python 3.9 or later, and the NVIDIA driver for GPUs. Empty: an AWS image."),
        _("AMI"),
    )
    ssh_key = _by_region("ops", _("Name of the key pair for SSH login. Empty: no login."), _("SSH key pair"))
    public_ip = forms.BooleanField(
        required=False,
        initial=True,
        label=_("Instances get a public IP address"),
        help_text=_("Without one, subnets need a NAT gateway so that instances can reach this server."),
    )
    disk_gb = forms.IntegerField(
        initial=100,
        min_value=8,
        max_value=16384,
        label=_("Disk in GB"),
        help_text=_("Per instance. Deleted with the instance."),
    )
    tags = forms.CharField(
        required=False,
        widget=forms.Textarea(attrs={**FEW_ROWS, "placeholder": "team=vision"}),
        label=_("Tags"),
        help_text=_("One name=value per line, for every instance and disk, for example for cost reports."),
    )
    allow_private_url = forms.BooleanField(
        required=False,
        label=_("Instances can reach a private DSTACKWEB_PUBLIC_URL"),
        help_text=_("Only if a VPN or peering connects the subnets to this server."),
    )
    endpoint_url = forms.URLField(
        required=False,
        assume_scheme="https",
        widget=forms.URLInput(attrs=PLAIN_TEXT),
        label=_("Endpoint URL"),
        help_text=_("An AWS-compatible endpoint for tests. Empty: AWS."),
    )

    fieldsets = (
        (None, {"fields": ("name", "enabled")}),
        (_("Where"), {"fields": ("regions", "other_regions")}),
        (
            _("Sign in"),
            {"fields": ("sign_in", "access_key_id", "secret_access_key", "profile")},
        ),
        (_("Act as a role"), {"classes": ("collapse",), "fields": ("role_arn", "external_id")}),
        (
            _("What to offer"),
            {"classes": ("collapse",), "fields": ("families", "instance_types", "architectures")},
        ),
        (
            _("Instances and their network"),
            {
                "classes": ("collapse",),
                "fields": (
                    "disk_gb", "public_ip", "subnets", "security_groups", "instance_profile", "ami", "ssh_key", "tags",
                ),
            },
        ),
        (_("Special cases"), {"classes": ("collapse",), "fields": ("allow_private_url", "endpoint_url")}),
    )  # fmt: skip

    def initial_values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return form_values(config)

    def config_of(self, cleaned: Mapping[str, Any]) -> dict[str, Any]:
        return parse_config(cleaned)

    def secret_fields(self) -> tuple[str, ...]:
        return ("secret_access_key",)

    def clean_subnets(self) -> Any:
        return self._read("subnets", partial(parse_by_region, several=True))

    def clean_security_groups(self) -> Any:
        return self._read("security_groups", partial(parse_by_region, several=True))

    def clean_instance_profile(self) -> Any:
        return self._read("instance_profile", partial(parse_by_region, several=False))

    def clean_ami(self) -> Any:
        return self._read("ami", partial(parse_by_region, several=False))

    def clean_ssh_key(self) -> Any:
        return self._read("ssh_key", partial(parse_by_region, several=False))

    def clean_tags(self) -> Any:
        return self._read("tags", parse_tags)

    def _read(self, name: str, reader: Any) -> Any:
        try:
            return reader(self.cleaned_data[name])
        except ValueError as error:
            raise forms.ValidationError(_("Invalid: %s.") % error) from None

    def check(self, cleaned: Mapping[str, Any]) -> None:
        if not cleaned.get("regions") and not cleaned.get("other_regions") and "regions" in cleaned:
            self.add_error("regions", _("Choose at least one region."))
        way = cleaned.get("sign_in", "default")
        if way != "default" and not cleaned.get(way):
            self.add_error(way, _("Required for this way to sign in."))

    def field_at(self, loc: Sequence[str | int]) -> str | None:
        names = [str(part) for part in loc]
        if names[:1] == ["credentials"]:
            names = names[1:] or ["sign_in"]
        if names[:1] == ["regions"]:
            return "other_regions" if set(self.config["regions"]) - set(NAMES) else "regions"
        return names[0] if names and names[0] in self.fields else None

    def error_text(self, error: FieldError) -> Any:
        match error["loc"]:
            case ["credentials", "secret_access_key"]:
                return _("Enter the secret of this access key. AWS shows it once, when the key is created.")
            case ["credentials", "access_key_id"]:
                return _("Invalid access key ID: it has 20 letters and digits, such as AKIAIOSFODNN7EXAMPLE.")
            case ["credentials", "role_arn"]:
                return _("Invalid role ARN: it looks like arn:aws:iam::123456789012:role/dstackweb.")
            case ["credentials"]:
                return _("An external ID requires a role.")
        return error["msg"]
