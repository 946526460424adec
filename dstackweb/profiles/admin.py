"""Profiles on the admin site, in the notation of the run file."""

from __future__ import annotations

from typing import Any

import yaml
from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import lazy
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dstackweb.lib.errors import DomainError, Invalid
from dstackweb.profiles.models import Profile
from dstackweb.profiles.services import make_default
from dstackweb.spec.run_fields import ProfileFields
from dstackweb.spec.run_file import parse_profile_settings
from dstackweb.spec.source import read


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
        return super().has_changed(self.prepare_value(initial), data)


def _help() -> str:
    """Links to the list of backends, which this app doesn't import."""
    keys = ", ".join(ProfileFields.model_fields)
    text = _("One `key: value` per line, as in a run file. Keys: {}. For the names in `backends` see {}.")
    return format_html(
        text, keys, format_html('<a href="{}">{}</a>', reverse("admin:backends_backend_changelist"), _("Backends"))
    )


class ProfileForm(forms.ModelForm[Profile]):
    settings = SettingsField(
        required=False,
        help_text=lazy(_help, str)(),
    )

    class Meta:
        model = Profile
        fields = ("name", "project", "is_default", "description", "settings")


@admin.register(Profile)
class ProfileAdmin(admin.ModelAdmin[Profile]):
    form = ProfileForm
    list_display = ("name", "project", "is_default", "sets", "description")
    list_filter = ("is_default", ("project", admin.RelatedOnlyFieldListFilter))
    list_select_related = ("project",)
    search_fields = ("name", "description", "project__name")
    autocomplete_fields = ("project",)
    actions = ("make_default",)

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
