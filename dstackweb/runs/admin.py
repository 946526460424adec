"""The admin's view of runs: to look and search. What the mover and the services write is read-only here."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from dstackweb.runs import hints
from dstackweb.runs.models import Allocation, Archive, Job, Queue, QueueCount, Run, RunEvent, Verdict
from dstackweb.runs.transitions import touch


class ReadOnly(admin.ModelAdmin[Any]):
    """Lists, filters and search, and no way to write past the services."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class ReadOnlyInline(admin.TabularInline[Any, Any]):
    extra = 0
    can_delete = False
    show_change_link = True

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class JobInline(ReadOnlyInline):
    model = Job
    fields = ("attempt", "node", "status", "host", "cpus", "memory_mib", "gpus", "exit_code", "termination_reason")


class EventInline(ReadOnlyInline):
    model = RunEvent
    fields = ("at", "kind", "actor", "attempt", "node", "data")


@admin.register(Queue)
class QueueAdmin(admin.ModelAdmin[Queue]):
    list_display = ("name", "project", "ageing_minutes", "paused", "waiting", "running")
    list_filter = ("project", "paused")
    list_select_related = ("project", "count")
    search_fields = ("name", "project__name")

    def get_readonly_fields(self, request: HttpRequest, obj: Queue | None = None) -> tuple[str, ...]:
        """The ageing step of a queue with runs is changed where they are ranked anew with it."""
        return ("project", "name", "ageing_minutes") if obj else ()

    def has_delete_permission(self, request: HttpRequest, obj: Queue | None = None) -> bool:
        """Only a queue that never held a run may go."""
        return obj is not None and not obj.runs.exists() and super().has_delete_permission(request, obj)

    def save_model(self, request: HttpRequest, obj: Queue, form: Any, change: bool) -> None:
        """Write what was changed, since runs are submitted meanwhile, and let lists and passes know."""
        obj.save(update_fields=form.changed_data if change else None)
        QueueCount.objects.get_or_create(queue=obj)
        touch(obj.pk)
        hints.want_pass()

    @admin.display(description="waiting")
    def waiting(self, queue: Queue) -> int:
        return queue.count.submitted + queue.count.pending

    @admin.display(description="running")
    def running(self, queue: Queue) -> int:
        return queue.count.running


@admin.register(Run)
class RunAdmin(ReadOnly):
    list_display = ("name", "project", "queue", "user", "status", "priority", "attempt", "exit_code", "submitted_at")
    list_filter = ("status", "project", "queue__name", "termination_reason")
    list_select_related = ("project", "queue__project", "user")
    search_fields = ("name", "uid", "user__username")
    date_hierarchy = "submitted_at"
    show_full_result_count = False
    exclude = ("env_secret", "idempotency_key", "body_digest")
    inlines = (JobInline, EventInline)


@admin.register(Job)
class JobAdmin(ReadOnly):
    list_display = ("run", "attempt", "node", "status", "host", "cpus", "memory_mib", "exit_code", "placed_at")
    list_filter = ("status", "host", "termination_reason")
    list_select_related = ("run", "host")
    search_fields = ("id", "run__name")
    show_full_result_count = False
    exclude = ("claim_nonce",)


@admin.register(Allocation)
class AllocationAdmin(ReadOnly):
    list_display = ("job", "host", "gpu", "cpus", "memory_mib")
    list_filter = ("host",)
    list_select_related = ("job__run", "host", "gpu__host")
    search_fields = ("job__run__name", "gpu__uuid")


@admin.register(RunEvent)
class RunEventAdmin(ReadOnly):
    list_display = ("at", "run", "kind", "actor", "attempt", "node")
    list_filter = ("kind",)
    list_select_related = ("run", "actor")
    search_fields = ("run__name", "actor__username")
    show_full_result_count = False


@admin.register(Verdict)
class VerdictAdmin(ReadOnly):
    list_display = ("queue", "shape", "reason", "at")
    list_filter = ("reason", "queue")
    list_select_related = ("queue__project",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Verdict]:
        return super().get_queryset(request).order_by("-at")


@admin.register(Archive)
class ArchiveAdmin(ReadOnly):
    list_display = ("sha256", "project", "size", "created_at")
    list_filter = ("project",)
    search_fields = ("sha256",)


@admin.register(QueueCount)
class QueueCountAdmin(ReadOnly):
    list_display = (
        "queue", "pending", "submitted", "provisioning", "running", "terminating", "done", "failed", "terminated"
    )  # fmt: skip
    list_select_related = ("queue__project",)
