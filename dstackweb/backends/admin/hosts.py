"""Hosts, GPUs and cloud instances in the admin. What machines report about themselves is read-only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy, ngettext

from dstackweb.accounts.models import User
from dstackweb.backends.hosts import inventory
from dstackweb.backends.models import Gpu, Host, HostEvent, Instance
from dstackweb.lib.admin import ReadOnly


class HostForm(forms.ModelForm[Host]):
    class Meta:
        model = Host
        fields = ("labels", "setup", "draining")

    def clean_labels(self) -> dict[str, str]:
        return self.cleaned_data["labels"] or {}

    def clean_setup(self) -> str:
        """Shell lines end in plain line feeds, whatever the browser sent."""
        setup: str = self.cleaned_data["setup"]
        return setup.replace("\r\n", "\n")


class GpuInline(admin.TabularInline[Gpu, Host]):
    model = Gpu
    fields = readonly_fields = ("index", "name", "memory_mib", "uuid", "present", "stranger")
    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Host | None = None) -> bool:
        return False


@admin.register(Host)
class HostAdmin(admin.ModelAdmin[Host]):
    """Hosts register themselves; here they get labels and a set-up snippet, and are drained or removed.

    Removed hosts stay listed, because past jobs refer to them.
    """

    form = HostForm
    list_display = (
        "name",
        "online",
        "draining",
        "cpus",
        "cpus_used",
        "memory_mib",
        "isolation",
        "seen_at",
        "left_at",
        "error",
    )
    list_filter = ("backend", "draining", ("left_at", admin.EmptyFieldListFilter), "isolation")
    search_fields = ("name", "address", "gpus__name", "gpus__uuid")
    inlines = (GpuInline,)
    actions = ("drain", "undrain")
    readonly_fields = (
        "name", "backend", "address", "cluster", "online", "error",
        "held_back_at", "start_error", "cpus", "cpus_used", "memory_mib", "memory_used_mib",
        "isolation", "cgroups", "engine", "ports", "job_user", "runs_dir", "boot_id", "seen_at", "leaving", "left_at",
    )  # fmt: skip
    fieldsets = (
        (None, {"fields": ("name", "backend", "online", "leaving", "left_at", "error", "held_back_at", "start_error")}),
        (gettext_lazy("Settings"), {"fields": ("draining", "labels", "setup")}),
        (gettext_lazy("Capacity"), {"fields": ("cpus", "cpus_used", "memory_mib", "memory_used_mib")}),
        (
            gettext_lazy("Reported by the host"),
            {
                "fields": (
                    "address",
                    "cluster",
                    "isolation",
                    "cgroups",
                    "engine",
                    "ports",
                    "job_user",
                    "runs_dir",
                    "boot_id",
                    "seen_at",
                )
            },
        ),
    )

    @admin.display(boolean=True, description=gettext_lazy("online"))
    def online(self, host: Host) -> bool:
        return inventory.is_online(host)

    def save_model(self, request: HttpRequest, obj: Host, form: Any, change: bool) -> None:
        """Write only the fields that people set: the machine and claims write the others. Each change is an event."""
        before, draining = Host.objects.get(pk=obj.pk), obj.draining
        obj.draining = before.draining
        obj.save(update_fields=["labels", "setup"])
        if obj.labels != before.labels:
            assert isinstance(request.user, User)
            inventory.record_labels(obj, request.user, before.labels, obj.labels)
        if draining != before.draining:
            self._set_draining(request, [obj], draining)

    @admin.action(description=gettext_lazy("Drain: running jobs continue, no new jobs start"), permissions=["change"])
    def drain(self, request: HttpRequest, hosts: QuerySet[Host]) -> None:
        count = self._set_draining(request, hosts, True)
        self.message_user(request, ngettext("Draining %d host.", "Draining %d hosts.", count) % count)

    @admin.action(description=gettext_lazy("Stop draining: accept new jobs"), permissions=["change"])
    def undrain(self, request: HttpRequest, hosts: QuerySet[Host]) -> None:
        count = self._set_draining(request, hosts, False)
        text = ngettext("%d host accepts jobs again.", "%d hosts accept jobs again.", count) % count
        self.message_user(request, text)

    def _set_draining(self, request: HttpRequest, hosts: Iterable[Host], draining: bool) -> int:
        assert isinstance(request.user, User)
        return sum(inventory.set_draining(host, request.user, draining) for host in hosts)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False


@admin.register(Gpu)
class GpuAdmin(ReadOnly):
    list_display = ("uuid", "host", "index", "name", "memory_mib", "present", "stranger")
    list_filter = ("host", "present", "name")
    list_select_related = ("host",)
    search_fields = ("uuid", "name", "host__name")

    def has_delete_permission(self, request: HttpRequest, obj: Gpu | None = None) -> bool:
        return admin.ModelAdmin.has_delete_permission(self, request, obj)


@admin.register(HostEvent)
class HostEventAdmin(ReadOnly):
    list_display = ("at", "host", "kind", "actor", "data")
    list_filter = ("host", "kind")
    list_select_related = ("host", "actor")
    search_fields = ("host__name", "kind")


@admin.register(Instance)
class InstanceAdmin(ReadOnly):
    """Runs launch and end cloud instances."""

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
