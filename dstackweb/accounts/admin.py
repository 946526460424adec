"""Accounts in the admin site. Digests and values of secrets are on no page of it; a new token is shown once."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.auth.admin import UserAdmin
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils import timezone

from dstackweb.accounts.fields import SecretField
from dstackweb.accounts.models import (
    ApiToken,
    Invite,
    LoginLink,
    Membership,
    Project,
    ProjectSecret,
    Role,
    User,
)
from dstackweb.accounts.services import create_token, set_secret


class MadeElsewhere(admin.ModelAdmin[Any]):
    """Rows that services make and change: here they are looked at, and deleted."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False


class KeepsAnAdmin(forms.BaseInlineFormSet[Any, Any, Any]):
    """The memberships of a project, of which one stays an admin's."""

    def clean(self) -> None:
        super().clean()
        kept = [form.cleaned_data for form in self.forms if getattr(form, "cleaned_data", None)]
        if not any(row.get("role") == Role.ADMIN and not row.get("DELETE") for row in kept):
            raise forms.ValidationError("A project needs at least one member with the role admin.")


class ProjectMembers(admin.TabularInline[Membership, Project]):
    model = Membership
    formset = KeepsAnAdmin
    autocomplete_fields = ("user",)
    extra = 1


class UserProjects(admin.TabularInline[Membership, User]):
    """What a user belongs to, to look at: roles are given on the project's page, which keeps one admin."""

    model = Membership
    fields = readonly_fields = ("project", "role")
    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False


@admin.register(User)
class PeopleAdmin(UserAdmin[User]):
    list_display = ("username", "email", "is_active", "is_superuser", "last_login", "date_joined")
    list_filter = ("is_active", "is_superuser", "is_staff", "memberships__project")
    inlines = (UserProjects,)


@admin.register(Project)
class ProjectAdmin(admin.ModelAdmin[Project]):
    list_display = ("name", "weight", "monthly_budget", "member_max_priority", "created_at")
    search_fields = ("name",)
    readonly_fields = ("created_at",)
    inlines = (ProjectMembers,)


@admin.register(Membership)
class MembershipAdmin(MadeElsewhere):
    list_display = ("user", "project", "role")
    list_filter = ("role", "project")
    search_fields = ("user__username", "project__name")
    list_select_related = ("user", "project")


@admin.register(ApiToken)
class ApiTokenAdmin(admin.ModelAdmin[ApiToken]):
    list_display = ("name", "user", "hint", "created_at", "last_used_at", "revoked_at")
    list_filter = (("revoked_at", admin.EmptyFieldListFilter), "created_at")
    search_fields = ("name", "user__username")
    list_select_related = ("user",)
    autocomplete_fields = ("user",)
    readonly_fields = ("hint", "created_at", "last_used_at", "revoked_at")
    actions = ("revoke",)

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: ApiToken, form: Any, change: bool) -> None:
        row, token = create_token(obj.user, obj.name)
        obj.pk = row.pk
        messages.warning(request, f"Copy the token now, it is shown only this once: {token}")

    @admin.action(description="Revoke the selected tokens", permissions=["delete"])
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiToken]) -> None:
        revoked = queryset.filter(revoked_at=None).update(revoked_at=timezone.now())
        messages.success(request, f"{revoked} revoked.")


@admin.register(Invite)
class InviteAdmin(MadeElsewhere):
    list_display = ("project", "role", "created_by", "created_at", "expires_at", "used_by", "used_at")
    list_filter = ("role", ("used_at", admin.EmptyFieldListFilter), "project")
    search_fields = ("project__name", "created_by__username", "used_by__username")
    list_select_related = ("project", "created_by", "used_by")


@admin.register(LoginLink)
class LoginLinkAdmin(MadeElsewhere):
    list_display = ("user", "expires_at", "used_at")
    list_filter = (("used_at", admin.EmptyFieldListFilter), "expires_at")
    search_fields = ("user__username",)
    list_select_related = ("user",)


class SecretForm(forms.ModelForm[ProjectSecret]):
    """A secret's name, and its value on the way in only."""

    value = SecretField(help_text="Takes the place of the old value. Stored encrypted, and shown nowhere.")

    class Meta:
        model = ProjectSecret
        fields = ("project", "name")


@admin.register(ProjectSecret)
class ProjectSecretAdmin(admin.ModelAdmin[ProjectSecret]):
    form = SecretForm
    list_display = ("name", "project", "updated_by", "updated_at")
    list_filter = ("project",)
    search_fields = ("name", "project__name")
    list_select_related = ("project", "updated_by")

    def get_readonly_fields(self, request: HttpRequest, obj: Model | None = None) -> tuple[str, ...]:
        return ("project", "name", "updated_by", "updated_at") if obj else ()

    def save_model(self, request: HttpRequest, obj: ProjectSecret, form: Any, change: bool) -> None:
        assert isinstance(request.user, User)
        row = set_secret(obj.project, obj.name, form.cleaned_data["value"], by=request.user)
        obj.pk = row.pk
