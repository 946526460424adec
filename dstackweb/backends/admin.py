"""Backends, hosts, GPUs and cloud instances in the admin. What machines report about themselves is read-only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import flatten_fieldsets, unquote
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.decorators import method_decorator
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _, gettext_lazy, ngettext
from django.views.decorators.debug import sensitive_post_parameters

from dstackweb.accounts.models import User
from dstackweb.backends import registry, services
from dstackweb.backends.forms import BackendForm
from dstackweb.backends.hosts import inventory
from dstackweb.backends.kinds import Kind
from dstackweb.backends.models import Backend, Gpu, Host, HostEvent, Instance, InstanceStatus
from dstackweb.lib.admin import ReadOnly
from dstackweb.lib.errors import DomainError
from dstackweb.lib.forms import MergedForm
from dstackweb.profiles.models import Profile


@admin.register(Backend)
class BackendAdmin(admin.ModelAdmin[Backend]):
    """The first start creates the backend of own hosts; others are added here."""

    list_display = ("name", "kind", "where", "enabled", "machines")
    list_filter = ("kind", "enabled")
    search_fields = ("name",)

    class Media:
        css = {"all": ("backend_admin.css",)}
        js = ("js/backend-admin.js",)

    @admin.display(description=gettext_lazy("where"))
    def where(self, backend: Backend) -> str:
        kind = registry.KINDS.get(backend.kind)
        return kind.location(backend.config) if kind else _("kind not installed")

    @admin.display(description=gettext_lazy("machines now"))
    def machines(self, backend: Backend) -> int:
        if registry.is_hosts(backend):
            return backend.hosts.filter(left_at=None).count()
        return backend.instances.exclude(status=InstanceStatus.GONE).count()

    @admin.display(description=gettext_lazy("used by"))
    def used_by(self, backend: Backend) -> SafeString:
        """The profiles that use it."""
        named = [
            one
            for one in Profile.objects.select_related("project")
            if backend.name in (one.settings.get("backends") or ())
        ]
        links = format_html_join(
            ", ", '<a href="{}">{}</a>', ((reverse("admin:profiles_profile_change", args=[p.pk]), p) for p in named)
        )
        line = f"backends: [{backend.name}]"
        intro = _("Runs use it if their run file or profile names it:")
        return format_html("{} <code>{}</code>. {} {}", intro, line, _("Profiles:"), links or _("none yet."))

    def get_form(self, request: HttpRequest, obj: Backend | None = None, change: bool = False, **more: Any) -> Any:
        return super().get_form(request, obj, change, **{**more, "form": _form(_kind(request, obj))})

    def get_fieldsets(self, request: HttpRequest, obj: Backend | None = None) -> Any:
        kind = _kind(request, obj)
        if kind is None or (obj is not None and not self.has_change_permission(request, obj)):
            return [(None, {"fields": ("name", "kind", "where", "enabled", "used_by")})]
        (title, first), *others = _form(kind).fieldsets
        shown = (*first["fields"], "used_by") if obj is not None and not kind.is_hosts else first["fields"]
        return [(title, {"fields": shown}), *others]

    def get_readonly_fields(self, request: HttpRequest, obj: Backend | None = None) -> tuple[str, ...]:
        """The name is fixed: profiles, run files and past jobs refer to it."""
        return ("name", "kind", "where", "used_by") if obj is not None else ("used_by",)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return super().has_add_permission(request) and bool(_addable())

    def has_change_permission(self, request: HttpRequest, obj: Backend | None = None) -> bool:
        """A backend whose kind is not installed can only be viewed and deleted."""
        return super().has_change_permission(request, obj) and (obj is None or obj.kind in registry.KINDS)

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        kind = _kind(request, None)
        name = kind.name if kind else ""
        taken = Backend.objects.filter(name=name).exists()
        return {**({} if taken else {"name": name}), **super().get_changeform_initial_data(request)}

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **more: Any) -> Any:
        obj: Backend | None = more.get("obj")
        kind = _kind(request, obj)
        if kind and kind.can_test and (obj is None or self.has_change_permission(request, obj)):
            name = "admin:backends_backend_test"
            context["test_url"] = reverse(name, args=[obj.pk]) if obj else f"{reverse(f'{name}_new')}?kind={kind.name}"
        if kind and obj is None:
            context["kind"], context["kinds"] = kind, _addable()
        return super().render_change_form(request, context, *args, **more)

    @method_decorator(sensitive_post_parameters())
    def changeform_view(self, request: HttpRequest, *args: Any, **more: Any) -> Any:
        """Also shows errors that only occur on writing, because of a change meanwhile."""
        try:
            return super().changeform_view(request, *args, **more)
        except DomainError as error:
            self.message_user(request, error.detail, messages.ERROR)
            return redirect(request.get_full_path())

    def save_model(self, request: HttpRequest, obj: Backend, form: Any, change: bool) -> None:
        saved, is_new = services.put(obj.name, form.kind.name, form.config, enabled=obj.enabled)
        obj.pk = saved.pk
        obj.refresh_from_db()
        if is_new:
            intro = _("Runs use it if their run file or profile names it:")
            self.message_user(request, format_html("{} <code>backends: [{}]</code>", intro, obj.name), messages.INFO)

    def get_urls(self) -> list[URLPattern]:
        test = self.admin_site.admin_view(self.test_view)
        return [
            path("test/", test, name="backends_backend_test_new"),
            path("<path:object_id>/test/", test, name="backends_backend_test"),
            *super().get_urls(),
        ]

    @method_decorator(sensitive_post_parameters())
    def test_view(self, request: HttpRequest, object_id: str | None = None) -> HttpResponse:
        """Test the form's current values without saving. No transaction is open."""
        obj = self.get_object(request, unquote(object_id)) if object_id else None
        kind = _kind(request, obj)
        if (object_id and obj is None) or kind is None or not kind.can_test:
            raise Http404
        if not (self.has_change_permission(request, obj) if obj else self.has_add_permission(request)):
            raise PermissionDenied
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        form: BackendForm = self.get_form(request, obj, change=obj is not None)(request.POST, instance=obj)
        wrong = {name: errors for name, errors in form.errors.items() if name != "name"}
        context: dict[str, Any] = {"title": _("Connection test"), "opts": self.opts}
        if wrong:
            context["wrong"] = [_at_field(form, name, errors) for name, errors in wrong.items()]
        else:
            context["report"] = kind.test_connection(*form.settled)
        is_part = request.headers.get("X-Requested-With") == "fetch"
        name = "test_result.html" if is_part else "test.html"
        context |= {} if is_part else self.admin_site.each_context(request)
        return TemplateResponse(request, f"admin/backends/backend/{name}", context, status=422 if wrong else 200)

    def has_delete_permission(self, request: HttpRequest, obj: Backend | None = None) -> bool:
        return super().has_delete_permission(request, obj) and (obj is None or not registry.is_hosts(obj))

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """The backends with the number of their instances; own hosts are protected."""
        deleted: list[str] = []
        protected: list[str] = []
        for backend in objs:
            living = Instance.objects.filter(backend=backend).exclude(status=InstanceStatus.GONE).count()
            line = ngettext("%(name)s, with %(n)d instance", "%(name)s, with %(n)d instances", living)
            where = protected if registry.is_hosts(backend) else deleted
            where.append(line % {"name": backend.name, "n": living})
        return deleted, {}, set(), protected

    def delete_model(self, request: HttpRequest, obj: Backend) -> None:
        services.delete(obj.name)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Backend]) -> None:
        for backend in queryset:
            services.delete(backend.name)


def _addable() -> list[Kind]:
    """The kinds of new backends, without own hosts."""
    return [kind for kind in registry.KINDS.values() if not kind.is_hosts]


def _kind(request: HttpRequest, backend: Backend | None) -> Kind | None:
    """A backend's kind; for a new one the kind in the URL, else the first. None if it is not installed."""
    if backend is not None:
        return registry.KINDS.get(backend.kind)
    kinds = {kind.name: kind for kind in _addable()}
    return kinds.get(request.GET.get("kind", "")) or next(iter(kinds.values()), None)


def _form(kind: Kind | None) -> type[BackendForm]:
    form = kind.form() if kind else BackendForm
    if kind:
        form.kind = kind
    return form


def _at_field(form: BackendForm, name: str, errors: Any) -> tuple[Any, str, Any]:
    """A field's label and ID, both empty for the form as a whole, with its errors."""
    return (form.fields[name].label, form[name].auto_id, errors) if name in form.fields else ("", "", errors)


class HostForm(MergedForm, forms.ModelForm[Host]):
    class Meta:
        model = Host
        fields = ("draining", "labels", "setup")

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
        "name", "online", "draining", "cpus", "cpus_used", "memory_mib", "isolation", "seen_at", "left_at", "error",
    )  # fmt: skip
    list_filter = ("backend", "draining", ("left_at", admin.EmptyFieldListFilter), "isolation")
    search_fields = ("name", "address", "gpus__name", "gpus__uuid")
    inlines = (GpuInline,)
    actions = ("drain", "undrain")
    fieldsets = (
        (None, {"fields": ("name", "backend", "online", "leaving", "left_at", "error", "held_back_at", "start_error")}),
        (gettext_lazy("Settings"), {"fields": HostForm.Meta.fields}),
        (gettext_lazy("Capacity"), {"fields": ("cpus", "cpus_used", "memory_mib", "memory_used_mib")}),
        (
            gettext_lazy("Reported by the host"),
            {
                "fields": (
                    "address", "cluster", "isolation", "cgroups", "engine", "ports", "job_user", "runs_dir", "boot_id",
                    "seen_at",
                )
            },
        ),
    )  # fmt: skip
    readonly_fields = tuple(set(flatten_fieldsets(fieldsets)) - set(HostForm.Meta.fields))

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
