"""Cloud instances in the admin, read-only: runs launch and end them."""

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest

from dstackweb.backends.models import Instance


@admin.register(Instance)
class InstanceAdmin(admin.ModelAdmin[Instance]):
    list_display = (
        "instance_type", "status", "backend", "region", "is_spot", "price", "project", "cloud_id", "launched_at",
        "ended_at", "why",
    )  # fmt: skip
    list_filter = ("status", "backend", "project", "is_spot", "region", "why")
    list_select_related = ("backend", "project")
    search_fields = ("cloud_id", "instance_type", "id", "holder", "error")
    date_hierarchy = "created_at"
    fieldsets = (
        (None, {"fields": ("id", "cloud_id", "status", "why", "error", "holder", "project")}),
        ("Offer", {"fields": ("backend", "region", "zone", "instance_type", "is_spot", "price")}),
        (
            "Hardware",
            {"fields": ("cpus", "memory_mib", "gpu_name", "gpu_count", "gpu_memory_mib", "gpus", "address", "seen_at")},
        ),
        (
            "Lifecycle",
            {
                "fields": (
                    "created_at", "launched_at", "ready_at", "idle_since", "idle_until", "interrupted_at", "ended_at",
                )
            },
        ),
    )  # fmt: skip

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Instance | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Instance | None = None) -> bool:
        return False
