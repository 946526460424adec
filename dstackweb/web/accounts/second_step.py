"""Two-step sign-in: its page, and allauth's views with this product's limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from allauth.account.forms import ReauthenticateForm
from allauth.account.models import Login
from allauth.account.utils import get_next_redirect_url
from allauth.account.views import ReauthenticateView
from allauth.core import context
from allauth.mfa.adapter import get_adapter
from allauth.mfa.base.forms import AuthenticateForm, ReauthenticateForm as ReauthenticateCodeForm
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.forms import ActivateTOTPForm
from allauth.mfa.webauthn.forms import (
    AddWebAuthnForm,
    AuthenticateWebAuthnForm,
    LoginWebAuthnForm,
    ReauthenticateWebAuthnForm,
)
from allauth.mfa.webauthn.internal import flows
from allauth.mfa.webauthn.views import LoginWebAuthnView, RemoveWebAuthnView
from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _, gettext_lazy
from django.views.decorators.http import require_safe

from dstackweb.accounts import adapters, attempts
from dstackweb.accounts.sessions import BEGUN_S
from dstackweb.lib.errors import DomainError, TooMany
from dstackweb.web.accounts.forms import Styled
from dstackweb.web.accounts.views import AsksPassword
from dstackweb.web.common.pages import PageRequest, account_page
from dstackweb.wording import units

Kind = Authenticator.Type
T = TypeVar("T")


class LimitedCode(Styled):
    """A form with a code of the second step. Too many wrong ones are refused for a while."""

    user: Any
    code: Any = forms.CharField(
        label=gettext_lazy("Code"),
        widget=forms.TextInput(
            attrs={"autocomplete": "one-time-code", "inputmode": "numeric", "autofocus": True, "spellcheck": "false"}
        ),
    )

    def clean_code(self) -> str:
        address = context.request.META.get("REMOTE_ADDR", "")
        try:
            attempts.check_codes(address, self.user)
            code: str = super().clean_code()  # type: ignore[misc]  # of allauth's form, which stands after this one
        except TooMany as error:
            text = _("Too many wrong codes. Try again in %s.") % units.duration(error.retry_after)
            raise forms.ValidationError(text) from None
        except DomainError:  # the server has another secret key than when it was set up
            raise forms.ValidationError(
                _("The server can't read your second step. Ask an admin to reset it.")
            ) from None
        except forms.ValidationError:
            attempts.count_wrong_code(address, self.user)
            raise
        return code


class CodeForm(LimitedCode, AuthenticateForm):
    """A code of the app, or a recovery code, at the end of a sign-in."""


class ConfirmCodeForm(LimitedCode, ReauthenticateCodeForm):
    """The same of someone who is signed in."""


class ActivateForm(LimitedCode, ActivateTOTPForm):
    """The first code of a new app."""


def _refuse_malformed(check: Callable[[], T]) -> T:
    """What `check` returns; allauth takes for granted that a browser has made what it reads."""
    try:
        return check()
    except (AttributeError, KeyError, TypeError, ValueError):
        raise forms.ValidationError(_("Invalid passkey response. Try again.")) from None


class CheckedCredential:
    def clean_credential(self) -> Any:
        return _refuse_malformed(super().clean_credential)  # type: ignore[misc]  # of the form that stands after this


class PasskeyForm(CheckedCredential, AuthenticateWebAuthnForm):
    """What a passkey answered, as the second step."""


class PasskeySignInForm(CheckedCredential, LoginWebAuthnForm):
    """The same as the only step."""


class ConfirmPasskeyForm(CheckedCredential, ReauthenticateWebAuthnForm):
    """The same of someone who is signed in."""


class AddPasskeyForm(AddWebAuthnForm):
    def clean(self) -> Any:
        return _refuse_malformed(super().clean)


class ConfirmPasswordForm(Styled, ReauthenticateForm):
    password: Any = forms.CharField(
        label=gettext_lazy("Password"),
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "current-password", "autofocus": True}),
    )

    def clean_password(self) -> str:
        with attempts.password_check(context.request.META.get("REMOTE_ADDR", ""), self.user.get_username()):
            password: str = super().clean_password()
            return password


class ConfirmPassword(AsksPassword, ReauthenticateView):
    """Before a change that keeps others out, or lets them in."""

    form_class = ConfirmPasswordForm
    template_name = "accounts/confirm.html"


class PasskeySignIn(LoginWebAuthnView):
    """Asked by a script for a challenge, then sent what the passkey made of it."""

    def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            attempts.begin(request.META.get("REMOTE_ADDR", ""))
        except TooMany as error:
            return JsonResponse({"detail": error.detail}, status=error.status)
        request.session.set_expiry(BEGUN_S)
        answer: HttpResponse = super().get(request, *args, **kwargs)
        return answer

    def form_valid(self, form: Any) -> HttpResponse:
        authenticator = form.cleaned_data["credential"]
        login = Login(user=authenticator.user, redirect_url=get_next_redirect_url(self.request))
        answer: HttpResponse = flows.perform_passwordless_login(self.request, authenticator, login)
        return answer


class RemovePasskey(RemoveWebAuthnView):
    template_name = "accounts/remove_passkey.html"

    def form_valid(self, form: Any) -> HttpResponse:
        if not get_adapter().can_delete_authenticator(self.object):
            messages.error(self.request, _("Admins need two-step sign-in here. Add another passkey or an app first."))
            return redirect("mfa_index")
        answer: HttpResponse = super().form_valid(form)
        return answer


@account_page
@require_safe
def two_step(request: PageRequest) -> HttpResponse:
    """What the reader signs in with beside the password."""
    found = list(Authenticator.objects.filter(user=request.user).order_by("created_at"))
    codes = next((one.wrap() for one in found if one.type == Kind.RECOVERY_CODES), None)
    values = {
        "app": next((one for one in found if one.type == Kind.TOTP), None),
        "passkeys": [(one, one.wrap()) for one in found if one.type == Kind.WEBAUTHN],
        "codes_left": _left(codes),
        "required": adapters.needs_second_step(request.user),
        "has_one": any(one.type != Kind.RECOVERY_CODES for one in found),
    }
    return render(request, "accounts/two_step.html", values)


def _left(codes: Any) -> int | None:
    """How many recovery codes are unused: None without any, or where the server can't read them."""
    try:
        return len(codes.get_unused_codes()) if codes else None
    except DomainError:
        return None
