"""Backends in the admin: a form for each kind, a test of its connection, and what names it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.decorators import method_decorator
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.debug import sensitive_post_parameters

from dstackweb.backends import services
from dstackweb.backends.aws import config as aws_config
from dstackweb.backends.aws.admin_form import AwsForm
from dstackweb.backends.models import Backend, BackendKind, Instance, InstanceStatus
from dstackweb.lib.errors import DomainError
from dstackweb.profiles.models import Profile


class HostsForm(forms.ModelForm[Backend]):
    """Own hosts have no settings of their own as a backend."""

    said: dict[str, Any]

    class Meta:
        model = Backend
        fields = ("name", "enabled")

    fieldsets = ((None, {"fields": ("name", "enabled")}),)

    def clean(self) -> None:
        super().clean()
        self.said = {}


FORMS: dict[str, type[AwsForm | HostsForm]] = {BackendKind.AWS: AwsForm, BackendKind.HOSTS: HostsForm}


@admin.register(Backend)
class BackendAdmin(admin.ModelAdmin[Backend]):
    """The backend of own hosts is made by the first start; those that are added are AWS accounts."""

    list_display = ("name", "kind", "where", "enabled", "machines")
    list_filter = ("kind", "enabled")
    search_fields = ("name",)

    class Media:
        css = {"all": ("backend_admin.css",)}
        js = ("js/backend-admin.js",)

    @admin.display(description="where")
    def where(self, backend: Backend) -> str:
        if backend.kind == BackendKind.HOSTS:
            return "–"
        regions = backend.config.get("regions") or "–"
        return regions if isinstance(regions, str) else ", ".join(regions)

    @admin.display(description="machines now")
    def machines(self, backend: Backend) -> int:
        if backend.kind == BackendKind.HOSTS:
            return backend.hosts.filter(left_at=None).count()
        return backend.instances.exclude(status=InstanceStatus.GONE).count()

    @admin.display(description="used by")
    def used_by(self, backend: Backend) -> SafeString:
        """The profiles that name it; runs may name it themselves."""
        named = [one for one in Profile.objects.select_related("project") if backend.name in _backends_of(one)]
        links = format_html_join(
            ", ", '<a href="{}">{}</a>', ((reverse("admin:profiles_profile_change", args=[p.pk]), p) for p in named)
        )
        line = f"backends: [{backend.name}]"
        told = _("Runs use it where their file or profile says so:")
        return format_html("{} <code>{}</code>. {} {}", told, line, _("Profiles that do:"), links or _("none yet."))

    # -- the form ----------------------------------------------------------------------------------------------------

    def get_form(self, request: HttpRequest, obj: Backend | None = None, change: bool = False, **more: Any) -> Any:
        return super().get_form(request, obj, change, **{**more, "form": FORMS[_kind(obj)]})

    def get_fieldsets(self, request: HttpRequest, obj: Backend | None = None) -> Any:
        if obj is not None and not self.has_change_permission(request, obj):
            return [(None, {"fields": ("name", "kind", "where", "enabled", "used_by")})]
        (title, first), *others = FORMS[_kind(obj)].fieldsets
        shown = (*first["fields"], "used_by") if obj is not None and obj.kind != BackendKind.HOSTS else first["fields"]
        return [(title, {"fields": shown}), *others]

    def get_readonly_fields(self, request: HttpRequest, obj: Backend | None = None) -> tuple[str, ...]:
        """Profiles, run files and jobs of the past know a backend by its name."""
        return ("name", "used_by") if obj is not None else ("used_by",)

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        name = BackendKind.AWS.value
        taken = Backend.objects.filter(name=name).exists()
        return {**({} if taken else {"name": name}), **super().get_changeform_initial_data(request)}

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **more: Any) -> Any:
        obj: Backend | None = more.get("obj")
        if _kind(obj) == BackendKind.AWS and (obj is None or self.has_change_permission(request, obj)):
            name = "admin:backends_backend_test"
            context["test_url"] = reverse(name, args=[obj.pk]) if obj else reverse(f"{name}_new")
        return super().render_change_form(request, context, *args, **more)

    @method_decorator(sensitive_post_parameters())
    def changeform_view(self, request: HttpRequest, *args: Any, **more: Any) -> Any:
        """What is refused only when it is written, since somebody else was faster, is told as well."""
        try:
            return super().changeform_view(request, *args, **more)
        except DomainError as error:
            self.message_user(request, error.detail, messages.ERROR)
            return redirect(request.get_full_path())

    def save_model(self, request: HttpRequest, obj: Backend, form: Any, change: bool) -> None:
        saved, is_new = services.put(obj.name, _kind(obj if change else None), form.said, enabled=obj.enabled)
        obj.pk = saved.pk
        obj.refresh_from_db()
        if is_new:
            told = _("Runs use it where their file or a profile says so:")
            self.message_user(request, format_html("{} <code>backends: [{}]</code>", told, obj.name), messages.INFO)

    # -- testing -----------------------------------------------------------------------------------------------------

    def get_urls(self) -> list[URLPattern]:
        test = self.admin_site.admin_view(self.test_view)
        return [
            path("test/", test, name="backends_backend_test_new"),
            path("<path:object_id>/test/", test, name="backends_backend_test"),
            *super().get_urls(),
        ]

    @method_decorator(sensitive_post_parameters())
    def test_view(self, request: HttpRequest, object_id: str | None = None) -> HttpResponse:
        """Asks AWS what the form as it is typed now would be good for; nothing is saved. No transaction is open."""
        # boto3 and its memory come with the first test.
        from dstackweb.backends.aws import check, check_words

        obj = self.get_object(request, unquote(object_id)) if object_id else None
        if object_id and (obj is None or obj.kind != BackendKind.AWS):
            raise Http404
        if not (self.has_change_permission(request, obj) if obj else self.has_add_permission(request)):
            raise PermissionDenied
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        form: AwsForm = self.get_form(request, obj, change=obj is not None)(request.POST, instance=obj)
        wrong = {name: told for name, told in form.errors.items() if name != "name"}
        context: dict[str, Any] = {"title": _("Test of the connection"), "opts": self.opts}
        if wrong:
            context["wrong"] = [_at_field(form, name, told) for name, told in wrong.items()]
        else:
            config, secret = form.settled
            read = aws_config.read(config)
            key_id = read.credentials.access_key_id
            plain = aws_config.secret_of(key_id, secret) if key_id else ""
            context["report"] = check_words.report(check.check(read, plain, settings.DSTACKWEB_PUBLIC_URL))
        is_part = request.headers.get("X-Requested-With") == "fetch"
        name = "test_result.html" if is_part else "test.html"
        context |= {} if is_part else self.admin_site.each_context(request)
        return TemplateResponse(request, f"admin/backends/backend/{name}", context, status=422 if wrong else 200)

    # -- deleting ----------------------------------------------------------------------------------------------------

    def has_delete_permission(self, request: HttpRequest, obj: Backend | None = None) -> bool:
        return super().has_delete_permission(request, obj) and (obj is None or obj.kind != BackendKind.HOSTS)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """What goes with them: their offers at once, and their instances when they serve nobody any more."""
        told: list[str] = []
        kept: list[str] = []
        for backend in objs:
            living = Instance.objects.filter(backend=backend).exclude(status=InstanceStatus.GONE).count()
            line = ngettext("%(name)s, with %(n)d machine", "%(name)s, with %(n)d machines", living)
            where = kept if backend.kind == BackendKind.HOSTS else told
            where.append(line % {"name": backend.name, "n": living})
        return told, {}, set(), kept

    def delete_model(self, request: HttpRequest, obj: Backend) -> None:
        services.delete(obj.name)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Backend]) -> None:
        for backend in queryset:
            services.delete(backend.name)


def _kind(backend: Backend | None) -> str:
    return backend.kind if backend is not None else BackendKind.AWS.value


def _backends_of(profile: Profile) -> Sequence[str]:
    return profile.settings.get("backends") or ()


def _at_field(form: AwsForm, name: str, told: Any) -> tuple[Any, str, Any]:
    """A field's label and ID, both empty for the form as a whole, with what is wrong there."""
    return (form.fields[name].label, form[name].auto_id, told) if name in form.fields else ("", "", told)
