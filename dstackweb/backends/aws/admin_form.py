"""The form of an AWS backend: a field for each thing that can be said, with what it is for, and errors at the field."""

from __future__ import annotations

from functools import partial
from typing import Any

from django import forms
from django.utils.functional import lazy
from django.utils.translation import gettext_lazy as _

from dstackweb.backends.aws import config, form_text
from dstackweb.backends.aws.regions import NAMES, REGIONS
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import DomainError, Invalid

_ROWS = {"rows": 2, "cols": 60, "spellcheck": "false", "autocapitalize": "off"}
_PLAIN = {"spellcheck": "false", "autocapitalize": "off", "autocomplete": "off", "class": "vTextField"}


def _with_regions(text: Any, example: str) -> str:
    line = f"eu-west-1: {example}"
    return f"{text} " + _("Where regions differ, a line for each, such as %(line)s.") % {"line": line}


def _by_region(example: str, text: Any, label: Any) -> forms.CharField:
    told = lazy(_with_regions, str)(text, example)
    return forms.CharField(required=False, label=label, widget=forms.Textarea(attrs=_ROWS), help_text=told)


class AwsForm(forms.ModelForm[Backend]):
    """`settled` is the config and its encrypted secret, after a form that is valid."""

    settled: tuple[dict[str, Any], str]
    said: dict[str, Any]

    regions = forms.MultipleChoiceField(
        label=_("Regions"),
        required=False,
        widget=forms.CheckboxSelectMultiple,
        choices=[
            (part, [(code, f"{code} {place}") for code, place in places.items()]) for part, places in REGIONS.items()
        ],
        help_text=_(
            "Where runs may start. Prices, quotas and GPUs differ by region; two or three near you are a good start."
        ),
    )
    other_regions = forms.CharField(
        required=False,
        widget=forms.TextInput(attrs=_PLAIN),
        label=_("Other regions"),
        help_text=_("Codes of regions that are not listed above, such as cn-north-1 or us-gov-west-1."),
    )
    sign_in = forms.ChoiceField(
        label=_("Sign in with"),
        widget=forms.RadioSelect,
        initial="default",
        choices=[
            ("default", _("What the server has: its instance role, AWS_* variables or ~/.aws")),
            ("access_key_id", _("An access key, kept here")),
            ("profile", _("A profile of the server's ~/.aws files")),
        ],
    )
    access_key_id = forms.CharField(
        required=False,
        widget=forms.TextInput(attrs={**_PLAIN, "placeholder": "AKIA…"}),
        label=_("Access key ID"),
        help_text=_("In the AWS console: IAM, Users, the user for dstackweb, Security credentials, Create access key."),
    )
    secret_access_key = forms.CharField(
        required=False,
        strip=True,
        label=_("Secret access key"),
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password", "class": "vTextField"}),
        help_text=_("Kept encrypted, and never shown again."),
    )
    profile = forms.CharField(
        required=False,
        widget=forms.TextInput(attrs=_PLAIN),
        label=_("Profile"),
        help_text=_("Its name in ~/.aws/config or ~/.aws/credentials of the user that the server runs as."),
    )
    role_arn = forms.CharField(
        required=False,
        widget=forms.TextInput(attrs={**_PLAIN, "placeholder": "arn:aws:iam::123456789012:role/dstackweb"}),
        label=_("Role to assume"),
        help_text=_("Only if dstackweb should act as a role, for example in another account."),
    )
    external_id = forms.CharField(
        required=False,
        widget=forms.TextInput(attrs=_PLAIN),
        label=_("External ID"),
        help_text=_("Only if the role's trust policy asks for one."),
    )
    families = forms.CharField(
        required=False,
        widget=forms.TextInput(attrs=_PLAIN),
        label=_("Families"),
        help_text=_("Offer only these, such as g5, g6, p5. Empty: all."),
    )
    instance_types = forms.CharField(
        required=False,
        widget=forms.TextInput(attrs=_PLAIN),
        label=_("Instance types"),
        help_text=_("Offer only these, beside those families, such as g5.xlarge. Empty: all."),
    )
    architectures = forms.MultipleChoiceField(
        label=_("Processors"),
        required=False,
        widget=forms.CheckboxSelectMultiple,
        choices=[("x86_64", _("x86_64 (Intel, AMD)")), ("arm64", _("arm64 (Graviton)"))],
        initial=["x86_64"],
        help_text=_("A run file can't ask for one, and few programs run on both: one of them is best."),
    )
    subnets = _by_region(
        "subnet-0a1b2c3d",
        _("IDs of the subnets that instances start in. Empty: those of the default VPC."),
        _("Subnets"),
    )
    security_groups = _by_region(
        "sg-0a1b2c3d",
        _(
            "IDs. Empty: the VPC's default group. Instances only call out, to this server by HTTPS. For runs of "
            "several nodes, its members must reach each other, as those of the default group do."
        ),
        _("Security groups"),
    )
    instance_profile = _by_region(
        "trainer",
        _("Name or ARN of the instance profile that runs get, such as one that may read a bucket. Empty: none."),
        _("Instance profile"),
    )
    ami = _by_region(
        "ami-0a1b2c3d",
        _("The image's ID; it needs Python 3.9 or later, and the NVIDIA driver for GPUs. Empty: one of AWS's own."),
        _("AMI"),
    )
    ssh_key = _by_region(
        "ops", _("Name of the key pair with which people may log in to instances. Empty: nobody."), _("SSH key pair")
    )
    public_ip = forms.BooleanField(
        required=False,
        initial=True,
        label=_("Instances get a public IP address"),
        help_text=_("Without one, the subnets need a NAT gateway, so that instances reach this server."),
    )
    disk_gb = forms.IntegerField(
        initial=100,
        min_value=8,
        max_value=16384,
        label=_("Disk in GB"),
        help_text=_("Of each instance; all of it goes when the instance ends."),
    )
    tags = forms.CharField(
        required=False,
        widget=forms.Textarea(attrs={**_ROWS, "placeholder": "team=vision"}),
        label=_("Tags"),
        help_text=_("name=value, one a line: on every instance and disk, for example for cost reports."),
    )
    allow_private_url = forms.BooleanField(
        required=False,
        label=_("Instances can reach a private DSTACKWEB_PUBLIC_URL"),
        help_text=_("Only where a VPN or peering leads from their subnets to this server."),
    )
    endpoint_url = forms.URLField(
        required=False,
        assume_scheme="https",
        widget=forms.URLInput(attrs=_PLAIN),
        label=_("Endpoint URL"),
        help_text=_("What stands in for AWS, for tests. Empty: AWS."),
    )

    class Meta:
        model = Backend
        fields = ("name", "enabled")
        help_texts = {"name": _("How run files and profiles name it, for ever: short, such as aws or aws-research.")}

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

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        if self.instance.pk:
            for name, value in form_text.fields_of(self.instance.config).items():
                self.initial.setdefault(name, value)
            if self.instance.secret:
                secret = self.fields["secret_access_key"]
                secret.widget.attrs["placeholder"] = _("stored; type to replace it")
                secret.help_text = _("Kept encrypted, and never shown again. Left empty, it stays as it is.")

    def clean_name(self) -> str:
        name: str = self.cleaned_data["name"]
        if Backend.objects.filter(name=name).exclude(pk=self.instance.pk).exists():
            raise forms.ValidationError(_("A backend of this name is there already."))
        return name

    def clean_subnets(self) -> Any:
        return self._read("subnets", partial(form_text.by_region, several=True))

    def clean_security_groups(self) -> Any:
        return self._read("security_groups", partial(form_text.by_region, several=True))

    def clean_instance_profile(self) -> Any:
        return self._read("instance_profile", partial(form_text.by_region, several=False))

    def clean_ami(self) -> Any:
        return self._read("ami", partial(form_text.by_region, several=False))

    def clean_ssh_key(self) -> Any:
        return self._read("ssh_key", partial(form_text.by_region, several=False))

    def clean_tags(self) -> Any:
        return self._read("tags", form_text.tags)

    def _read(self, name: str, reader: Any) -> Any:
        try:
            return reader(self.cleaned_data[name])
        except ValueError as error:
            raise forms.ValidationError(_("This can't be read: %s.") % error) from None

    def clean(self) -> dict[str, Any]:
        """Has the configuration checked as a whole: what is wrong is told at its field."""
        cleaned = super().clean() or self.cleaned_data
        if not cleaned.get("regions") and not cleaned.get("other_regions") and "regions" in cleaned:
            self.add_error("regions", _("Choose at least one region."))
        way = cleaned.get("sign_in", "default")
        if way != "default" and not cleaned.get(way):
            self.add_error(way, _("This is needed to sign in like that."))
        if set(self.errors) - {"name"}:
            return cleaned
        self.said = form_text.config_of(cleaned)
        try:
            self.settled = config.settle(self.said, self.instance.secret)
        except Invalid as error:
            for one in error.errors:
                self.add_error(self._place(one["loc"]), _worded(one))
        except DomainError as error:
            self.add_error("secret_access_key", error.detail)
        return cleaned

    def _place(self, loc: list[str | int]) -> str | None:
        """The field that an error of the configuration belongs to; None: the form."""
        names = [str(part) for part in loc]
        if names[:1] == ["credentials"]:
            names = names[1:] or ["sign_in"]
        if names[:1] == ["regions"]:
            return "other_regions" if set(self.said["regions"]) - set(NAMES) else "regions"
        return names[0] if names and names[0] in self.fields else None


def _worded(error: Any) -> Any:
    """An error of the configuration for people who see a form, not keys."""
    match error["loc"]:
        case ["credentials", "secret_access_key"]:
            return _("The secret of this access key is needed: AWS shows it once, when the key is made.")
        case ["credentials", "access_key_id"]:
            return _("That is no access key's ID: it is 20 letters and digits, such as AKIAIOSFODNN7EXAMPLE.")
        case ["credentials", "role_arn"]:
            return _("That is no role's ARN: it looks like arn:aws:iam::123456789012:role/dstackweb.")
        case ["credentials"]:
            return _("An external ID belongs to a role.")
    return str(error["msg"])
