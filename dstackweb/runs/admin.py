"""Runs in the admin site: lists and search. Settings of queues, and priority and queue of runs, can be changed."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.shortcuts import redirect
from django.utils.translation import gettext_lazy

from dstackweb.accounts.models import Role, User
from dstackweb.lib.admin import KeysFirst, ReadOnly, code_filter, register_list
from dstackweb.lib.errors import DomainError
from dstackweb.lib.forms import MergedForm
from dstackweb.lib.sql import parsed_uid
from dstackweb.runs import concurrency, services
from dstackweb.runs.codes import RunEventKind, WaitReason
from dstackweb.runs.models import (
    Allocation,
    Archive,
    Artifact,
    Job,
    MemberShare,
    PastPlace,
    PastVerdict,
    Queue,
    QueueCount,
    QueueEvent,
    Run,
    RunEvent,
    Sweep,
    SweepCount,
    Verdict,
)
from dstackweb.runs.queue import queues
from dstackweb.runs.states import ACTIVE, WAITING, Reason, RunStatus


def _user(request: HttpRequest) -> User:
    assert isinstance(request.user, User), "the admin site requires a sign-in"
    return request.user


class ReadOnlyInline(admin.TabularInline[Any, Any]):
    extra = 0
    can_delete = False
    show_change_link = True
    has_add_permission = has_change_permission = lambda *_args, **_kwargs: False


class JobInline(ReadOnlyInline):
    model = Job
    fields = ("attempt", "node", "status", "host", "exit_code", "termination_reason")


class EventInline(ReadOnlyInline):
    model = RunEvent
    fields = ("at", "kind", "actor", "attempt", "node")


class QueueForm(MergedForm, forms.ModelForm[Queue]):
    """A queue's settings."""


@admin.register(Queue)
class QueueAdmin(admin.ModelAdmin[Queue]):
    form = QueueForm
    list_display = (
        "name", "project", "waiting", "running", "paused", "draining", "max_running", "max_gpus", "ageing_minutes",
        "fair_share_minutes", "cohort",
    )  # fmt: skip
    list_filter = ("project", "paused", "draining")
    list_select_related = ("project", "count")
    search_fields = ("name", "project__name")
    fieldsets = (
        (None, {"fields": ("project", "name", "paused", "draining", "ageing_minutes")}),
        (gettext_lazy("Limits"), {"fields": ("max_running", "max_gpus", "max_running_per_user", "max_gpus_per_user")}),
        (gettext_lazy("Cohort"), {"fields": ("cohort", "borrow_gpus", "lend_gpus", "reclaim")}),
        (gettext_lazy("Fair share"), {"fields": ("fair_share_minutes", "fair_share_half_life_days")}),
        (gettext_lazy("Preemption"), {"fields": ("preempt_points", "preempt_gpu_hours")}),
    )

    def get_readonly_fields(self, request: HttpRequest, obj: Queue | None = None) -> tuple[str, ...]:
        return ("project", "name") if obj else ()

    def has_delete_permission(self, request: HttpRequest, obj: Queue | None = None) -> bool:
        """Only a queue that never held a run may go."""
        return obj is not None and not obj.runs.exists() and super().has_delete_permission(request, obj)

    def save_model(self, request: HttpRequest, obj: Queue, form: Any, change: bool) -> None:
        """Through the services, which record it."""
        user = _user(request)
        if change:
            queues.change_queue(obj, user, Role.ADMIN, **form.changes)
            return
        settings = {name: getattr(obj, name) for name in queues.SETTINGS}
        obj.pk = queues.create_queue(obj.project, user, Role.ADMIN, obj.name, **settings).pk

    @admin.display(description=gettext_lazy("waiting"))
    def waiting(self, queue: Queue) -> int:
        return queue.count.waiting

    @admin.display(description=gettext_lazy("running"))
    def running(self, queue: Queue) -> int:
        return queue.count.running


class RunForm(forms.ModelForm[Run]):
    """The fields of a run that people change, and its etag as its editor saw it."""

    priority = forms.IntegerField(
        label=gettext_lazy("Priority"), min_value=0, max_value=100, help_text=gettext_lazy("0–100; higher goes first.")
    )
    seen = forms.CharField(widget=forms.HiddenInput)

    class Meta:
        model = Run
        fields = ("priority", "queue")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["seen"].initial = concurrency.etag(self.instance)
        if "queue" in self.fields:  # of a waiting run
            queue: Any = self.fields["queue"]
            queue.queryset = Queue.objects.filter(project=self.instance.project_id)


RUN_PARTS = (
    (None, ("name", "project", "queue", "user", "status", "priority", "attempt")),
    (
        gettext_lazy("Times and end"),
        ("submitted_at", "queued_at", "started_at", "ended_at", "termination_reason", "exit_code", "status_message"),
    ),
    (gettext_lazy("Run file"), ("config_text",)),
)


@admin.register(Run)
class RunAdmin(ReadOnly):
    """The priority of an active run and the queue of a waiting one can be changed; the rest is read-only."""

    form = RunForm
    list_display = ("name", "project", "queue", "user", "status", "priority", "attempt", "exit_code", "submitted_at")
    list_filter = ("status", "project", "queue", code_filter("termination_reason", Reason))
    ordering = ("-id",)
    list_select_related = ("project", "queue__project", "user")
    search_fields = ("name", "uid", "user__username")
    show_full_result_count = False
    exclude = ("env_secret", "idempotency_key", "body_digest")
    inlines = (JobInline, EventInline)

    def get_fieldsets(self, request: HttpRequest, obj: Run | None = None) -> Any:
        """What people look for first; what the scheduler keeps is folded."""
        shown = {field for _title, part in RUN_PARTS for field in part}
        kept = [name for name in self.get_readonly_fields(request, obj) if name not in shown]
        parts: list[Any] = [(title, {"fields": part}) for title, part in RUN_PARTS]
        parts.append((gettext_lazy("Kept by the scheduler"), {"fields": kept, "classes": ("collapse",)}))
        if self.has_change_permission(request, obj):
            # A hidden field is served only where a fieldset names it. A read-only page would look for such a column.
            parts[0][1]["fields"] = (*parts[0][1]["fields"], "seen")
        return parts

    def get_queryset(self, request: HttpRequest) -> QuerySet[Run]:
        """A list sorts many rows: without the columns that it does not show, which are long."""
        found = super().get_queryset(request)
        is_list = request.resolver_match is not None and request.resolver_match.url_name == "runs_run_changelist"
        return found.defer("spec", "provenance", "config_text", "env_secret") if is_list else found

    def get_paginator(
        self, request: HttpRequest, queryset: QuerySet[Run], per_page: int, *args: Any, **more: Any
    ) -> KeysFirst:
        return KeysFirst(queryset, per_page, self.get_queryset(request).select_related(*self.list_select_related))

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Run], search_term: str
    ) -> tuple[QuerySet[Run], bool]:
        """By what one index has, and by a whole uid: searched for as the fields are, each run's row would be read."""
        for word in search_term.split():
            if uid := parsed_uid(word):
                queryset = queryset.filter(uid=uid)
                continue
            users = list(User.objects.filter(username__icontains=word).values_list("pk", flat=True))
            queryset = queryset.filter(Q(name__icontains=word) | Q(user__in=users))
        return queryset, False

    def has_change_permission(self, request: HttpRequest, obj: Run | None = None) -> bool:
        active = obj is None or obj.status in ACTIVE
        return active and admin.ModelAdmin.has_change_permission(self, request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Run | None = None) -> tuple[str, ...]:
        editable = {"priority", "queue"} if obj is not None and obj.status in WAITING else {"priority"}
        hidden = {*self.exclude, *editable}
        return tuple(field.name for field in Run._meta.concrete_fields if field.name not in hidden)

    def changeform_view(self, request: HttpRequest, *args: Any, **more: Any) -> Any:
        """Show what the services refuse above the run as it is now. Nothing of the form is saved then."""
        try:
            return super().changeform_view(request, *args, **more)
        except DomainError as error:
            self.message_user(request, error.detail, messages.ERROR)
            return redirect(request.get_full_path())

    def save_model(self, request: HttpRequest, obj: Run, form: Any, change: bool) -> None:
        """Change queue and priority through the services, which move the run and record it."""
        user, etag = _user(request), form.cleaned_data["seen"]
        run = Run.objects.select_related("queue", "project", "user").get(pk=obj.pk)
        if "queue" in form.changed_data:
            run = services.set_queue(run, user, Role.ADMIN, obj.queue.name, etag)
            etag = concurrency.etag(run)
        if "priority" in form.changed_data:
            services.set_priority(run, user, Role.ADMIN, obj.priority, etag)


register_list(
    Job,
    "run attempt node status host cpus memory_mib exit_code placed_at",
    filters="status host",
    codes=[code_filter("termination_reason", Reason)],
    ordering=("-placed_at",),
    joined="run host",
    search="id run__name",
    show_full_result_count=False,
    exclude=("claim_nonce", "secrets_held"),
)
register_list(
    Allocation,
    "job host gpu cpus memory_mib",
    filters="host",
    joined="job__run host gpu__host",
    search="job__run__name gpu__uuid",
)
register_list(
    RunEvent,
    "at run kind actor attempt node",
    codes=[code_filter("kind", RunEventKind)],
    ordering=("-id",),
    joined="run actor",
    search="run__name actor__username",
    show_full_result_count=False,
)
register_list(QueueEvent, "at queue actor data", filters="queue", joined="queue__project actor", ordering=("-id",))
register_list(Verdict, "queue shape reason at", filters="reason queue", joined="queue__project", ordering=("-at",))
register_list(
    PastVerdict,
    "queue shape reason since until",
    filters="queue",
    codes=[code_filter("reason", WaitReason)],
    joined="queue__project",
    ordering=("-until",),
)
register_list(
    PastPlace, "queue run_id priority since until ended_by", filters="queue", joined="queue__project", ordering=("-id",)
)
register_list(
    Artifact,
    "path job size content_type created_at stored_at",
    joined="job__run",
    search="path job__run__name",
    ordering=("-created_at",),
    show_full_result_count=False,
)
register_list(Archive, "sha256 project size created_at", filters="project", search="sha256")
register_list(
    MemberShare,
    "queue user used_gpu_ms held_gpus queued_gpus",
    filters="queue",
    joined="queue__project user",
    search="user__username",
)
register_list(QueueCount, " ".join(["queue", *RunStatus]), joined="queue__project")
register_list(
    Sweep,
    "name project queue user size next_index is_pending max_parallel priority submitted_at stopped_at ended_at",
    filters="project",
    joined="project queue__project user",
    search="name uid user__username",
    exclude=("env_secret", "idempotency_key", "body_digest"),
)
register_list(SweepCount, " ".join(["sweep", *RunStatus]), joined="sweep")
