"""Parts of Django's pages: admin pages without changes, and names of static files."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from whitenoise.storage import CompressedManifestStaticFilesStorage


class ReadOnly(admin.ModelAdmin[Any]):
    """Lists, filters and search of models that only services change."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class HashedStorage(CompressedManifestStaticFilesStorage):  # type: ignore[misc]  # whitenoise has no types
    """Static files with a hash of their content in the name, so that browsers cache them forever.

    Also rewrites imports between JavaScript modules; otherwise pages would mix old and new files.
    """

    support_js_module_import_aggregation = True
