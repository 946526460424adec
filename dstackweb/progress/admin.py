"""Scopes and reporters in the admin, read-only: who reports, and which ended attempts are settled."""

from __future__ import annotations

import datetime as dt

from django.contrib import admin
from django.utils.translation import gettext_lazy

from dstackweb.lib.admin import ReadOnly
from dstackweb.lib.times import to_moment
from dstackweb.progress.models import Reporter, Scope


@admin.register(Scope)
class ScopeAdmin(ReadOnly):
    list_display = (
        "project", "run_id", "attempt", "total", "processing", "erred", "prefixes", "groups", "tasks", "ended",
        "settled",
    )  # fmt: skip
    list_filter = ("settled", "project")
    list_select_related = ("project",)
    search_fields = ("=run_id",)
    ordering = ("-id",)
    show_full_result_count = False

    @admin.display(description=gettext_lazy("ended"), ordering="ended_ms")
    def ended(self, scope: Scope) -> dt.datetime | None:
        return to_moment(scope.ended_ms) if scope.ended_ms else None


@admin.register(Reporter)
class ReporterAdmin(ReadOnly):
    list_display = ("name", "scope", "latest_report", "has_ended")
    list_select_related = ("scope__project",)
    search_fields = ("name", "=scope__run_id")
    ordering = ("-id",)
    show_full_result_count = False

    @admin.display(description=gettext_lazy("latest report"), ordering="last_ms")
    def latest_report(self, reporter: Reporter) -> dt.datetime | None:
        return to_moment(reporter.last_ms) if reporter.last_ms else None

    @admin.display(description=gettext_lazy("has ended"), boolean=True)
    def has_ended(self, reporter: Reporter) -> bool:
        return reporter.ended_seq is not None
