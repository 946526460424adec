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
from django.urls import reverse
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _

from dstackweb.accounts.access import visible_projects
from dstackweb.accounts.models import Invite, Membership, Project, ProjectSecret, SavedView, User
from dstackweb.audit.models import AuditEntry
from dstackweb.audit.recorder import WATCHED, name_of
from dstackweb.backends.models import Backend, Gpu, Host, HostEvent, Instance
from dstackweb.gpus.models import ProjectPolicies
from dstackweb.lib.admin import ReadOnly
from dstackweb.profiles.models import Profile
from dstackweb.runs.models import Allocation, Job, Queue, QueueEvent, Run, RunEvent, Sweep
from dstackweb.web.admin import areas, cells
from dstackweb.web.admin.cells import LABELS, cell
from dstackweb.wording.audit import described

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
        return [cells.worded(self.model, listed) for listed in super().get_list_filter(request)]

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """With filters that are named like the columns."""
        listed = super().get_changelist_instance(request)
        for each in listed.filter_specs:
            each.title = LABELS.get(getattr(each, "field_path", ""), each.title)
        return listed

    def get_list_select_related(self, request: HttpRequest) -> Any:
        """Rows of lists name others: these come with the same query."""
        given = super().get_list_select_related(request)
        foreign = {field.name for field in self.model._meta.fields if isinstance(field, models.ForeignKey)}
        return given or [name for name in super().get_list_display(request) if name in foreign] or False

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **more: Any) -> Any:
        field = super().formfield_for_dbfield(db_field, request, **more)
        if field is not None and db_field.name in LABELS:
            field.label = capfirst(LABELS[db_field.name])
        word = cells.CODES.get((self.model, db_field.name))
        if word is not None and field is not None and db_field.choices:
            field.widget.choices = cells.labelled(db_field.choices, word)
        if isinstance(field, SplitDateTimeField):
            for widget, label in zip(field.widget.widgets, (_("Date"), _("Time")), strict=True):
                widget.attrs["aria-label"] = label
        return field

    def formfield_for_manytomany(self, db_field: Any, request: HttpRequest, **more: Any) -> Any:
        """Checkboxes: there are few groups, and permissions are those of the site's pages."""
        if db_field.related_model is Permission:
            more |= {"form_class": areas.PermissionsField, "queryset": areas.offered()}
            return db_field.formfield(**more)
        return super().formfield_for_manytomany(db_field, request, **{"widget": CheckboxSelectMultiple, **more})

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **more: Any) -> Any:
        row: Model | None = more.get("obj")
        context["is_fixed"] = isinstance(self, Fixed)
        context["adminform"] = cells.Worded(context["adminform"])
        context["inline_admin_formsets"] = [cells.Worded(formset) for formset in context["inline_admin_formsets"]]
        if row is not None and isinstance(request.user, User):
            context["product_url"] = page_for(row, request.user)
        return super().render_change_form(request, context, *args, **more)

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """What the audit log has of the object, from wherever it was changed."""
        row = self.get_object(request, unquote(object_id))
        entries = described(history_of(row)) if row is not None and type(row) in WATCHED else None
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


def page_for(row: Model, reader: User) -> str:
    """The address of the page that shows it, if the reader may see that page."""
    row, projects = _shown_with(row), visible_projects(reader)
    project = row if isinstance(row, Project) else getattr(row, "project", None)
    if project is not None and not projects.filter(pk=project.pk).exists():
        return ""
    return _page_of(row, projects.order_by("name").first())


def _shown_with(row: Any) -> Model:
    """The row on whose page it is."""
    match row:
        case Job() | RunEvent():
            return row.run
        case Allocation():
            return row.job.run
        case QueueEvent():
            return row.queue
        case HostEvent():
            return row.host
    return row  # type: ignore[no-any-return]


def _page_of(row: Model, home: Project | None) -> str:
    """Empty if there is none. `home` is the reader's project, for what belongs to no project."""
    match row:
        case Run():
            return reverse("web:run", args=[row.project.name, row.uid])
        case Sweep():
            return reverse("web:sweep", args=[row.project.name, row.uid])
        case Queue():
            return reverse("web:queue-settings", args=[row.project.name, row.name])
        case Project():
            return reverse("web:queue", args=[row.name])
        case Membership() | Invite():
            return reverse("members", args=[row.project.name])
        case ProjectSecret():
            return reverse("secrets", args=[row.project.name])
        case ProjectPolicies():
            return reverse("web:utilization", args=[row.project.name])
        case SavedView():
            return f"{reverse('web:queue', args=[row.project.name])}?{row.query}"
        case Instance() if row.project is not None:
            return reverse("web:instances", args=[row.project.name])
        case Profile() if (project := row.project or home) is not None:
            return reverse("web:profiles", args=[project.name])
        case Host() if home is not None:
            return reverse("web:host", args=[home.name, row.name])
        case Gpu() if home is not None:
            return reverse("web:gpu", args=[home.name, row.uuid])
        case Backend() if home is not None:
            return reverse("web:offers", args=[home.name]) + f"?backend={row.name}"
    return ""
