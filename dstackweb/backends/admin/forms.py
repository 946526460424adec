"""The admin form of a backend, made from its kind's settings schema."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from django import forms
from django.utils.translation import gettext_lazy as _
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from dstackweb.backends.kinds import Kind
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import DomainError, FieldError, Invalid

PLAIN_TEXT = {"autocomplete": "off", "spellcheck": "false", "class": "vTextField"}
OF_EVERY_KIND = ("name", "enabled")
FEW_ROWS = {"rows": 2, "cols": 60, "spellcheck": "false", "class": "vLargeTextField"}


class BackendForm(forms.ModelForm[Backend]):
    """Name and switch of a backend, with the settings of its kind. After `clean`, `config` holds the settings."""

    kind: ClassVar[Kind]
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
                    self.fields[name].widget.attrs["placeholder"] = _("stored; type to replace it")
                    self.fields[name].help_text = _("Stored encrypted, never shown again. Leave empty to keep it.")

    def initial_values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The form's values for a stored config."""
        return {
            name: _joined(value) if isinstance(self.fields[name], NamesField) else value
            for name, value in config.items()
            if name in self.fields
        }

    def config_of(self, cleaned: Mapping[str, Any]) -> dict[str, Any]:
        """The config that the form's values stand for; empty values are left out."""
        empty: tuple[Any, ...] = (None, "", [], {})
        return {name: value for name, value in cleaned.items() if name in self.kind_fields() and value not in empty}

    def kind_fields(self) -> tuple[str, ...]:
        """The fields that the schema brings."""
        return tuple(name for name in self.fields if name not in OF_EVERY_KIND)

    def secret_fields(self) -> tuple[str, ...]:
        """The fields that hold secrets."""
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
                self.add_error(self.field_at(one["loc"]), self.error_text(one))
        except DomainError as error:  # the stored secret can't be decrypted
            self.add_error(next(iter(self.secret_fields()), None), error.detail)
        return cleaned

    def check(self, cleaned: Mapping[str, Any]) -> None:
        """Further checks of a kind's own; errors are added with `add_error`."""

    def field_at(self, loc: Sequence[str | int]) -> str | None:
        """The field that an error of the config belongs to; None: the form as a whole."""
        return str(loc[0]) if loc and str(loc[0]) in self.fields else None

    def error_text(self, error: FieldError) -> Any:
        """An error of the config, for the form."""
        return error["msg"]


class NamesField(forms.CharField):
    """A list of names, separated by commas or spaces."""

    widget = forms.TextInput(attrs=PLAIN_TEXT)

    def clean(self, value: Any) -> list[str]:
        return [name for name in str(super().clean(value)).replace(",", " ").split() if name]


def schema_form(kind: Kind) -> type[BackendForm]:
    """A form with a field for each of the schema's: `title` is its label, `description` its help text."""
    schema = kind.schema.model_fields
    fields = {name: _form_field(name, field) for name, field in schema.items()}
    shown: list[tuple[Any, dict[str, Any]]] = [*BackendForm.fieldsets]
    if fields:
        shown.append((_("Settings"), {"fields": tuple(fields)}))
    return type(f"{type(kind).__name__}Form", (BackendForm,), {**fields, "kind": kind, "fieldsets": tuple(shown)})


def _form_field(name: str, field: FieldInfo) -> forms.Field:
    """The form field for a pydantic one: texts, numbers, switches, choices, lists of names and secrets."""
    required = field.is_required()
    shared: dict[str, Any] = {
        "label": field.title or name.replace("_", " ").capitalize(),
        "help_text": field.description or "",
        "required": required,
    }
    if not required and field.get_default(call_default_factory=True) is not None:
        shared["initial"] = field.get_default(call_default_factory=True)
    of = _without_none(field.annotation)
    if of is SecretStr:
        widget = forms.PasswordInput(attrs={"autocomplete": "new-password", "class": "vTextField"})
        # The stored one stays where it is left empty: the schema knows whether one is missing.
        return forms.CharField(**{**shared, "required": False}, widget=widget)
    if of is bool:
        return forms.BooleanField(**{**shared, "required": False})
    if of is int:
        return forms.IntegerField(**shared)
    if of is float:
        return forms.FloatField(**shared)
    if get_origin(of) is Literal:
        return forms.ChoiceField(**shared, choices=[(choice, str(choice)) for choice in get_args(of)])
    if get_origin(of) in (list, tuple, set, frozenset):
        return NamesField(**{**shared, "initial": _joined(shared.get("initial"))})
    return forms.CharField(**shared, widget=forms.TextInput(attrs=PLAIN_TEXT))


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [one for one in get_args(annotation) if one is not type(None)]
        return rest[0] if len(rest) == 1 else annotation
    return annotation


def _joined(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(map(str, value or ()))
