"""The admin's view of runs: to look and search. What the mover and the services write is read-only here."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from dstackweb.accounts.models import Role, User
from dstackweb.lib.errors import DomainError
from dstackweb.lib.pages import ReadOnly
from dstackweb.runs import concurrency, services
from dstackweb.runs.models import Allocation, Archive, Job, Queue, QueueCount, QueueEvent, Run, RunEvent, Verdict
from dstackweb.runs.queue import queues
from dstackweb.runs.states import ACTIVE


def _user(request: HttpRequest) -> User:
    assert isinstance(request.user, User), "the admin site lets nobody else in"
    return request.user


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
    list_display = ("name", "project", "ageing_minutes", "paused", "draining", *queues.LIMITS, "waiting", "running")
    list_filter = ("project", "paused", "draining")
    list_select_related = ("project", "count")
    search_fields = ("name", "project__name")

    def get_readonly_fields(self, request: HttpRequest, obj: Queue | None = None) -> tuple[str, ...]:
        return ("project", "name") if obj else ()

    def has_delete_permission(self, request: HttpRequest, obj: Queue | None = None) -> bool:
        """Only a queue that never held a run may go."""
        return obj is not None and not obj.runs.exists() and super().has_delete_permission(request, obj)

    def save_model(self, request: HttpRequest, obj: Queue, form: Any, change: bool) -> None:
        """What was changed, and nothing else, goes the way of all changes of a queue."""
        user = _user(request)
        if change:
            settings = {name: getattr(obj, name) for name in form.changed_data}
            queues.change_queue(obj, user, Role.ADMIN, **settings)
            return
        settings = {name: getattr(obj, name) for name in queues.SETTINGS}
        obj.pk = queues.create_queue(obj.project, user, Role.ADMIN, obj.name, **settings).pk

    @admin.display(description="waiting")
    def waiting(self, queue: Queue) -> int:
        return queue.count.submitted + queue.count.pending

    @admin.display(description="running")
    def running(self, queue: Queue) -> int:
        return queue.count.running


class PriorityForm(forms.ModelForm[Run]):
    """The one thing of a run that is changed here, and the run as it was seen."""

    priority = forms.IntegerField(min_value=0, max_value=100, help_text="0–100; higher goes first.")
    seen = forms.CharField(widget=forms.HiddenInput)

    class Meta:
        model = Run
        fields = ("priority",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["seen"].initial = concurrency.etag(self.instance)

    def clean(self) -> None:
        super().clean()
        run = Run.objects.select_related("queue").get(pk=self.instance.pk)
        if not concurrency.matches(self.cleaned_data.get("seen", ""), run):
            raise forms.ValidationError(concurrency.stale_error(run).detail)


@admin.register(Run)
class RunAdmin(ReadOnly):
    """To look and search. On the page of an active run its priority can be changed."""

    form = PriorityForm
    list_display = ("name", "project", "queue", "user", "status", "priority", "attempt", "exit_code", "submitted_at")
    list_filter = ("status", "project", "queue__name", "termination_reason")
    list_select_related = ("project", "queue__project", "user")
    search_fields = ("name", "uid", "user__username")
    date_hierarchy = "submitted_at"
    show_full_result_count = False
    exclude = ("env_secret", "idempotency_key", "body_digest")
    inlines = (JobInline, EventInline)

    def has_change_permission(self, request: HttpRequest, obj: Run | None = None) -> bool:
        active = obj is None or obj.status in ACTIVE
        return active and admin.ModelAdmin.has_change_permission(self, request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Run | None = None) -> tuple[str, ...]:
        hidden = {*self.exclude, "priority"}
        return tuple(field.name for field in Run._meta.concrete_fields if field.name not in hidden)

    def save_model(self, request: HttpRequest, obj: Run, form: Any, change: bool) -> None:
        """The priority alone, as anywhere else: with its place in the queue, and written down."""
        if "priority" not in form.changed_data:
            return
        try:
            services.set_priority(obj, _user(request), Role.ADMIN, obj.priority, form.cleaned_data["seen"])
        except DomainError as error:
            messages.error(request, error.detail)


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


@admin.register(QueueEvent)
class QueueEventAdmin(ReadOnly):
    list_display = ("at", "queue", "actor", "data")
    list_filter = ("queue",)
    list_select_related = ("queue__project", "actor")

    def get_queryset(self, request: HttpRequest) -> QuerySet[QueueEvent]:
        return super().get_queryset(request).order_by("-id")


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
