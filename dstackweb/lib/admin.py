"""Parts of the admin site: lists without changes, their filters and pages, and names in the reader's language."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.apps import apps
from django.contrib import admin
from django.core.paginator import Page, Paginator
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy

OURS = "dstackweb."
texts: set[str] = set()
"""What was found, in English, for the catalogue."""


class ReadOnly(admin.ModelAdmin[Any]):
    """Lists, filters and search of models that only services change."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


def register_list(
    model: type[Model],
    columns: str,
    *,
    filters: str = "",
    codes: Sequence[Any] = (),
    joined: str = "",
    search: str = "",
    **more: Any,
) -> None:
    """Register a read-only list of `model`; names are separated by blanks, `codes` are filters of other kinds."""
    options = {
        "list_display": columns.split(),
        "list_filter": [*filters.split(), *codes],
        "list_select_related": joined.split(),
        "search_fields": search.split(),
        **more,
    }
    admin.site.register(model, type(f"{model.__name__}Admin", (ReadOnly,), options))


class KeysFirst(Paginator[Any]):
    """Pages of a list of long rows: their keys are found and sorted in an index, and only the page's rows are read.

    `rows` reads them. It has no filter: the database would look for the keys among all that match it.
    """

    def __init__(self, keys: QuerySet[Any], per_page: int, rows: QuerySet[Any], **more: Any) -> None:
        super().__init__(keys, per_page, **more)
        self.rows = rows

    def page(self, number: int | str) -> Page[Any]:
        number = self.validate_number(number)
        bottom = (number - 1) * self.per_page
        found: Any = self.object_list
        keys = list(found.values_list("pk", flat=True)[bottom : bottom + self.per_page])
        rows = self.rows.in_bulk(keys)
        return Page([rows[key] for key in keys if key in rows], number, self)


def code_filter(field: str, codes: Iterable[str]) -> type[admin.SimpleListFilter]:
    """A filter by a column of codes, which Django's own would look for in all rows of the table."""
    listed = [(str(code), str(code)) for code in codes]

    class CodeFilter(admin.SimpleListFilter):
        title = gettext_lazy(field.replace("_", " "))  # of the models and their fields
        parameter_name = field

        def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
            return listed

        def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
            return queryset.filter(**{field: self.value()}) if self.value() else queryset

    return CodeFilter


def translate_names() -> None:
    """Let the names of models and their fields, and what helps with them, be translated when they are shown.

    Django makes these names of the Python ones, so there is no text to mark. Migrations keep the English ones.
    """
    for owner, name in _places():
        text = getattr(owner, name)
        if name == "verbose_name_plural" and not isinstance(owner.verbose_name, Promise):
            text = str(text)  # Django adds an s when it is shown
        if text and not isinstance(text, Promise):
            texts.add(text)
            setattr(owner, name, gettext_lazy(text))


def of_others() -> set[str]:
    """Those of other packages on the site, as they are without a language. Django's own it has in all our languages."""
    models = [model for model in admin.site._registry if not model.__module__.startswith((OURS, "django."))]
    models += [model._meta.concrete_model for model in models if model._meta.concrete_model]  # whose fields a proxy has
    return {str(getattr(owner, name)) for owner, name in _names(models)} - {""}


def _places() -> Iterator[tuple[Any, str]]:
    """The attributes that have ours."""
    for config in apps.get_app_configs():
        if config.name.startswith(OURS):
            yield config, "verbose_name"
    inlines = (inline.model for shown in admin.site._registry.values() for inline in shown.inlines)
    models = dict.fromkeys((*admin.site._registry, *inlines))
    yield from _names(model for model in models if model.__module__.startswith(OURS))


def _names(models: Iterable[type[Model]]) -> Iterator[tuple[Any, str]]:
    """The attributes that models and their fields have; a model's plural before its singular."""
    for model in models:
        yield model._meta, "verbose_name_plural"
        yield model._meta, "verbose_name"
        for field in (*model._meta.local_fields, *model._meta.local_many_to_many):
            yield field, "verbose_name"
            yield field, "help_text"
