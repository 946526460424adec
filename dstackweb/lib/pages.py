"""Parts of Django's pages: admin pages without changes, and names of static files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.core.files.base import ContentFile
from django.core.paginator import Page, Paginator
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy
from whitenoise.storage import CompressedManifestStaticFilesStorage

STYLES, SCRIPT = "site.css", "app.js"
"""What each page loads."""


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


def page_sources() -> list[Path]:
    """The files whose words may be classes or variables that pages use."""
    base = Path(settings.BASE_DIR)
    patterns = ("templates/**/*.html", "dstackweb/web/**/*.py", "static/js/*.js", "static/*.js", "static/*.css")
    return sorted({path for pattern in patterns for path in base.glob(pattern)} - {base / "static" / STYLES})


class HashedStorage(CompressedManifestStaticFilesStorage):  # type: ignore[misc]  # whitenoise has no types
    """Static files with a hash of their content in the name, so that browsers cache them forever.

    `site.css` and `app.js` have all that they import in them (`lib.bundles`), so that a page needs few requests.
    """

    def post_process(self, paths: dict[str, Any], dry_run: bool = False, **options: Any) -> Iterator[Any]:
        if not dry_run:
            paths = self._bundled(paths)
        yield from super().post_process(paths, dry_run, **options)

    def _bundled(self, paths: dict[str, Any]) -> dict[str, Any]:
        """The files to be served, with both bundles in the place of their parts."""
        parts = set()

        def read(path: str) -> str:
            parts.add(path)
            storage, name = paths[path]
            with storage.open(name) as source:
                return bytes(source.read()).decode()

        from dstackweb.lib import bundles  # late: no process but the one that collects static files parses CSS

        used = bundles.words(path.read_text() for path in page_sources())
        made = {STYLES: bundles.stylesheet(STYLES, read, used), SCRIPT: bundles.script(SCRIPT, read)}
        for name, text in made.items():
            self.delete(name)
            self._save(name, ContentFile(text.encode()))
        return {path: where for path, where in paths.items() if path not in parts} | {
            name: (self, name) for name in made
        }
