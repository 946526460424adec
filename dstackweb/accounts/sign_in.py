"""The end of each sign-in: the second step where the user has one, then the session."""

from __future__ import annotations

from typing import Any

from allauth.account.internal.flows.login import get_authentication_records, perform_login, record_authentication
from allauth.account.models import Login
from django.contrib.auth import logout
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext_noop

from dstackweb.accounts.models import User

WAYS = {
    "totp": gettext_noop("authenticator app"),
    "recovery_codes": gettext_noop("recovery code"),
    "webauthn": gettext_noop("passkey"),
}
PASSWORD, LINK, INVITE = gettext_noop("password"), gettext_noop("sign-in link"), gettext_noop("invite")
ELSEWHERE = "socialaccount"


def finish(request: HttpRequest, user: User, way: str, to: str | None = None) -> HttpResponse:
    """Sign in who has shown by `way` that they may, after their second step if any, and go to `to` (the start page)."""
    if request.user.is_authenticated and request.user.pk != user.pk:
        logout(request)
    record_authentication(request, user, method=way)
    response: HttpResponse = perform_login(request, Login(user=user, redirect_url=to))
    return response


def ways(request: HttpRequest, user: User) -> list[str]:
    """How they signed in, in order: "password", "authenticator app"."""
    records = get_authentication_records(request, user)
    return [_way(record) for record in records if not record.get("reauthenticated")] or [PASSWORD]


def used_second_step(request: HttpRequest, user: User) -> bool:
    return any(record.get("method") == "mfa" for record in get_authentication_records(request, user))


def _way(record: dict[str, Any]) -> str:
    method = str(record.get("method"))
    if method == ELSEWHERE:
        return gettext_noop("single sign-on")
    return WAYS.get(str(record.get("type")), method) if method == "mfa" else method
