"""Accounts on the admin site. It never shows digests or values of secrets; a new token is shown once."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from allauth.account.models import EmailAddress, EmailConfirmation
from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount, SocialApp, SocialToken
from django import forms
from django.contrib import admin, messages
from django.contrib.admin.exceptions import NotRegistered
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.forms import AdminPasswordChangeForm, SetUnusablePasswordMixin
from django.core.exceptions import PermissionDenied
from django.db.models import Exists, Model, OuterRef, QuerySet
from django.http import HttpRequest
from django.utils.text import format_lazy
from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.accounts import preferences, services
from dstackweb.accounts.fields import SecretField
from dstackweb.accounts.models import (
    AddressFailures,
    ApiToken,
    DefaultView,
    Invite,
    LoginLink,
    Membership,
    PasswordFailures,
    Project,
    ProjectSecret,
    Role,
    SavedView,
    SSHKey,
    User,
)
from dstackweb.accounts.services import create_token, revoke_token, set_secret
from dstackweb.lib.admin import register_list
from dstackweb.lib.forms import MergedForm

HAS_TWO_STEP = Exists(Authenticator.objects.filter(user=OuterRef("pk")).exclude(type=Authenticator.Type.RECOVERY_CODES))


def is_admin(request: HttpRequest) -> bool:
    """Whether a deployment admin asks, and not staff with some permissions."""
    return isinstance(request.user, User) and request.user.is_superuser


def _may_touch(request: HttpRequest, user: Model | None) -> bool:
    return is_admin(request) or not (isinstance(user, User) and (user.is_superuser or user.is_staff))


class MembershipFormSet(forms.BaseInlineFormSet[Any, Any, Any]):
    """The memberships of a project, at least one of them with the role admin."""

    def clean(self) -> None:
        super().clean()
        kept = [form.cleaned_data for form in self.forms if getattr(form, "cleaned_data", None)]
        if not any(row.get("role") == Role.ADMIN and not row.get("DELETE") for row in kept):
            raise forms.ValidationError(_("A project needs at least one member with the role admin."))


class MembershipForm(forms.ModelForm[Membership]):
    """A role that is changed here is one by hand, which no group takes back."""

    class Meta:
        model = Membership
        fields = ("user", "role")

    def save(self, commit: bool = True) -> Membership:
        if "role" in self.changed_data:
            self.instance.by_group = False
        return super().save(commit)


class ProjectMembers(admin.TabularInline[Membership, Project]):
    model = Membership
    form = MembershipForm
    formset = MembershipFormSet
    autocomplete_fields = ("user",)
    extra = 1


class UserProjects(admin.TabularInline[Membership, User]):
    """A user's memberships, read-only: roles are changed on the project's page, which keeps at least one admin."""

    model = Membership
    fields = readonly_fields = ("project", "role")
    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False


class TwoStepFilter(admin.SimpleListFilter):
    title = gettext_lazy("two-step sign-in")
    parameter_name = "two_step"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("yes", _("on")), ("no", _("off"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(has_two_step=self.value() == "yes") if self.value() in ("yes", "no") else queryset


for model in (Authenticator, EmailAddress, EmailConfirmation, SocialAccount, SocialApp, SocialToken):
    with contextlib.suppress(NotRegistered):  # people change theirs on their pages; the provider is set by settings
        admin.site.unregister(model)


class PasswordForm(AdminPasswordChangeForm):  # type: ignore[type-arg]  # not subscriptable at run time
    """Django's makes its help when it is loaded, in the server's language."""

    usable_password_help_text = format_lazy(  # type: ignore[assignment]  # lazy, as it is where it comes from
        '{}<ul id="id_unusable_warning" class="messagelist"><li class="warning">{}</li></ul>',
        SetUnusablePasswordMixin.usable_password_help_text,
        gettext_lazy("If disabled, the current password for this user will be lost."),
    )


@admin.register(User)
class AccountAdmin(UserAdmin[User]):
    list_display = ("username", "email", "is_active", "is_superuser", "two_step", "last_login", "date_joined")
    list_filter = ("is_active", "is_superuser", "is_staff", TwoStepFilter, "memberships__project")
    inlines = (UserProjects,)
    actions = ("reset_two_step",)
    change_password_form = PasswordForm
    readonly_fields = ("last_login", "date_joined")
    fieldsets = (
        (None, {"fields": ("username", "password")}),
        (gettext_lazy("Person"), {"fields": ("first_name", "last_name", "email", "language", "time_zone")}),
        (gettext_lazy("Access"), {"fields": ("is_active", "is_superuser", "is_staff", "last_login", "date_joined")}),
        (gettext_lazy("Permissions of staff"), {"fields": ("groups", "user_permissions"), "classes": ("collapse",)}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[User]:
        return super().get_queryset(request).annotate(has_two_step=HAS_TWO_STEP)

    @admin.display(description=gettext_lazy("two-step sign-in"), boolean=True, ordering="has_two_step")
    def two_step(self, user: User) -> bool:
        return bool(user.__dict__["has_two_step"])

    @admin.action(description=gettext_lazy("Reset two-step sign-in of the selected users"))
    def reset_two_step(self, request: HttpRequest, queryset: QuerySet[User]) -> None:
        """For who has lost app, passkeys and codes. The audit log names what was removed, and by whom."""
        if not is_admin(request):
            raise PermissionDenied
        reset = [user for user in queryset if services.reset_second_step(user)]
        messages.success(
            request,
            _("Two-step sign-in is off for %(count)s users: %(users)s.")
            % {"count": len(reset), "users": ", ".join(map(str, reset)) or "–"},
        )

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Languages and time zones are chosen: one that does not exist would be ignored."""
        chosen: dict[str, tuple[Any, Any]] = {
            "language": (gettext_lazy("Language"), preferences.languages),
            "time_zone": (gettext_lazy("Time zone"), preferences.zones),
        }
        if db_field.name not in chosen:
            return super().formfield_for_dbfield(db_field, request, **kwargs)
        label, choices = chosen[db_field.name]
        return forms.ChoiceField(label=label, choices=choices, required=False)

    def get_readonly_fields(self, request: HttpRequest, obj: Model | None = None) -> Any:
        """Staff who may change users can't make themselves more than they are."""
        own = super().get_readonly_fields(request, obj)  # type: ignore[arg-type]
        return own if is_admin(request) else (*own, "is_staff", "is_superuser", "groups", "user_permissions")

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """The password and the address of a deployment admin are for deployment admins."""
        return _may_touch(request, obj) and super().has_change_permission(request, obj)  # type: ignore[arg-type]

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return _may_touch(request, obj) and super().has_delete_permission(request, obj)  # type: ignore[arg-type]


class ProjectForm(MergedForm, forms.ModelForm[Project]):
    """A project's settings."""


@admin.register(Project)
class ProjectAdmin(admin.ModelAdmin[Project]):
    form = ProjectForm
    list_display = (
        "name", "weight", "monthly_budget", "member_max_priority", "least_isolation", "created_at", "deleting_since",
    )  # fmt: skip
    search_fields = ("name",)
    readonly_fields = ("created_at",)
    inlines = (ProjectMembers,)


@admin.register(ApiToken)
class ApiTokenAdmin(admin.ModelAdmin[ApiToken]):
    list_display = ("name", "user", "hint", "created_at", "last_used_at", "revoked_at")
    list_filter = (("revoked_at", admin.EmptyFieldListFilter), "created_at")
    search_fields = ("name", "user__username")
    autocomplete_fields = ("user",)
    readonly_fields = ("hint", "created_at", "last_used_at", "revoked_at")
    actions = ("revoke",)

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **more: Any) -> Any:
        """Staff make tokens for themselves alone: one for another would be that person's permissions."""
        if db_field.name == "user" and not is_admin(request):
            more["queryset"] = User.objects.filter(pk=request.user.pk or 0)
        return super().formfield_for_foreignkey(db_field, request, **more)

    def save_model(self, request: HttpRequest, obj: ApiToken, form: Any, change: bool) -> None:
        row, token = create_token(obj.user, obj.name, scope=obj.scope, project=obj.project, expires_at=obj.expires_at)
        obj.pk = row.pk
        messages.warning(request, _("Copy the token now. It is shown only once: %(token)s") % {"token": token})

    @admin.action(description=gettext_lazy("Revoke the selected tokens"), permissions=["delete"])
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiToken]) -> None:
        live = list(queryset.filter(revoked_at=None))
        for token in live:
            revoke_token(token.user, token.pk)
        messages.success(request, _("Revoked tokens: %(count)s.") % {"count": len(live)})


_list_with_deletion = functools.partial(register_list, has_delete_permission=admin.ModelAdmin.has_delete_permission)
"""Rows that only services create and change: the admin site shows and deletes them."""

_list_with_deletion(
    Membership, "user project role by_group", filters="role by_group project", search="user__username project__name"
)
_list_with_deletion(
    Invite,
    "project role created_by created_at expires_at used_by used_at",
    codes=["role", ("used_at", admin.EmptyFieldListFilter), "project"],
    search="project__name created_by__username used_by__username",
)
_list_with_deletion(
    SSHKey,
    "name user fingerprint created_at last_used_at",
    codes=[("last_used_at", admin.EmptyFieldListFilter), "created_at"],
    search="name user__username fingerprint",
)
_list_with_deletion(
    LoginLink,
    "user expires_at used_at",
    codes=[("used_at", admin.EmptyFieldListFilter), "expires_at"],
    search="user__username",
)
_list_with_deletion(
    SavedView,  # one without a user is its project's
    "name project user query",
    codes=[("user", admin.EmptyFieldListFilter), "project"],
    search="name query project__name user__username",
)
_list_with_deletion(
    DefaultView, "user project view", filters="project", search="user__username project__name view__name"
)
_list_with_deletion(  # deleting a row lets its user try again from there
    PasswordFailures, "name network count last_at", filters="last_at", search="name network"
)
_list_with_deletion(  # deleting a row lets its address try again
    AddressFailures, "address count window", filters="window", search="address"
)


class ProjectSecretForm(forms.ModelForm[ProjectSecret]):
    value = SecretField(help_text=gettext_lazy("Replaces the old value. Stored encrypted and never shown."))

    class Meta:
        model = ProjectSecret
        fields = ("project", "name")


@admin.register(ProjectSecret)
class ProjectSecretAdmin(admin.ModelAdmin[ProjectSecret]):
    form = ProjectSecretForm
    list_display = ("name", "project", "updated_by", "updated_at")
    list_filter = ("project",)
    search_fields = ("name", "project__name")

    def get_readonly_fields(self, request: HttpRequest, obj: Model | None = None) -> tuple[str, ...]:
        return ("project", "name", "updated_by", "updated_at") if obj else ()

    def save_model(self, request: HttpRequest, obj: ProjectSecret, form: Any, change: bool) -> None:
        assert isinstance(request.user, User)
        row = set_secret(obj.project, obj.name, form.cleaned_data["value"], by=request.user)
        obj.pk = row.pk
