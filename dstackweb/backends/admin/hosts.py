"""Hosts and GPUs in the admin. What a host reports about itself is read-only."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from dstackweb.accounts.models import User
from dstackweb.backends.hosts import inventory
from dstackweb.backends.hosts.inventory import is_online
from dstackweb.backends.models import Gpu, Host, HostEvent
from dstackweb.spec.labels import check_labels


def _person(request: HttpRequest) -> User:
    """The signed-in user; the admin requires one."""
    assert isinstance(request.user, User)
    return request.user


class HostForm(forms.ModelForm[Host]):
    class Meta:
        model = Host
        fields = ("labels", "setup", "draining")

    def clean_labels(self) -> dict[str, str]:
        try:
            return check_labels(self.cleaned_data["labels"] or {})
        except ValueError as error:
            message = f'Invalid labels: {error}. Use an object of strings, such as {{"region": "cellar"}}.'
            raise forms.ValidationError(message) from None

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
        "cpus", "cpus_used", "memory_mib", "memory_used_mib",
        "isolation", "job_user", "runs_dir", "boot_id", "seen_at", "leaving", "left_at",
    )  # fmt: skip
    fieldsets = (
        (None, {"fields": ("name", "backend", "online", "leaving", "left_at", "error")}),
        ("Settings", {"fields": ("draining", "labels", "setup")}),
        ("Capacity", {"fields": ("cpus", "cpus_used", "memory_mib", "memory_used_mib")}),
        (
            "Reported by the host",
            {"fields": ("address", "cluster", "isolation", "job_user", "runs_dir", "boot_id", "seen_at")},
        ),
    )

    @admin.display(boolean=True)
    def online(self, host: Host) -> bool:
        return is_online(host)

    def save_model(self, request: HttpRequest, obj: Host, form: Any, change: bool) -> None:
        """Write what people set and nothing that the machine or the claims write meanwhile; each change is an event."""
        before, draining = Host.objects.get(pk=obj.pk), obj.draining
        by = _person(request)
        obj.draining = before.draining
        obj.save(update_fields=["labels", "setup"])
        if obj.labels != before.labels:
            inventory.record_labels(obj, by, before.labels, obj.labels)
        if draining != before.draining:
            inventory.set_draining(obj, by, draining)

    @admin.action(description="Drain: running jobs continue, no new jobs start", permissions=["change"])
    def drain(self, request: HttpRequest, hosts: QuerySet[Host]) -> None:
        done = sum(inventory.set_draining(host, _person(request), True) for host in hosts)
        self.message_user(request, f"Draining {done} hosts.")

    @admin.action(description="Stop draining: accept new jobs", permissions=["change"])
    def undrain(self, request: HttpRequest, hosts: QuerySet[Host]) -> None:
        done = sum(inventory.set_draining(host, _person(request), False) for host in hosts)
        self.message_user(request, f"{done} hosts accept jobs again.")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False


@admin.register(Gpu)
class GpuAdmin(admin.ModelAdmin[Gpu]):
    list_display = ("uuid", "host", "index", "name", "memory_mib", "present", "stranger")
    list_filter = ("host", "present", "name")
    list_select_related = ("host",)
    search_fields = ("uuid", "name", "host__name")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Gpu | None = None) -> bool:
        return False


@admin.register(HostEvent)
class HostEventAdmin(admin.ModelAdmin[HostEvent]):
    """Events of hosts, read-only."""

    list_display = ("at", "host", "kind", "actor", "data")
    list_filter = ("host", "kind")
    list_select_related = ("host", "actor")
    search_fields = ("host__name", "kind")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: HostEvent | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: HostEvent | None = None) -> bool:
        return False
