"""What staff may be allowed on the admin site: per model of its areas, what its pages let a deployment admin do."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import Permission
from django.db.models import QuerySet
from django.forms import CheckboxSelectMultiple, ModelMultipleChoiceField
from django.forms.models import ModelChoiceIterator, ModelChoiceIteratorValue
from django.utils.html import format_html
from django.utils.text import capfirst
from django.utils.translation import pgettext_lazy

from dstackweb.accounts.models import User
from dstackweb.web.admin.areas import AREAS, Entry

ACTIONS = {
    "view": pgettext_lazy("permission", "View"),
    "add": pgettext_lazy("permission", "Add"),
    "change": pgettext_lazy("permission", "Change"),
    "delete": pgettext_lazy("permission", "Delete"),
}
ALL: Any = SimpleNamespace(user=User(is_superuser=True))
"""Stands for the request of a deployment admin, of which options read only the user."""


class Line(NamedTuple):
    """A model's name, and the actions of ACTIONS that its pages have, by the key of their permission."""

    name: str
    actions: dict[tuple[str, str], str]


def name_of(entry: Entry) -> str:
    """What lists call a model."""
    return str(entry.name or capfirst(apps.get_model(entry.model)._meta.verbose_name_plural))


def lines() -> list[Line]:
    """In the order of the areas."""
    return [Line(name_of(entry), dict(_actions(entry.model))) for area in AREAS for entry in area.entries]


def _actions(label: str) -> Iterator[tuple[tuple[str, str], str]]:
    """On the model's own pages, and on those of others that have its rows."""
    model = apps.get_model(label)
    options: list[Any] = [admin.site._registry[model]]
    for owner in admin.site._registry.values():
        options += [inline(owner.model, admin.site) for inline in owner.inlines if inline.model is model]
    for action in ACTIONS:
        if any(_allows(one, action) for one in options):
            yield (model._meta.app_label, f"{action}_{model._meta.model_name}"), action


def _allows(options: Any, action: str) -> bool:
    """Of no row in particular; only inlines ask for one before it is added."""
    if action == "delete" and not getattr(options, "can_delete", True):
        return False
    row = () if action == "add" and isinstance(options, admin.ModelAdmin) else (None,)
    return bool(getattr(options, f"has_{action}_permission")(ALL, *row))


def offered() -> QuerySet[Permission]:
    """The permissions that the site's pages ask for."""
    keys = {key for line in lines() for key in line.actions}
    found = Permission.objects.filter(codename__in={codename for _label, codename in keys})
    rows = found.values_list("pk", "content_type__app_label", "codename")
    return Permission.objects.filter(pk__in=[pk for pk, *key in rows if tuple(key) in keys])


class _ByModel(ModelChoiceIterator):  # type: ignore[type-arg]  # not subscriptable at run time
    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        rows = {(row.content_type.app_label, row.codename): row for row in self.queryset.select_related("content_type")}
        for line in lines():
            boxes = [
                (
                    ModelChoiceIteratorValue(rows[key].pk, rows[key]),
                    format_html('{}<span class="visually-hidden"> {}</span>', ACTIONS[action], line.name),
                )
                for key, action in line.actions.items()
                if key in rows
            ]
            if boxes:
                yield line.name, boxes


class PermissionsField(ModelMultipleChoiceField):  # type: ignore[type-arg]  # not subscriptable at run time
    """Permissions as a line of checkboxes for each model."""

    iterator = _ByModel
    widget = CheckboxSelectMultiple(attrs={"class": "dw-permissions"})
