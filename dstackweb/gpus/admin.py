"""Utilization policies in the admin: how projects enforce them, and applying a changed profile's to active runs. The
profiles app knows no runs, so its admin is extended here."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext as _, ngettext

from dstackweb.accounts.models import User
from dstackweb.gpus import rollout
from dstackweb.gpus.models import ProjectPolicies
from dstackweb.lib.errors import DomainError
from dstackweb.lib.forms import MergedForm
from dstackweb.profiles.admin import ProfileAdmin
from dstackweb.profiles.models import Profile

admin.site.unregister(Profile)


class PoliciesForm(MergedForm, forms.ModelForm[ProjectPolicies]):
    """The form for how a project enforces its policies."""


@admin.register(ProjectPolicies)
class ProjectPoliciesAdmin(admin.ModelAdmin[ProjectPolicies]):
    form = PoliciesForm
    list_display = ("project", "observe_only", "max_exemptions", "exemption_minutes")
    list_filter = ("observe_only",)
    list_select_related = ("project",)
    search_fields = ("project__name",)
    autocomplete_fields = ("project",)


@admin.register(Profile)
class PolicyProfileAdmin(ProfileAdmin):
    """Profiles, with a page that applies a changed policy to active runs."""

    change_form_template = "admin/profiles/profile/change_form.html"

    def save_model(self, request: HttpRequest, obj: Profile, form: Any, change: bool) -> None:
        before = form.initial.get("settings") or {}
        super().save_model(request, obj, form, change)
        # Only the object reaches `response_add` and `response_change`.
        obj.policy_changed = before.get("utilization_policy") != obj.settings.get("utilization_policy")  # type: ignore[attr-defined]

    def response_add(self, request: HttpRequest, obj: Profile, post_url_continue: str | None = None) -> HttpResponse:
        return self._with_apply_offer(request, obj, super().response_add(request, obj, post_url_continue))

    def response_change(self, request: HttpRequest, obj: Profile) -> HttpResponse:
        return self._with_apply_offer(request, obj, super().response_change(request, obj))

    def _with_apply_offer(self, request: HttpRequest, profile: Profile, response: HttpResponse) -> HttpResponse:
        """After a changed policy, redirect to the page that applies it, or link to it where the form stays open."""
        if not getattr(profile, "policy_changed", False) or "_popup" in request.POST:
            return response
        total = rollout.changes(profile, timezone.now()).total
        if not total:
            return response
        url = reverse("admin:profiles_profile_apply", args=[profile.pk])
        if "_save" in request.POST:
            return HttpResponseRedirect(url)
        text = ngettext(
            "%d active run still has the previous policy.",
            "%d active runs still have the previous policy.",
            total,
        )
        message = format_html('{} <a href="{}">{}</a>', text % total, url, _("Review and apply"))
        self.message_user(request, message, messages.WARNING)
        return response

    def get_urls(self) -> list[URLPattern]:
        apply = self.admin_site.admin_view(self.apply_view)
        return [path("<path:object_id>/apply/", apply, name="profiles_profile_apply"), *super().get_urls()]

    def apply_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """The active runs whose policy would change; a POST applies it to the chosen ones."""
        profile = self.get_object(request, unquote(object_id))
        if profile is None:
            raise Http404
        if not self.has_change_permission(request, profile):
            raise PermissionDenied
        if request.method == "POST":
            return self._apply(request, profile)
        try:
            found = rollout.changes(profile, timezone.now())
            policy = rollout.policy_set_by(profile)
        except DomainError as error:
            self.message_user(request, error.detail, messages.ERROR)
            return redirect("admin:profiles_profile_change", profile.pk)
        context = {
            **self.admin_site.each_context(request),
            "title": _("Apply utilization policy of %s to active runs") % profile.name,
            "opts": self.opts,
            "profile": profile,
            "policy": policy,
            "found": found,
            "groups": rollout.by_change(found.listed),
            "now": timezone.now(),
            "more": found.total - len(found.listed),
        }
        return TemplateResponse(request, "admin/profiles/profile/apply.html", context)

    def _apply(self, request: HttpRequest, profile: Profile) -> HttpResponse:
        assert isinstance(request.user, User), "the admin site requires a user"
        chosen = [int(pk) for pk in request.POST.getlist("run") if pk.isascii() and pk.isdigit() and len(pk) < 19]
        here = redirect("admin:profiles_profile_apply", profile.pk)
        if not chosen:
            self.message_user(request, _("Select at least one run."), messages.WARNING)
            return here
        try:
            changed = rollout.apply(profile, chosen, request.POST.get("fingerprint", ""), request.user)
        except DomainError as error:
            self.message_user(request, error.detail, messages.ERROR)
            return here
        text = ngettext("Policy applied to %d run.", "Policy applied to %d runs.", changed) % changed
        self.message_user(request, text, messages.SUCCESS)
        left = rollout.changes(profile, timezone.now()).total
        return here if left else redirect("admin:profiles_profile_changelist")
