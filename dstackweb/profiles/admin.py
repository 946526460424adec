"""Profiles on the admin site: a field for each setting, or the notation of the run file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import yaml
from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import lazy
from django.utils.html import format_html
from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.lib.errors import DomainError, Invalid
from dstackweb.lib.forms import MergedForm
from dstackweb.profiles.models import Profile
from dstackweb.profiles.services import make_default
from dstackweb.spec.codes import UtilizationAction, UtilizationScope
from dstackweb.spec.fields import Keys
from dstackweb.spec.mappings import RETRY_EVENTS, RetryFields, ScheduleFields, UtilizationFields
from dstackweb.spec.run_fields import ProfileFields
from dstackweb.spec.run_file import parse_profile_settings
from dstackweb.spec.source import read

OWN = ("name", "project", "is_default", "description")
PLAIN_TEXT = {"autocomplete": "off", "autocapitalize": "none", "spellcheck": "false", "class": "vTextField"}
NOT_SET = ("", gettext_lazy("not set"))
ON, OFF = "on", "off"


class Setting(NamedTuple):
    """A field of the form: where its value is in the settings, an example, and how text and value become each other."""

    path: tuple[str, ...]
    label: Any
    example: str = ""
    read: Callable[[Any], Any] = str.strip
    write: Callable[[Any], Any] = str
    choices: tuple[tuple[str, Any], ...] = ()
    rows: int = 0


def _names(text: str) -> list[str]:
    return [name for name in re.split(r"[\s,;]+", text) if name]


def _joined(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(map(str, value or ()))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _as_lines(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(value or ())


def _pairs(text: str) -> dict[str, Any]:
    """`disk=nvme`, one per line; several values with commas. Raises ValidationError."""
    found = {}
    for line in _lines(text):
        name, equals, values = line.partition("=")
        if not equals or not name.strip():
            raise ValidationError(_("Write one name=value per line."))
        listed = [value.strip() for value in values.split(",")]
        found[name.strip()] = listed[0] if len(listed) == 1 else listed
    return found


def _as_pairs(value: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}={_joined(one)}" for name, one in value.items())


def _number(text: str) -> int | float | str:
    """A number; other text stays, so that the settings' own check names what is wrong."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _duration(value: Any) -> str:
    return OFF if value is False else str(value)


_SPOT = tuple((name, name) for name in ("spot", "on-demand", "auto"))
_PULL = tuple((name, name) for name in ("always", "missing", "never"))
_SCOPE = (
    (UtilizationScope.ANY.value, gettext_lazy("any: one idle GPU")),
    (UtilizationScope.ALL.value, gettext_lazy("all: every GPU of a node")),
)
_ACTION = (
    (UtilizationAction.TERMINATE.value, gettext_lazy("stop the run")),
    (UtilizationAction.NOTIFY.value, gettext_lazy("send a warning")),
)
SETTINGS: dict[str, Setting] = {
    "backends": Setting(("backends",), gettext_lazy("Backends"), "hosts, aws", _names, _joined),
    "regions": Setting(("regions",), gettext_lazy("Regions"), "eu-west-1, us-east-1", _names, _joined),
    "instance_types": Setting(("instance_types",), gettext_lazy("Instance types"), "p4d.24xlarge", _names, _joined),
    "labels": Setting(("labels",), gettext_lazy("Labels of hosts"), "disk=nvme", _pairs, _as_pairs, rows=2),
    "spot_policy": Setting(("spot_policy",), gettext_lazy("Spot instances"), choices=_SPOT),
    "max_price": Setting(("max_price",), gettext_lazy("Maximum price, $ per hour"), "1.5", _number),
    "max_duration": Setting(("max_duration",), gettext_lazy("Maximum duration"), "24h", write=_duration),
    "stop_duration": Setting(("stop_duration",), gettext_lazy("Time to stop"), "30s", write=_duration),
    "idle_duration": Setting(("idle_duration",), gettext_lazy("Keep idle instances"), "5m", write=_duration),
    "image": Setting(("image",), gettext_lazy("Container image"), "python:3.12"),
    "pull_policy": Setting(("pull_policy",), gettext_lazy("Pull the image"), choices=_PULL),
    "on_events": Setting(("retry", "on_events"), gettext_lazy("Retry on"), ", ".join(RETRY_EVENTS), _names, _joined),
    "duration": Setting(("retry", "duration"), gettext_lazy("Retry for"), "1h"),
    "max_attempts": Setting(("retry", "max_attempts"), gettext_lazy("Attempts at most"), "3", _number),
    "min_gpu_utilization": Setting(
        ("utilization_policy", "min_gpu_utilization"), gettext_lazy("Minimum GPU utilization, %"), "10", _number
    ),
    "time_window": Setting(("utilization_policy", "time_window"), gettext_lazy("Time window"), "30m"),
    "scope": Setting(("utilization_policy", "scope"), gettext_lazy("Scope"), choices=_SCOPE),
    "warmup": Setting(("utilization_policy", "warmup"), gettext_lazy("Warm-up"), "10m"),
    "action": Setting(("utilization_policy", "action"), gettext_lazy("Action"), choices=_ACTION),
    "cron": Setting(("schedule", "cron"), gettext_lazy("Schedule (UTC)"), "0 2 * * *", _lines, _as_lines, rows=2),
}
FIELDSETS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (None, {"fields": OWN}),
    (
        gettext_lazy("Where runs may start"),
        {"fields": ("backends", "regions", "instance_types", "labels", "spot_policy", "max_price")},
    ),
    (gettext_lazy("Time limits"), {"fields": ("max_duration", "stop_duration", "idle_duration")}),
    (
        gettext_lazy("Utilization policy"),
        {"fields": ("min_gpu_utilization", "time_window", "scope", "warmup", "action")},
    ),
    (gettext_lazy("Retry"), {"fields": ("retry", "on_events", "duration", "max_attempts")}),
    (gettext_lazy("Container"), {"fields": ("image", "pull_policy"), "classes": ("collapse",)}),
    (gettext_lazy("Schedule"), {"fields": ("cron",), "classes": ("collapse",)}),
)
_SCHEMAS: dict[str, type[Keys]] = {
    "retry": RetryFields,
    "utilization_policy": UtilizationFields,
    "schedule": ScheduleFields,
}


def description(path: tuple[str, ...]) -> str:
    """What the run file's documentation says of a setting."""
    schema: type[Keys] = _SCHEMAS[path[0]] if len(path) > 1 else ProfileFields
    return schema.model_fields[path[-1]].description or ""


def descriptions() -> set[str]:
    """All of them, for the translations."""
    return {description(setting.path) for setting in SETTINGS.values()} | {description(("retry",))}


def assembled(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the form's values, in the order of the documentation; what is empty is not set."""
    found: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        if (value := values.get(name)) not in (None, "", [], {}):
            within = found
            for part in setting.path[:-1]:
                within = within.setdefault(part, {})
            within[setting.path[-1]] = value
    if (switch := values.get("retry")) and (switch == OFF or "retry" not in found):
        found["retry"] = switch == ON
    return {key: found[key] for key in ProfileFields.model_fields if key in found}


def values_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the form for stored settings."""
    found = {}
    for name, setting in SETTINGS.items():
        within: Any = settings
        for part in setting.path:
            within = within.get(part) if isinstance(within, Mapping) else None
        if within is not None:
            found[name] = setting.write(within)
    retry = settings.get("retry")
    return found | ({"retry": ON if retry else OFF} if "retry" in settings else {})


def fits_form(settings: Mapping[str, Any]) -> bool:
    """Whether the form can show these settings without changing what they mean."""
    try:
        values = {name: SETTINGS[name].read(text) for name, text in values_of(settings).items() if name in SETTINGS}
        again = assembled({**values, "retry": values_of(settings).get("retry", "")})
        before, after = parse_profile_settings(settings), parse_profile_settings(again)
    except (AttributeError, DomainError, ValidationError):
        return False
    return before.model_dump(exclude_unset=True) == after.model_dump(exclude_unset=True)


def field_of(setting: Setting) -> forms.Field:
    shared = {
        "label": setting.label,
        "required": False,
        "help_text": lazy(lambda: code(_(description(setting.path))), str)(),
    }
    if setting.choices:
        return forms.ChoiceField(**shared, choices=[NOT_SET, *setting.choices])
    attrs = {**PLAIN_TEXT, "placeholder": setting.example}
    if setting.rows:
        return forms.CharField(**shared, widget=forms.Textarea(attrs={**attrs, "rows": setting.rows}))
    return forms.CharField(**shared, widget=forms.TextInput(attrs=attrs))


def code(text: str) -> str:
    """Without the marks of code, which plain help does not show."""
    return text.replace("`", "")


class FieldsForm(MergedForm, forms.ModelForm[Profile]):
    """A field for each setting. What the whole lacks is an error of the field that it is about."""

    retry = forms.ChoiceField(
        label=gettext_lazy("Retry failed runs"),
        required=False,
        choices=[NOT_SET, (ON, gettext_lazy("yes")), (OFF, gettext_lazy("no"))],
        help_text=lazy(lambda: code(_(description(("retry",)))), str)(),
    )
    locals().update({name: field_of(setting) for name, setting in SETTINGS.items()})

    class Meta:
        model = Profile
        fields = OWN

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        stored = self.instance.settings if self.instance.pk else {}
        self.initial = {**self.initial, "settings": stored, **values_of(stored)}

    def clean(self) -> dict[str, Any]:
        """Check the settings as the run file's; each error goes to its field."""
        cleaned: dict[str, Any] = super().clean()
        values: dict[str, Any] = {"retry": cleaned.get("retry")}
        for name, setting in SETTINGS.items():
            if text := cleaned.get(name):
                try:
                    values[name] = setting.read(text)
                except ValidationError as error:
                    self.add_error(name, error)
        settings = assembled(values)
        try:
            parse_profile_settings(settings)
        except Invalid as error:
            for one in error.errors:
                self.add_error(_field_at(one["loc"]), one["msg"])
            return cleaned
        self.instance.settings = settings
        return cleaned


def _field_at(loc: tuple[str | int, ...] | list[str | int]) -> str | None:
    """The field that an error of the settings belongs to; None: the form as a whole."""
    keys = tuple(part for part in loc if isinstance(part, str))
    paths = {setting.path: name for name, setting in SETTINGS.items()} | {("retry",): "retry"}
    paths |= {("utilization_policy",): "min_gpu_utilization", ("schedule",): "cron"}
    for length in range(len(keys), 0, -1):
        if keys[:length] in paths:
            return paths[keys[:length]]
    return None


class SettingsField(forms.CharField):
    """Settings as YAML. Errors are shown with their lines, and the input is kept."""

    widget = forms.Textarea(attrs={"rows": 14, "cols": 80, "spellcheck": "false", "class": "vLargeTextField"})

    def prepare_value(self, value: Any) -> Any:
        """The stored settings as YAML, in the order of the documentation: PostgreSQL keeps no order of keys."""
        if not isinstance(value, dict):
            return value
        ordered = {key: value[key] for key in ProfileFields.model_fields if key in value} | value
        return yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True) if value else ""

    def to_python(self, value: Any) -> Any:
        """The data of the input. Raises ValidationError with all errors."""
        text = super().to_python(value) or ""
        if not text.strip():
            return {}
        try:
            parse_profile_settings(text)
            return read(text).data
        except Invalid as error:
            raise ValidationError(
                [_("Line %(line)s: %(msg)s") % item if item["line"] else item["msg"] for item in error.errors]
            ) from None
        except DomainError as error:
            raise ValidationError(error.detail) from None

    def has_changed(self, initial: Any, data: Any) -> bool:
        """Compare the text: a setting in another notation is a change."""
        before, after = (str(self.prepare_value(value) or "").strip().splitlines() for value in (initial, data))
        return before != after


class YamlForm(MergedForm, forms.ModelForm[Profile]):
    """The settings as they are written in a run file."""

    settings = SettingsField(label=gettext_lazy("Settings"), required=False)

    class Meta:
        model = Profile
        fields = (*OWN, "settings")


@admin.register(Profile)
class ProfileAdmin(admin.ModelAdmin[Profile]):
    list_display = ("name", "project", "is_default", "sets", "description")
    list_filter = ("is_default", ("project", admin.RelatedOnlyFieldListFilter))
    list_select_related = ("project",)
    search_fields = ("name", "description", "project__name")
    autocomplete_fields = ("project",)
    actions = ("make_default",)

    def as_yaml(self, request: HttpRequest, profile: Profile | None) -> bool:
        """Whether the settings are one text: as its reader wants, or because no form of fields can show them."""
        if request.method == "POST":
            return "settings" in request.POST
        fits = profile is None or fits_form(profile.settings)
        return request.GET.get("as") == "yaml" or not fits or not self.has_change_permission(request, profile)

    def get_form(self, request: HttpRequest, obj: Profile | None = None, change: bool = False, **more: Any) -> Any:
        as_yaml = self.as_yaml(request, obj)
        form = super().get_form(request, obj, change, **{**more, "form": YamlForm if as_yaml else FieldsForm})
        # This app doesn't import that of backends.
        link = format_html('<a href="{}">{}</a>', reverse("admin:backends_backend_changelist"), _("Backends"))
        if as_yaml:
            text = _("One “key: value” per line, as in a run file. Keys: {}. For the names of backends see {}.")
            name, text = "settings", format_html(text, ", ".join(ProfileFields.model_fields), link)
        else:
            name, text = "backends", format_html("{} {}", code(_(description(("backends",)))), link)
        if name in form.base_fields:
            form.base_fields[name].help_text = text
        return form

    def get_fieldsets(self, request: HttpRequest, obj: Profile | None = None) -> Any:
        own = (None, {"fields": (*OWN, "settings")})
        return [own] if self.as_yaml(request, obj) else FIELDSETS

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **more: Any) -> Any:
        context["as_yaml"] = self.as_yaml(request, more.get("obj"))
        return super().render_change_form(request, context, *args, **more)

    @admin.display(description=gettext_lazy("sets"))
    def sets(self, profile: Profile) -> str:
        return ", ".join(profile.settings) or "–"

    @admin.action(description=gettext_lazy("Make the selected profile the default"), permissions=["change"])
    def make_default(self, request: HttpRequest, profiles: QuerySet[Profile]) -> None:
        if profiles.count() != 1:
            self.message_user(request, _("Select one profile."), messages.WARNING)
            return
        profile = profiles.get()
        make_default(profile)
        if profile.project is None:
            text = _("%(profile)s is now the default of all projects. Submitted runs keep theirs.")
        else:
            text = _("%(profile)s is now the default of %(project)s. Submitted runs keep theirs.")
        self.message_user(request, text % {"profile": profile.name, "project": profile.project})
