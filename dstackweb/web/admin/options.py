"""What all models of the admin site share: how lists show values, links to pages, history from the audit log."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.contrib.auth.models import Permission
from django.db import models
from django.db.models import Model
from django.forms import CheckboxSelectMultiple, SplitDateTimeField
from django.http import HttpRequest, HttpResponse
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _

from dstackweb.accounts.models import User
from dstackweb.audit.models import AuditEntry
from dstackweb.audit.recorder import WATCHED, name_of
from dstackweb.lib.admin import ReadOnly
from dstackweb.web.admin import codes, overview, permissions
from dstackweb.web.admin.cells import LABELS, cell
from dstackweb.web.admin.links import page_for

MOST_ENTRIES = 100
"""Of an object's history; the audit log has all."""


class ProductAdmin(admin.ModelAdmin[Any]):
    """A list never counts all rows: a filtered one of 100,000 runs says how many match, and not of how many."""

    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # each would count all rows
    list_per_page = 50
    view_on_site = False  # `product_url` is
    object_history_template = "admin/object_history.html"

    def get_list_display(self, request: HttpRequest) -> Any:
        names = super().get_list_display(request)
        shown: dict[str, Any] = self.__dict__.setdefault("_columns", {})
        for place, name in enumerate(names):
            if isinstance(name, str) and name not in shown:
                shown[name] = cell(self.model, name, self, place == 0)
        return [shown.get(name, name) if isinstance(name, str) else name for name in names]

    def get_action_choices(self, request: HttpRequest, default_choices: Any = None) -> Any:
        return super().get_action_choices(request, [("", str(_("Choose an action")))])

    def get_list_filter(self, request: HttpRequest) -> Any:
        return [codes.worded(self.model, listed) for listed in super().get_list_filter(request)]

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """With filters that are named like the columns."""
        listed = super().get_changelist_instance(request)
        for each in listed.filter_specs:
            each.title = LABELS.get(getattr(each, "field_path", ""), each.title)
        return listed

    def get_list_select_related(self, request: HttpRequest) -> Any:
        """Rows of lists name others: these come with the same query."""
        given = super().get_list_select_related(request)
        if given:
            return given
        foreign = {field.name for field in self.model._meta.fields if isinstance(field, models.ForeignKey)}
        return [
            name for name in super().get_list_display(request) if isinstance(name, str) and name in foreign
        ] or False

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **more: Any) -> Any:
        field = super().formfield_for_dbfield(db_field, request, **more)
        if field is not None and db_field.name in LABELS:
            field.label = capfirst(LABELS[db_field.name])
        word = codes.CODES.get((self.model, db_field.name))
        if word is not None and field is not None and db_field.choices:
            field.widget.choices = codes.labelled(db_field.choices, word)
        if isinstance(field, SplitDateTimeField):
            for widget, label in zip(field.widget.widgets, (_("Date"), _("Time")), strict=True):
                widget.attrs["aria-label"] = label
        return field

    def formfield_for_manytomany(self, db_field: Any, request: HttpRequest, **more: Any) -> Any:
        """Checkboxes: there are few groups, and permissions are those of the site's pages."""
        if db_field.related_model is Permission:
            more |= {"form_class": permissions.PermissionsField, "queryset": permissions.offered()}
            return db_field.formfield(**more)
        return super().formfield_for_manytomany(db_field, request, **{"widget": CheckboxSelectMultiple, **more})

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **more: Any) -> Any:
        row: Model | None = more.get("obj")
        context["is_fixed"] = isinstance(self, Fixed)
        context["adminform"] = codes.Worded(context["adminform"])
        context["inline_admin_formsets"] = [codes.Worded(formset) for formset in context["inline_admin_formsets"]]
        if row is not None and isinstance(request.user, User):
            context["product_url"] = page_for(row, request.user)
        return super().render_change_form(request, context, *args, **more)

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """What the audit log has of the object, from wherever it was changed."""
        row = self.get_object(request, unquote(object_id))
        entries = overview.recent(history_of(row)) if row is not None and type(row) in WATCHED else None
        return super().history_view(request, object_id, {**(extra_context or {}), "entries": entries, "row": row})


class Fixed(ReadOnly, ProductAdmin):
    """Only the product itself changes these."""

    actions = None


def history_of(row: Model) -> list[AuditEntry]:
    """The newest entries of the audit log about a row of a watched model."""
    watched = WATCHED[type(row)]
    found = AuditEntry.objects.filter(kind=watched.kind, name=name_of(row)[:200])
    project = getattr(row, "project", None)
    if project is not None:
        found = found.filter(project_id=project.pk)
    return list(found.order_by("-id")[:MOST_ENTRIES])
