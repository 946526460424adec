"""Lists for the account pages, each of one project or one user."""

from __future__ import annotations

from django.db.models import QuerySet
from django.utils import timezone

from dstackweb.accounts.models import ApiToken, Invite, Membership, Project, ProjectSecret, User


def members(project: Project) -> QuerySet[Membership]:
    """The project's members by name, each with their user."""
    return Membership.objects.filter(project=project).select_related("user").order_by("user__username")


def open_invites(project: Project) -> QuerySet[Invite]:
    """The project's unused and unexpired invites, newest first."""
    live = Invite.objects.filter(project=project, used_at=None, expires_at__gt=timezone.now())
    return live.select_related("created_by")


def live_tokens(user: User) -> QuerySet[ApiToken]:
    """The user's API tokens that are not revoked, newest first."""
    return ApiToken.objects.filter(user=user, revoked_at=None)


def secrets(project: Project) -> QuerySet[ProjectSecret]:
    """The project's secrets by name, without their values."""
    return ProjectSecret.objects.filter(project=project).defer("ciphertext").select_related("updated_by")
