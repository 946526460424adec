"""What this product decides for django-allauth: who may have an account, what stands encrypted, what people read.

Groups of the identity provider give roles in projects (`DSTACKWEB_OIDC_ROLES`), at each single sign-on. That touches
what it gave alone: a role that someone gave by hand stays, whatever the groups are.

Signing in always ends in `sign_in.finish` or one of allauth's views, and so passes the second step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from allauth.account.internal.flows.reauthentication import get_reauthentication_flows
from allauth.core import context
from allauth.core.exceptions import ImmediateHttpResponse
from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.mfa.models import Authenticator
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.models import SocialLogin
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.models import AnonymousUser
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.accounts import services
from dstackweb.accounts.access import allows
from dstackweb.accounts.models import Membership, Project, User
from dstackweb.env import GroupRole
from dstackweb.lib.errors import DomainError
from dstackweb.lib.secrets import decrypt, encrypt

INVITE = "invite"
"""The session's key for the token of the invite that someone opened before they went to the identity provider."""

CONFIRM_WITH = {
    "reauthenticate": gettext_lazy("Use your password"),
    "mfa_reauthenticate": gettext_lazy("Use a code"),
    "mfa_reauthenticate:webauthn": gettext_lazy("Use a passkey"),
}
MESSAGES = {
    "mfa/messages/totp_activated.txt": gettext_lazy("Authenticator app set up."),
    "mfa/messages/totp_deactivated.txt": gettext_lazy("Authenticator app removed."),
    "mfa/messages/webauthn_added.txt": gettext_lazy("Passkey added."),
    "mfa/messages/webauthn_removed.txt": gettext_lazy("Passkey removed."),
    "socialaccount/messages/account_connected.txt": gettext_lazy("Single sign-on is connected."),
    "socialaccount/messages/account_connected_updated.txt": gettext_lazy("Single sign-on is connected."),
    "socialaccount/messages/account_connected_other.txt": gettext_lazy(
        "This identity belongs to another account here. Disconnect it there first."
    ),
}


class AccountAdapter(DefaultAccountAdapter):
    """Accounts are made by invites alone, on this product's own page."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False

    def add_message(
        self, request: HttpRequest, level: int, message_template: str = "", *_more: Any, message: str = "", **_rest: Any
    ) -> None:
        """In this product's words; what has none is not said, such as that they are signed in, which they see."""
        if text := message or MESSAGES.get(message_template, ""):
            messages.add_message(request, level, str(text))

    def get_reauthentication_methods(self, user: User | AnonymousUser) -> list[dict[str, Any]]:
        found = super().get_reauthentication_methods(user)
        return [method | {"description": CONFIRM_WITH[method["id"]]} for method in found]

    def respond_user_inactive(self, request: HttpRequest, user: User) -> HttpResponse:
        return render(request, "accounts/inactive.html", status=403)

    def is_reauthentication_required(self, *, app: str, **more: Any) -> bool:
        """Who has neither a password nor a second step has nothing to confirm with."""
        user = getattr(context.request, "user", None)
        return bool(get_reauthentication_flows(user)) and super().is_reauthentication_required(app=app, **more)


class SecondStepAdapter(DefaultMFAAdapter):
    error_messages = DefaultMFAAdapter.error_messages | {
        "incorrect_code": gettext_lazy("This code is wrong or was already used."),
        "cannot_delete_authenticator": gettext_lazy("Admins need two-step sign-in here. Add a passkey first."),
    }

    def encrypt(self, text: str) -> str:
        return encrypt(text)

    def decrypt(self, encrypted_text: str) -> str:
        return decrypt(encrypted_text)

    def get_totp_label(self, user: User) -> str:
        return str(user.get_username())

    def generate_authenticator_name(self, user: User, type: str) -> str:
        number = Authenticator.objects.filter(user=user, type=type).count() + 1
        name: str = _("Passkey %d") % number
        return name

    def can_delete_authenticator(self, authenticator: Authenticator) -> bool:
        """Where it is required the last one stays."""
        others = Authenticator.objects.filter(user=authenticator.user).exclude(pk=authenticator.pk)
        others = others.exclude(type=Authenticator.Type.RECOVERY_CODES)
        return not needs_second_step(authenticator.user) or others.exists()


def needs_second_step(user: User) -> bool:
    """Whether the deployment requires two-step sign-in of this user."""
    return bool(settings.DSTACKWEB_TWO_STEP_FOR_ADMINS) and (user.is_superuser or user.is_staff)


class SingleSignOnAdapter(DefaultSocialAccountAdapter):
    """People of the identity provider get an account by their groups, or by an invite that they opened before."""

    def is_open_for_signup(self, request: HttpRequest, sociallogin: SocialLogin) -> bool:
        return bool(roles(sociallogin)) or _open_invite(request)

    def pre_social_login(self, request: HttpRequest, sociallogin: SocialLogin) -> None:
        """An account of the same mail address is not taken over, nor made a second time: its owner connects it."""
        email = sociallogin.user.email if not sociallogin.is_existing else ""
        if email and not request.user.is_authenticated and User.objects.filter(email__iexact=email).exists():
            raise ImmediateHttpResponse(render(request, "socialaccount/email_taken.html", {"email": email}, status=409))

    def save_user(self, request: HttpRequest, sociallogin: SocialLogin, form: Any = None) -> User:
        user: User = super().save_user(request, sociallogin, form)
        token = request.session.pop(INVITE, None)
        if token:
            with contextlib.suppress(DomainError):  # used by someone else a moment ago: the account stays without it
                services.join_by_invite(token, user)
        return user

    def get_connect_redirect_url(self, request: HttpRequest, socialaccount: Any) -> str:
        return reverse("account")


def roles(sociallogin: SocialLogin) -> dict[str, str]:
    """The roles, by project name, that the groups of this sign-in give."""
    groups = groups_in(sociallogin.account.extra_data or {}, settings.DSTACKWEB_OIDC_GROUPS_CLAIM)
    return roles_of(groups, settings.DSTACKWEB_OIDC_ROLES)


def apply_roles(sender: object, user: User, sociallogin: SocialLogin | None = None, **_signal: Any) -> None:
    """After a sign-in elsewhere is complete."""
    if sociallogin is not None:
        give_roles(user, roles(sociallogin))


def _open_invite(request: HttpRequest) -> bool:
    token = request.session.get(INVITE)
    try:
        return bool(token and services.open_invite(token))
    except DomainError:
        return False


log = logging.getLogger(__name__)


def groups_in(claims: Mapping[str, Any], name: str) -> set[str]:
    """The groups in what the provider said of a person: a list, or one name. Anything else counts as none."""
    for part in ("userinfo", "id_token"):
        found = (claims.get(part) or {}).get(name)
        if isinstance(found, str):
            return {found}
        if isinstance(found, list):
            return {one for one in found if isinstance(one, str)}
    return set()


def roles_of(groups: Iterable[str], mapping: Iterable[GroupRole]) -> dict[str, str]:
    """The role in each project that these groups give, the highest of several."""
    wanted: dict[str, str] = {}
    there = {*groups}
    for group, project, role in mapping:
        if group in there and (project not in wanted or allows(role, wanted[project])):
            wanted[project] = role
    return wanted


def give_roles(user: User, wanted: Mapping[str, str]) -> None:
    """Give the user these roles, by project name, and take back those of groups that they have left."""
    with transaction.atomic():
        projects = {one.name: one for one in Project.objects.select_for_update().filter(name__in=wanted).order_by("pk")}
        if missing := {*wanted} - {*projects}:
            log.warning("DSTACKWEB_OIDC_ROLES names projects that don't exist: %s", ", ".join(sorted(missing)))
        memberships = {one.project_id: one for one in user.memberships.select_related("project")}
        for name, project in projects.items():
            there = memberships.get(project.pk)
            if there is None:
                Membership.objects.create(user=user, project=project, role=wanted[name], by_group=True)
            elif there.by_group and there.role != wanted[name]:
                there.role = wanted[name]
                there.save(update_fields=["role"])
        for membership in memberships.values():
            if membership.by_group and membership.project.name not in projects:
                membership.delete()
