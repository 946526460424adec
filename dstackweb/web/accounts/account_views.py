"""The reader's account and language, new passwords by a link, and signing in at an identity provider."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allauth.account.internal.flows.reauthentication import raise_if_reauthentication_required
from allauth.mfa.models import Authenticator
from allauth.socialaccount.internal.flows.connect import validate_disconnect
from allauth.socialaccount.models import SocialAccount
from django import forms
from django.conf import settings
from django.contrib.auth.forms import SetPasswordForm
from django.contrib.auth.views import PasswordResetConfirmView
from django.contrib.messages.views import SuccessMessageMixin
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse_lazy
from django.utils import translation
from django.utils.translation import get_language, get_language_from_request, gettext as _, gettext_lazy
from django.views.i18n import set_language

from dstackweb.accounts import adapters, attempts, preferences, ssh_keys
from dstackweb.accounts.models import SSHKey, User
from dstackweb.accounts.sessions import BEGUN_S
from dstackweb.lib.errors import Conflict, TooMany
from dstackweb.lib.ssh_keys import host_fingerprint
from dstackweb.notifications import mail, password_mail
from dstackweb.scheduler.processes import tasks
from dstackweb.web.accounts.forms import Styled, attempt, form_status, text_field
from dstackweb.web.accounts.views import page_or_form
from dstackweb.web.common.pages import PageRequest, account_action, account_page, done, only_forms, public_url

PROVIDER = "sso"


class ProfileForm(Styled, forms.ModelForm[User]):
    class Meta:
        model = User
        fields = ("first_name", "last_name", "email", "language", "time_zone")
        labels = {
            "first_name": gettext_lazy("First name"),
            "last_name": gettext_lazy("Last name"),
            "email": gettext_lazy("Email address"),
        }

    language = forms.ChoiceField(
        label=gettext_lazy("Language"),
        choices=preferences.languages,
        required=False,
        help_text=gettext_lazy("For all pages and emails to you."),
    )
    time_zone = forms.ChoiceField(
        label=gettext_lazy("Time zone"),
        choices=preferences.zones,
        required=False,
        help_text=gettext_lazy("For times on all pages."),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["email"].help_text = (
            _("Links for a new password go there.") if mail.is_on() else _("Shown to admins.")
        )
        if len(settings.LANGUAGES) < 2:
            del self.fields["language"]

    def clean_email(self) -> str:
        email: str = self.cleaned_data["email"]
        others = User.objects.filter(email__iexact=email).exclude(pk=self.instance.pk)
        if email and others.exists():
            raise forms.ValidationError(_("Another account has this address."))
        return email


@account_page
@page_or_form
def account(request: PageRequest) -> HttpResponse:
    """Name, address, language, time zone and theme, and what leads to the rest."""
    form = ProfileForm(request.POST if request.method == "POST" else None, instance=request.user)
    if request.method == "POST" and form.is_valid():
        if "email" in form.changed_data:  # who has the mails can set a password
            raise_if_reauthentication_required(request, app="allauth.account")
        form.save()
        if "language" not in form.changed_data:
            return done(request, _("Saved."), "account")
        language = form.cleaned_data["language"]
        with translation.override(language or get_language_from_request(request)):
            response = done(request, _("Saved."), "account")
        preferences.keep(response, language)
        return response
    if request.method == "POST":
        request.user.refresh_from_db()  # what was refused is in the form, and nowhere else on the page
    kinds = set(Authenticator.objects.filter(user=request.user).values_list("type", flat=True))
    values = {
        "form": form,
        "two_step": bool(kinds - {Authenticator.Type.RECOVERY_CODES}),
        "sessions": request.user.sessions.count(),
        "tokens": request.user.api_tokens.filter(revoked_at=None).count(),
        "provider": settings.DSTACKWEB_OIDC_NAME if settings.DSTACKWEB_OIDC_URL else "",
        "connected": SocialAccount.objects.filter(user=request.user).first(),
    }
    return render(request, "accounts/account.html", values, status=form_status(form))


@only_forms
def choose_language(request: HttpRequest) -> HttpResponse:
    """Chosen in the menu, or before signing in: kept by the account and by this browser, and back to the page."""
    code = request.POST.get("language", "")
    if isinstance(request.user, User) and preferences.is_known(code):
        User.objects.filter(pk=request.user.pk).update(language=code)
    return set_language(request)


@only_forms
def single_sign_on(request: HttpRequest) -> HttpResponse:
    """To the identity provider: to sign in, or with `process=connect` to have one's account known there."""
    if not settings.DSTACKWEB_OIDC_URL:
        raise Http404
    from allauth.socialaccount.providers.openid_connect.views import login
    from requests import RequestException

    try:
        attempts.begin(request.META.get("REMOTE_ADDR", ""))
    except TooMany as error:
        return render(request, "common/error.html", {"error": error, "detail": error.detail}, status=error.status)
    if not request.user.is_authenticated:
        request.session.set_expiry(BEGUN_S)
        request.session[adapters.INVITE] = request.POST.get("invite", "")
    try:
        answer: HttpResponse = login(request, PROVIDER)
    except (RequestException, KeyError, ValueError):
        return render(request, "socialaccount/authentication_error.html", status=502)
    return answer


def single_sign_on_answer(request: HttpRequest, provider_id: str) -> HttpResponse:
    if not settings.DSTACKWEB_OIDC_URL:
        raise Http404
    from allauth.socialaccount.providers.openid_connect.views import callback

    try:
        answer: HttpResponse = callback(request, provider_id)
    except (KeyError, ValueError, TypeError):  # of what it answered something is missing
        return render(request, "socialaccount/authentication_error.html", status=502)
    return answer


@account_action
def disconnect(request: PageRequest) -> HttpResponse:
    """Single sign-on no longer leads to this account."""
    raise_if_reauthentication_required(request, app="allauth.account")
    for row in SocialAccount.objects.filter(user=request.user):
        try:
            validate_disconnect(request, row)
        except ValidationError:
            raise Conflict(_("You have no password to sign in with. Ask an admin for a password link first.")) from None
        row.delete()
    return done(request, _("Single sign-on is disconnected."), "account")


class ForgotForm(Styled):
    email = forms.EmailField(
        label=gettext_lazy("Email address"), widget=forms.EmailInput(attrs={"autocomplete": "email", "autofocus": True})
    )


@page_or_form
def password_forgot(request: HttpRequest) -> HttpResponse:
    """Asks for an address, and says the same whether or not an account has it."""
    if not mail.is_on():
        raise Http404
    form = ForgotForm(request.POST if request.method == "POST" else None)
    sent = request.method == "POST" and form.is_valid()
    if sent:
        for user in User.objects.filter(email__iexact=form.cleaned_data["email"], is_active=True):
            if user.has_usable_password() and attempts.may_mail(user):  # else they sign in elsewhere
                cluster = settings.DSTACKWEB_CLUSTERS["cloud"]
                tasks.enqueue(password_mail.send, user.pk, public_url(request), get_language(), cluster=cluster)
    return render(request, "accounts/password_forgot.html", {"form": form, "sent": sent})


class NewPasswordForm(Styled, SetPasswordForm):  # type: ignore[type-arg]  # at run time it takes none
    """The new password twice."""


class NewPassword(SuccessMessageMixin[Any], PasswordResetConfirmView):
    """A link that sets a new password once, and signs no one in: the second step stays."""

    template_name = "accounts/password_new.html"
    form_class = NewPasswordForm
    success_url = reverse_lazy("login")
    success_message = gettext_lazy("Password changed. Sign in with it.")


class KeyForm(Styled):
    public_key = forms.CharField(
        label=gettext_lazy("Public key"),
        max_length=10_000,
        help_text=gettext_lazy("The line of ~/.ssh/id_ed25519.pub. Make one with: ssh-keygen -t ed25519"),
        widget=forms.Textarea(
            attrs={
                "rows": 3, "placeholder": "ssh-ed25519 AAAA… ada@laptop", "class": "mono", "spellcheck": "false",
                "autocapitalize": "none", "autocomplete": "off",
            }
        ),
    )  # fmt: skip
    name = text_field(
        gettext_lazy("Name"),
        80,
        gettext_lazy("Taken from the key's comment if empty."),
        required=False,
        autocomplete="off",
    )


@account_page
def keys(request: PageRequest) -> HttpResponse:
    form = KeyForm(request.POST if request.method == "POST" else None)
    if request.method == "POST":
        row = attempt(form, lambda: ssh_keys.add(request.user, **form.cleaned_data))
        if isinstance(row, SSHKey):
            return done(request, _("SSH key %(name)s added.") % {"name": row.name}, "ssh-keys")
    values = {
        "form": form,
        "keys": request.user.ssh_keys.all(),
        "fingerprint": host_fingerprint(Path(settings.DSTACKWEB_HOME)) if settings.DSTACKWEB_SSH_PORT else "",
    }
    return render(request, "accounts/ssh_keys.html", values, status=form_status(form))


@account_action
def remove(request: PageRequest, key_id: int) -> HttpResponse:
    row = ssh_keys.remove(request.user, key_id)
    return done(request, _("SSH key %(name)s removed.") % {"name": row.name}, "ssh-keys")
