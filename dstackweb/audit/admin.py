"""The audit log in the admin: entries are never changed."""

from __future__ import annotations

from django.contrib import admin

from dstackweb.audit.models import AuditEntry
from dstackweb.lib.pages import ReadOnly


@admin.register(AuditEntry)
class AuditEntryAdmin(ReadOnly):
    list_display = ("at", "actor_name", "kind", "name", "action", "changes", "project_name", "address")
    list_filter = ("kind", "action")
    search_fields = ("name", "actor_name", "project_name", "address")
    ordering = ("-id",)
