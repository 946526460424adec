"""The admin site: areas instead of Django's apps, the reader's time zone, one way to show each kind of value."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.contrib import admin
from django.db.models import Model
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect
from django.template.response import SimpleTemplateResponse
from django.urls import path, reverse
from django.utils import timezone
from django.utils.translation import gettext as _, gettext_lazy, gettext_noop

from dstackweb.accounts.access import visible_projects
from dstackweb.accounts.models import User
from dstackweb.audit.models import AuditAction, AuditEntry
from dstackweb.runs.history import parse_zone
from dstackweb.web import health
from dstackweb.web.admin import previews
from dstackweb.web.admin.areas import AREA_OF, AREAS, UNUSED, Area, name_of
from dstackweb.web.admin.options import Fixed, ProductAdmin
from dstackweb.web.admin.previews import ProjectDeletion
from dstackweb.web.common.pages import reader_zone
from dstackweb.wording.audit import described

OF_OTHERS = (
    gettext_noop("After you’ve created a user, you’ll be able to edit more user options."),
    *(gettext_noop("Function"), gettext_noop("Arguments"), gettext_noop("Keyword arguments")),
    *(gettext_noop("Task id"), gettext_noop("Queue options"), gettext_noop("Short result")),
)
"""Texts of other packages' pages that these have not in all our languages; the names of models are found."""
OWN_PAGES: dict[str, tuple[type[admin.ModelAdmin[Any]], ...]] = {"accounts.project": (ProjectDeletion,)}
"""What models have of this room, beside what their own says."""
MOST_COUNTED = 1000
"""Rows that are counted of a model; more are shown as `1,000+`, so that large tables cost no more than small ones."""
RECENT = 8
FAULTS = 5
CHANGES = (AuditAction.CREATED, AuditAction.CHANGED, AuditAction.DELETED)
"""And no sign-ins."""


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
        preview = path("profiles/profile/preview/", self.admin_view(previews.preview), name="profile-preview")
        return [preview, *super().get_urls()]

    def index(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        shown = overview(request)
        return super().index(request, {**(extra_context or {}), **shown})


def zone_of(request: HttpRequest) -> Any:
    """Of the reader's account, else of their browser, else UTC."""
    own = request.user.time_zone if isinstance(request.user, User) else ""
    with contextlib.suppress(ValueError):
        if own:
            return parse_zone(own)
    return reader_zone(request)


def _as_app(area: Area, allowed: dict[str, Any]) -> dict[str, Any]:
    models = [
        {**allowed[entry.model], "name": name_of(entry), "help": entry.help, "label": entry.model}
        for entry in area.entries
        if entry.model in allowed
    ]
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


def overview(request: HttpRequest) -> dict[str, Any]:
    user = request.user
    assert isinstance(user, User), "the admin site requires a sign-in"
    project = visible_projects(user).order_by("name").first()
    found: dict[str, Any] = {"counts": dict(_counts(request)), "home": project}
    if project is None:
        return found | {"faults": [], "recent": []}
    lines = [line for area in health.areas(project) for line in area.faults]
    lines.sort(key=lambda line: -health.TONES.index(line.check.tone))
    found |= {"faults": lines[:FAULTS], "more_faults": max(0, len(lines) - FAULTS)}
    if user.has_perm("audit.view_auditentry"):
        found["recent"] = described(AuditEntry.objects.filter(action__in=CHANGES).order_by("-id")[:RECENT])
        found["audit_url"] = reverse("admin:audit_auditentry_changelist")
    return found


def _counts(request: HttpRequest) -> Iterator[tuple[str, str]]:
    """By the label of each model that the reader may see."""
    for area in AREAS:
        for entry in area.entries:
            model = apps.get_model(entry.model)
            options = admin.site._registry.get(model)
            if not area.fixed and options is not None and options.has_view_permission(request):
                yield entry.model, counted(model)


def counted(model: type[Model]) -> str:
    """The number of rows, exact up to MOST_COUNTED."""
    number = model._default_manager.order_by()[: MOST_COUNTED + 1].count()
    return _("%s+") % f"{MOST_COUNTED:,}" if number > MOST_COUNTED else f"{number:,}"
