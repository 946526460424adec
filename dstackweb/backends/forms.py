"""The admin form of a backend, made from its kind's settings schema."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le
from django import forms
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from dstackweb.backends.kinds import Kind
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import DomainError, Invalid
from dstackweb.lib.forms import MergedForm
from dstackweb.spec.fields import Keys

PLAIN_TEXT = {"autocomplete": "off", "spellcheck": "false", "class": "vTextField"}
OF_EVERY_KIND = ("name", "enabled")
FEW_ROWS = {"rows": 2, "cols": 60, "spellcheck": "false", "class": "vLargeTextField"}
EMPTY: tuple[Any, ...] = (None, "", [], {})
secret_widget = forms.PasswordInput(attrs={"autocomplete": "new-password", "class": "vTextField"})
REMOVED = object()
"""The value of a secret whose stored one is to be removed."""


class RemovableSecret(forms.PasswordInput):
    """With a box to remove the stored secret, where there is one."""

    is_stored = False

    def render(self, name: str, value: Any, attrs: Any = None, renderer: Any = None) -> SafeString:
        typed = super().render(name, value, attrs, renderer)
        if not self.is_stored:
            return typed
        box = '{}<label class="dwb-remove"><input type="checkbox" name="{}-remove"> {}</label>'
        return format_html(box, typed, name, _("Remove the stored one"))

    def value_from_datadict(self, data: Mapping[str, Any], files: Any, name: str) -> Any:
        return super().value_from_datadict(data, files, name) or (REMOVED if f"{name}-remove" in data else "")


class RemovableSecretField(forms.CharField):
    def clean(self, value: Any) -> Any:
        return value if value is REMOVED else super().clean(value)


class BackendForm(MergedForm, forms.ModelForm[Backend]):
    """Name and switch of a backend, with the settings of its kind. After `clean`, `config` holds the settings."""

    kind: ClassVar[Kind] = Kind()
    fieldsets: ClassVar[Sequence[tuple[Any, dict[str, Any]]]] = ((None, {"fields": OF_EVERY_KIND}),)
    config: dict[str, Any]
    settled: tuple[dict[str, Any], str]

    class Meta:
        model = Backend
        fields = OF_EVERY_KIND
        help_texts = {"name": _("Run files and profiles use this name. It cannot be changed later.")}

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        if self.instance.pk:
            for name, value in self.initial_values(self.instance.config).items():
                self.initial.setdefault(name, value)
            if self.instance.secret:
                for name in self.secret_fields():
                    self.fields[name].widget.is_stored = True
                    self.fields[name].widget.attrs["placeholder"] = _("stored; type to replace it")
                    self.fields[name].help_text = _("Stored encrypted, never shown again. Leave empty to keep it.")

    @classmethod
    def texts_of(cls, name: str, info: FieldInfo) -> dict[str, Any]:
        label = info.title or name.replace("_", " ").capitalize()
        return {"label": _(label), "help_text": _(info.description) if info.description else ""}

    @classmethod
    def field_for(cls, name: str, info: FieldInfo) -> forms.Field:
        """The form field of a setting: text, number, switch, choice, list of names, names with values, or secret."""
        required, of = info.is_required(), _plain_type(info.annotation)
        shared = {**cls.texts_of(name, info), "required": required}
        if not required and (default := info.get_default(call_default_factory=True)):
            shared["initial"] = list(default) if isinstance(default, tuple) else default
        if of is SecretStr:
            # The stored one stays where it is left empty: the schema knows whether one is missing.
            if required:
                return forms.CharField(**{**shared, "required": False}, widget=secret_widget)
            return RemovableSecretField(**shared, widget=RemovableSecret(attrs=secret_widget.attrs))
        if of is bool:
            return forms.BooleanField(**{**shared, "required": False})
        if of is int:
            limits = {key: limit for rule in info.metadata for key, limit in _limits(rule)}
            return forms.IntegerField(**shared, **limits)
        if of is float:
            return forms.FloatField(**shared)
        if get_origin(of) is Literal:
            return forms.ChoiceField(**shared, choices=[(choice, str(choice)) for choice in get_args(of)])
        if get_origin(of) is dict:
            return PairsField(**shared)
        if get_origin(of) in (list, tuple, set, frozenset):
            of_items = get_args(of)[0]
            if get_origin(of_items) is Literal:
                choices = [(choice, str(choice)) for choice in get_args(of_items)]
                return forms.MultipleChoiceField(**shared, choices=choices, widget=forms.CheckboxSelectMultiple)
            return NamesField(**shared)
        return forms.CharField(**shared, widget=forms.TextInput(attrs=PLAIN_TEXT))

    def initial_values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for *path, name in _paths(self.kind.schema):
            within: Any = config
            for part in path:
                within = within.get(part) if isinstance(within, dict) else None
            if isinstance(within, dict) and name in within and name in self.fields:
                found[name] = self.fields[name].prepare_value(within[name])
        return found

    def config_of(self, cleaned: Mapping[str, Any]) -> dict[str, Any]:
        """The config of the form's values; empty values and defaults are left out."""
        config: dict[str, Any] = {}
        for (*path, name), info in _paths(self.kind.schema).items():
            value, default = cleaned.get(name), info.get_default(call_default_factory=True)
            if value in EMPTY or value == (list(default) if isinstance(default, tuple) else default):
                continue
            within = config
            for part in path:
                within = within.setdefault(part, {})
            within[name] = None if value is REMOVED else value
        return config

    def secret_fields(self) -> tuple[str, ...]:
        return self.kind.secret_names()

    def clean_name(self) -> str:
        name: str = self.cleaned_data["name"]
        if Backend.objects.filter(name=name).exclude(pk=self.instance.pk).exists():
            raise forms.ValidationError(_("A backend with this name exists already."))
        return name

    def clean(self) -> dict[str, Any]:
        """Check the settings as a whole; each error goes to its field."""
        cleaned = super().clean() or self.cleaned_data
        self.check(cleaned)
        if set(self.errors) - {"name"}:
            return cleaned
        self.config = self.config_of(cleaned)
        try:
            self.settled = self.kind.settle(self.config, self.instance.secret)
        except Invalid as error:
            for one in error.errors:
                self.add_error(self.field_at(one["loc"]), one["msg"])
        except DomainError as error:  # the stored secret can't be decrypted
            self.add_error(next(iter(self.secret_fields()), None), error.detail)
        return cleaned

    def check(self, cleaned: Mapping[str, Any]) -> None:
        """Further checks of a kind's own; errors are added with `add_error`."""

    def field_at(self, loc: Sequence[str | int]) -> str | None:
        """The field that an error of the config belongs to; None: the form as a whole."""
        return next((str(part) for part in loc if part in self.fields), None)


class NamesField(forms.CharField):
    """A list of names, separated by commas or spaces."""

    widget = forms.TextInput(attrs=PLAIN_TEXT)

    def prepare_value(self, value: Any) -> Any:
        return joined(value)

    def clean(self, value: Any) -> list[str]:
        return [name for name in re.split(r"[\s,;]+", super().clean(value)) if name]


class PairsField(forms.CharField):
    """Names with values, one `name=value` per line."""

    widget = forms.Textarea(attrs=FEW_ROWS)

    def prepare_value(self, value: Any) -> Any:
        return "\n".join(f"{name}={one}" for name, one in value.items()) if isinstance(value, Mapping) else value

    def clean(self, value: Any) -> dict[str, str]:
        pairs = [line.partition("=") for line in super().clean(value).splitlines() if line.strip()]
        if any(not equals or not name.strip() for name, equals, _value in pairs):
            raise forms.ValidationError(_("Write one name=value per line."))
        return {name.strip(): text.strip() for name, _equals, text in pairs}


def schema_form(kind: Kind, base: type[BackendForm] = BackendForm) -> type[BackendForm]:
    """A form with a field for each of the schema's that `base` does not declare."""
    declared = base.declared_fields
    paths = {path[-1]: info for path, info in _paths(kind.schema).items() if path[-1] not in declared}
    fields = {name: base.field_for(name, info) for name, info in paths.items()}
    shown: list[tuple[Any, dict[str, Any]]] = [*base.fieldsets]
    if fields and base is BackendForm:
        shown.append((_("Settings"), {"fields": tuple(fields)}))
    return type(f"{type(kind).__name__}Form", (base,), {**fields, "kind": kind, "fieldsets": tuple(shown)})


def joined(value: Any) -> str:
    """A list of names as text; text stays."""
    return value if isinstance(value, str) else ", ".join(map(str, value or ()))


def _paths(schema: type[Keys], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], FieldInfo]:
    """The settings of a schema with their places in the config; nested ones are listed one by one."""
    found: dict[tuple[str, ...], FieldInfo] = {}
    for name, info in schema.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Keys):
            found |= _paths(info.annotation, (*above, name))
        else:
            found[(*above, name)] = info
    return found


def _plain_type(annotation: Any) -> Any:
    """A type without `None` and without pydantic's rules."""
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [one for one in get_args(annotation) if one is not type(None)]
        return _plain_type(rest[0]) if len(rest) == 1 else annotation
    return _plain_type(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation


def _limits(rule: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(rule, Ge):
        yield "min_value", rule.ge
    if isinstance(rule, Le):
        yield "max_value", rule.le
