"""The admin site: areas instead of Django's apps, the reader's time zone, one way to show each kind of value."""

from __future__ import annotations

import functools
from typing import Any

from django.contrib import admin
from django.db.models import Model
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect
from django.template.response import SimpleTemplateResponse
from django.urls import path, reverse
from django.utils import timezone
from django.utils.translation import gettext_lazy, gettext_noop

from dstackweb.accounts.models import User
from dstackweb.runs.history import parse_zone
from dstackweb.web.admin import overview, profile_preview
from dstackweb.web.admin.areas import AREA_OF, AREAS, UNUSED, Area
from dstackweb.web.admin.options import Fixed, ProductAdmin
from dstackweb.web.admin.permissions import name_of
from dstackweb.web.admin.project_deletion import ProjectDeletion

OF_OTHERS = (
    gettext_noop("After you’ve created a user, you’ll be able to edit more user options."),
    *(gettext_noop("Function"), gettext_noop("Arguments"), gettext_noop("Keyword arguments")),
    *(gettext_noop("Task id"), gettext_noop("Queue options"), gettext_noop("Short result")),
)
"""Texts of other packages' pages that these have not in all our languages; the names of models are found."""
OWN_PAGES: dict[str, tuple[type[admin.ModelAdmin[Any]], ...]] = {"accounts.project": (ProjectDeletion,)}
"""What models have of this room, beside what their own says."""


class AdminSite(admin.AdminSite):
    site_header = site_title = gettext_lazy("Admin")
    index_title = gettext_lazy("Admin")
    empty_value_display = "–"
    enable_nav_sidebar = False  # the product's own
    final_catch_all_view = True

    def register(self, model_or_iterable: Any, admin_class: Any = None, **options: Any) -> None:
        """As Django does; models then show values as this product's pages do, and fixed ones stay as they are."""
        is_one = isinstance(model_or_iterable, type)
        models: list[type[Model]] = [model_or_iterable] if is_one else list(model_or_iterable)
        for model in models:
            label = model._meta.label_lower
            if label in UNUSED:
                continue
            shared = (Fixed,) if label in AREA_OF and AREA_OF[label].fixed else (ProductAdmin,)
            bases = (*OWN_PAGES.get(label, ()), *shared, admin_class or admin.ModelAdmin)
            super().register(model, type(bases[-1].__name__, bases, {}), **options)

    def admin_view(self, view: Any, cacheable: bool = False) -> Any:
        """Views read and write moments in the reader's time zone; pages are rendered in it, too."""
        checked = super().admin_view(view, cacheable)

        @functools.wraps(checked)
        def inner(request: HttpRequest, *args: Any, **more: Any) -> HttpResponseBase:
            with timezone.override(zone_of(request)):
                response: HttpResponseBase = checked(request, *args, **more)
                if isinstance(response, SimpleTemplateResponse) and not response.is_rendered:
                    response.render()
                return response

        return inner

    def get_app_list(self, request: HttpRequest, app_label: str | None = None) -> list[Any]:
        """The areas in the form of Django's apps, with what the reader may see."""
        allowed = {
            f"{app['app_label']}.{model['object_name']}".lower(): model
            for app in super().get_app_list(request)
            for model in app["models"]
        }
        found = [_as_app(area, allowed) for area in AREAS]
        return [app for app in found if app["models"]]

    def app_index(self, request: HttpRequest, app_label: str, extra_context: Any = None) -> Any:
        """Areas have no page of their own: the index shows them."""
        return redirect("admin:index")

    def get_urls(self) -> list[Any]:
        preview = path("profiles/profile/preview/", self.admin_view(profile_preview.preview), name="profile-preview")
        return [preview, *super().get_urls()]

    def index(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        shown = overview.overview(request)
        return super().index(request, {**(extra_context or {}), **shown})


def zone_of(request: HttpRequest) -> Any:
    """Of the reader's account, else of their browser, else UTC."""
    own = request.user.time_zone if isinstance(request.user, User) else ""
    for name in (own, request.COOKIES.get("zone", "")):
        try:
            return parse_zone(name) if name else timezone.get_default_timezone()
        except ValueError:
            continue
    return timezone.get_default_timezone()


def _as_app(area: Area, allowed: dict[str, Any]) -> dict[str, Any]:
    models = []
    for entry in area.entries:
        model = allowed.get(entry.model)
        if model is not None:
            models.append({**model, "name": name_of(entry), "help": entry.help, "label": entry.model})
    return {
        "name": area.label,
        "app_label": area.key,
        "app_url": f"{reverse('admin:index')}#{area.key}",
        "has_module_perms": bool(models),
        "help": area.help,
        "icon": area.icon,
        "fixed": area.fixed,
        "models": models,
    }
