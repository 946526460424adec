"""The admin form of an AWS backend: regions and the way to sign in are chosen; the rest comes from the schema."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from django import forms
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _
from pydantic.fields import FieldInfo

from dstackweb.backends.aws.config import EVERY_REGION, AwsConfig, region_names
from dstackweb.backends.forms import FEW_ROWS, BackendForm, NamesField, joined, secret_widget

ONE_BY_REGION = ("instance_profile", "ami", "ssh_key")
SEVERAL_BY_REGION = ("subnets", "security_groups")
_FOR_REGION = re.compile(r"(\*|[a-z]{2,4}(?:-[a-z]+)+-[0-9]{1,2})\s*:\s*(.*)")
_AREAS = {
    _("North America"): ("us-", "ca-", "mx-"),
    _("Europe"): ("eu-",),
    _("Asia and Pacific"): ("ap-",),
    _("Elsewhere"): ("af-", "il-", "me-", "sa-"),
}


class ByRegionField(forms.CharField):
    """One value or several for all regions, or in lines `region: …`."""

    def __init__(self, *, several: bool, help_text: Any, **more: Any) -> None:
        hint = _("To set it per region, write lines such as eu-west-1: VALUE.")
        widget = forms.Textarea(attrs=FEW_ROWS)
        super().__init__(widget=widget, help_text=format_lazy("{} {}", help_text, hint), **more)
        self.several = several

    def prepare_value(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return joined(value)
        if set(value) == {EVERY_REGION}:
            return joined(value[EVERY_REGION])
        return "\n".join(f"{region}: {joined(one)}" for region, one in value.items())

    def clean(self, value: Any) -> Any:
        found: dict[str, list[str]] = {}
        for line in filter(None, map(str.strip, super().clean(value).splitlines())):
            named = _FOR_REGION.fullmatch(line)
            region, text = (named[1], named[2]) if named else (EVERY_REGION, line)
            words = [word for word in re.split(r"[\s,;]+", text) if word]
            if not words:
                raise forms.ValidationError(_("Enter a value for %s.") % region)
            found.setdefault(region, []).extend(words)
        if not self.several and any(len(words) > 1 for words in found.values()):
            raise forms.ValidationError(_("Enter one value, or one line for each region."))
        plain = {region: words if self.several else words[0] for region, words in found.items()}
        return plain.get(EVERY_REGION, "") if set(plain) <= {EVERY_REGION} else plain


def _regions() -> list[tuple[Any, list[tuple[str, str]]]]:
    return [
        (area, [(code, f"{code} {name}") for code, name in region_names().items() if code.startswith(prefixes)])
        for area, prefixes in _AREAS.items()
    ]


class AwsForm(BackendForm):
    """The settings of `AwsConfig` in groups, most of them collapsed."""

    regions = forms.MultipleChoiceField(
        label=_("Regions"),
        required=False,
        widget=forms.CheckboxSelectMultiple,
        choices=_regions,
        help_text=_(AwsConfig.model_fields["regions"].description or ""),
    )
    other_regions = NamesField(
        required=False,
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
    secret_access_key = forms.CharField(
        required=False,
        label=_("Secret access key"),
        widget=secret_widget,
        help_text=_("Stored encrypted, never shown again."),
    )

    fieldsets = (
        (None, {"fields": ("name", "enabled")}),
        (_("Where"), {"fields": ("regions", "other_regions")}),
        (_("Sign in"), {"fields": ("sign_in", "access_key_id", "secret_access_key", "profile")}),
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
                    "disk_gb", "public_ip", "subnets", "security_groups", "instance_profile", "ami", "containers",
                    "ssh_key", "tags",
                ),
            },
        ),
        (_("Special cases"), {"classes": ("collapse",), "fields": ("allow_private_url", "endpoint_url")}),
    )  # fmt: skip

    @classmethod
    def field_for(cls, name: str, info: FieldInfo) -> forms.Field:
        if name in (*ONE_BY_REGION, *SEVERAL_BY_REGION):
            return ByRegionField(several=name in SEVERAL_BY_REGION, **cls.texts_of(name, info), required=False)
        return super().field_for(name, info)

    def initial_values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        values = super().initial_values(config)
        return {
            **values,
            "regions": [region for region in config["regions"] if region in region_names()],
            "other_regions": joined(region for region in config["regions"] if region not in region_names()),
            "sign_in": next((way for way in ("access_key_id", "profile") if way in values), "default"),
        }

    def config_of(self, cleaned: Mapping[str, Any]) -> dict[str, Any]:
        config = super().config_of(cleaned)
        credentials = {**config.pop("credentials", {}), "secret_access_key": cleaned["secret_access_key"]}
        for name, way in (("access_key_id",) * 2, ("secret_access_key", "access_key_id"), ("profile",) * 2):
            if cleaned["sign_in"] != way or not credentials.get(name):
                credentials.pop(name, None)
        regions = [*cleaned["regions"], *cleaned["other_regions"]]
        return {**config, "regions": regions, **({"credentials": credentials} if credentials else {})}

    def secret_fields(self) -> tuple[str, ...]:
        return ("secret_access_key",)

    def check(self, cleaned: Mapping[str, Any]) -> None:
        way = cleaned.get("sign_in", "default")
        if way != "default" and not cleaned.get(way):
            self.add_error(way, _("Required for this way to sign in."))

    def field_at(self, loc: Sequence[str | int]) -> str | None:
        if loc[:1] == ["regions"] and set(self.config["regions"]) - set(region_names()):
            return "other_regions"
        return "sign_in" if list(loc) == ["credentials"] else super().field_at(loc)
