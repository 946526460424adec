"""The forms of the account pages. `attempt` puts a service's errors beside their fields."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from allauth.core import context
from django import forms
from django.contrib.auth.forms import AuthenticationForm, PasswordChangeForm
from django.db import transaction
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from dstackweb.accounts import attempts
from dstackweb.accounts.access import visible_projects
from dstackweb.accounts.fields import SecretField
from dstackweb.accounts.models import ApiToken, Project, Role, TokenScope, User
from dstackweb.accounts.services import create_token, revoke_all_tokens
from dstackweb.lib.errors import Conflict, Invalid

T = TypeVar("T")
CODE: dict[str, Any] = {"autocomplete": "off", "autocapitalize": "none"}
"""Of fields for words that are not prose."""


def text_field(label: Any, most: int, help_text: Any = "", *, required: bool = True, **attrs: Any) -> forms.CharField:
    """A line of text with at most so many characters; `attrs` are of its input."""
    widget = forms.TextInput(attrs=attrs)
    return forms.CharField(label=label, max_length=most, help_text=help_text, required=required, widget=widget)


class Styled(forms.Form):
    """Adds Tabler's classes to the inputs, and marks those with errors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            match field.widget:
                case forms.Select():
                    name = "form-select"
                case forms.CheckboxInput():
                    name = "form-check-input"
                case _:
                    name = "form-control"
            field.widget.attrs["class"] = name

    def add_error(self, field: str | None, error: Any) -> None:
        super().add_error(field, error)
        if field in self.fields:
            widget = self.fields[field].widget
            widget.attrs["class"] = f"{widget.attrs['class'].removesuffix(' is-invalid')} is-invalid"


class SettingsForm(Styled):
    """Settings that are saved together: where a field is missing nothing is changed, which an empty one may mean."""

    def clean(self) -> None:
        for name, field in self.fields.items():
            if field.widget.value_omitted_from_data(self.data, self.files, self.add_prefix(name)):
                self.add_error(name, _("The form lacks this field. Nothing was changed: reload the page."))


class Switch(forms.CheckboxInput):
    """A checkbox that also sends when it is off. Browsers leave such a one out, as a form that lacks it would."""

    def render(self, name: str, *args: Any, **kwargs: Any) -> SafeString:
        return format_html(
            '<input type="hidden" name="{}" value="false">{}', name, super().render(name, *args, **kwargs)
        )

    def value_omitted_from_data(self, data: Any, files: Any, name: str) -> bool:
        return name not in data


class SignInForm(Styled, AuthenticationForm):
    """Name and password."""

    def clean(self) -> dict[str, Any]:
        name, password = (self.cleaned_data.get(field) for field in ("username", "password"))
        if not (name and password):
            return super().clean()
        with attempts.password_check(context.request.META.get("REMOTE_ADDR", ""), name):
            return super().clean()


class ChangePasswordForm(Styled, PasswordChangeForm):
    revoke_tokens = forms.BooleanField(
        label=_("Also revoke all my API tokens"),
        required=False,
        help_text=_("If someone else may know the old password. Your other sessions end in any case."),
    )

    def clean_old_password(self) -> str:
        """Limit this check too: a stolen session must not reveal the password."""
        with attempts.password_check(context.request.META.get("REMOTE_ADDR", ""), self.user.get_username()):
            return super().clean_old_password()

    def save(self, commit: bool = True) -> User:
        """One transaction: no token outlives the old password."""
        with transaction.atomic():
            user = super().save(commit)
            if self.cleaned_data["revoke_tokens"]:
                revoke_all_tokens(user)
        return user


class AccountForm(Styled):
    username = text_field(_("Username"), 150, autocomplete="username", autocapitalize="none")
    password = forms.CharField(
        label=_("Password"),
        strip=False,
        help_text=_("At least 8 characters."),
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
    )


class InviteForm(Styled):
    role = forms.ChoiceField(label=_("Role"), choices=Role.choices, initial=Role.MEMBER)
    days = forms.TypedChoiceField(
        label=_("Expires after"), coerce=int, choices=[(1, _("1 day")), (7, _("7 days")), (30, _("30 days"))], initial=7
    )

    @property
    def ttl(self) -> timedelta:
        return timedelta(days=self.cleaned_data["days"])


class TokenForm(Styled):
    name = text_field(
        _("Name"),
        80,
        _("Where you will use it, for example laptop or CI."),
        placeholder=_("laptop"),
        autocomplete="off",
    )
    scope = forms.ChoiceField(
        label=_("Scope"),
        initial=TokenScope.ADMIN,
        help_text=_("At most what you may do yourself."),
        choices=[
            (TokenScope.READ, _("read")),
            (TokenScope.SUBMIT, _("read and submit, as a member")),
            (TokenScope.MANAGE, _("read, submit and manage, as a manager")),
            (TokenScope.ADMIN, _("everything that you may do")),
        ],
    )
    project = forms.ModelChoiceField(
        label=_("Project"), queryset=Project.objects.none(), required=False, empty_label=_("all my projects")
    )
    days = forms.TypedChoiceField(
        label=_("Expires after"),
        coerce=int,
        empty_value=None,
        required=False,
        initial=365,
        choices=[(7, _("7 days")), (30, _("30 days")), (90, _("90 days")), (365, _("1 year")), ("", _("never"))],
    )

    def __init__(self, user: User, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.user = user
        self.fields["project"].queryset = visible_projects(user).order_by("name")  # type: ignore[attr-defined]

    def create(self) -> tuple[ApiToken, str]:
        """The token and its plain text. Raises Invalid, NotFound."""
        found = dict(self.cleaned_data)
        days = found.pop("days")
        return create_token(self.user, expires_at=days and timezone.now() + timedelta(days=days), **found)


class SecretForm(Styled):
    name = text_field(_("Name"), 120, _("An existing name gets the new value."), placeholder="HF_TOKEN", **CODE)
    value = SecretField(label=_("Value"), help_text=_("At least 8 characters. Stored encrypted and never shown again."))


def form_status(*each: forms.BaseForm) -> int:
    """Of a page with these forms: 422 where one was refused."""
    return 422 if any(form.errors for form in each) else 200


def attempt(form: forms.Form, service: Callable[[], T]) -> T | None:
    """What the service returns, or None with its errors (and the form's own) in the form, beside their fields."""
    if not form.is_valid():
        return None
    try:
        return service()
    except Invalid as error:
        for fault in error.errors:
            field = str(fault["loc"][0]) if fault["loc"] else None
            form.add_error(field if field in form.fields else None, fault["msg"])
    except Conflict as error:
        form.add_error(None, error.detail)
    return None
