"""Profiles on the admin site: a field for each setting, or the notation of the run file."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dstackweb.profiles import forms as forms_of_profiles
from dstackweb.profiles.forms import FieldsForm, YamlForm
from dstackweb.profiles.models import Profile
from dstackweb.profiles.services import make_default
from dstackweb.spec.run_fields import ProfileFields


def _help() -> str:
    """Links to the list of backends, which this app doesn't import."""
    keys = ", ".join(ProfileFields.model_fields)
    text = _("One “key: value” per line, as in a run file. Keys: {}. For the names of backends see {}.")
    return format_html(text, keys, _backends())


def _backends_help() -> str:
    """The documentation's words, with the list of backends."""
    text = forms_of_profiles.code(_(forms_of_profiles.description(("backends",))))
    return format_html("{} {}", text, _backends())


def _backends() -> str:
    return format_html('<a href="{}">{}</a>', reverse("admin:backends_backend_changelist"), _("Backends"))


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
        fits = profile is None or forms_of_profiles.fits_form(profile.settings)
        return request.GET.get("as") == "yaml" or not fits or not self.has_change_permission(request, profile)

    def get_form(self, request: HttpRequest, obj: Profile | None = None, change: bool = False, **more: Any) -> Any:
        as_yaml = self.as_yaml(request, obj)
        form = super().get_form(request, obj, change, **{**more, "form": YamlForm if as_yaml else FieldsForm})
        name, text = ("settings", _help()) if as_yaml else ("backends", _backends_help())
        if name in form.base_fields:
            form.base_fields[name].help_text = text
        return form

    def get_fieldsets(self, request: HttpRequest, obj: Profile | None = None) -> Any:
        own = (None, {"fields": (*forms_of_profiles.OWN, "settings")})
        return [own] if self.as_yaml(request, obj) else forms_of_profiles.FIELDSETS

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
