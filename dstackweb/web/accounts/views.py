"""Signing in, invites, members, API tokens and secrets.

A value that can be shown once is in the answer to the form that made it, and nowhere else: no session, no message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from allauth.mfa.models import Authenticator
from django.conf import settings
from django.contrib.admin import site
from django.contrib.auth.views import LoginView, PasswordChangeView, redirect_to_login
from django.contrib.messages.views import SuccessMessageMixin
from django.core.exceptions import PermissionDenied
from django.db.models import Exists, OuterRef
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse, reverse_lazy
from django.utils import timezone
from django.utils.translation import gettext as _, gettext_lazy, ngettext
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_safe
from django.views.generic import FormView

from dstackweb.accounts import access, services, sessions, sign_in
from dstackweb.accounts.models import Membership, Role, User
from dstackweb.audit import recorder
from dstackweb.audit.models import AuditAction, AuditKind
from dstackweb.backends import registry
from dstackweb.backends.hosts.inventory import names_by_isolation
from dstackweb.lib.errors import Conflict, DomainError, Forbidden, NotFound, TooMany
from dstackweb.notifications import mail, password_mail
from dstackweb.web.accounts.forms import (
    AccountForm,
    ChangePasswordForm,
    InviteForm,
    SecretForm,
    SignInForm,
    TokenForm,
    attempt,
    form_status,
)
from dstackweb.web.common.pages import (
    PageRequest,
    account_action,
    account_page,
    done,
    project_action,
    project_page,
    public_url,
)
from dstackweb.wording import hosts as host_words, units
from dstackweb.wording.sentence import listing

page_or_form = require_http_methods(["GET", "HEAD", "POST"])


class AsksPassword(FormView[Any]):
    """A page whose form checks a password with `attempts.password_check`: says how long no more are taken."""

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            return super().post(request, *args, **kwargs)
        except TooMany as error:
            values = {"name": error.extra.get("name"), "wait_s": error.retry_after}
            response = render(request, "accounts/locked_out.html", values, status=error.status)
            response["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
            return response


class SignIn(AsksPassword, LoginView):
    template_name = "accounts/login.html"
    authentication_form = SignInForm
    redirect_authenticated_user = True

    def form_valid(self, form: Any) -> HttpResponse:
        return sign_in.finish(self.request, form.get_user(), sign_in.PASSWORD, self.get_success_url())

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(**kwargs, **other_ways())


def other_ways() -> dict[str, Any]:
    """What a page for people who are not signed in offers beside a password."""
    provider = settings.DSTACKWEB_OIDC_NAME if settings.DSTACKWEB_OIDC_URL else ""
    return {"provider": provider, "mails": mail.is_on()}


@require_safe
def to_sign_in(request: HttpRequest) -> HttpResponse:
    """The admin site's sign-in is the one with limits. Who is signed in, and still not let in, has no access."""
    if site.has_permission(request):
        return redirect("admin:index")
    if request.user.is_authenticated:
        raise PermissionDenied
    return redirect_to_login(request.GET.get("next") or reverse("admin:index"))


class ChangePassword(SuccessMessageMixin[Any], AsksPassword, PasswordChangeView):
    """The signed-in person's own password."""

    template_name = "accounts/password.html"
    form_class = ChangePasswordForm
    success_url = reverse_lazy("account")
    success_message = gettext_lazy("Password changed.")


@never_cache
@page_or_form
def login_link(request: HttpRequest, token: str) -> HttpResponse:
    """A one-time link. Opening it only shows a button: mail and chat programs open links to preview them."""
    try:
        if request.method == "POST":
            return sign_in.finish(request, services.use_login_link(token), sign_in.LINK)
        return render(request, "accounts/login_link.html", {"link": services.open_login_link(token)})
    except DomainError as error:
        return _dead_link(request, error)


@never_cache
@page_or_form
def invite_accept(request: HttpRequest, token: str) -> HttpResponse:
    """An invite: a signed-in user joins with a button, others create an account."""
    user = request.user if isinstance(request.user, User) else None
    form = AccountForm() if user is None else None
    try:
        invite = services.open_invite(token)
        if request.method == "POST" and user is None:
            form = AccountForm(request.POST)
            fields = form.cleaned_data if form.is_valid() else {}
            made = attempt(form, lambda: services.accept_invite(token, fields["username"], fields["password"]))
            if made:
                return sign_in.finish(request, made.user, sign_in.INVITE)
        # A form opened before someone else signed in in this browser must not let that person in.
        elif request.method == "POST" and user and request.POST.get("join_as") == user.get_username():
            services.join_by_invite(token, user)
            return redirect(settings.LOGIN_REDIRECT_URL)
    except DomainError as error:
        return _dead_link(request, error)
    # 200 for a refused form too: Django logs the address of a 422, and this one lets its reader in.
    values = {"invite": invite, "form": form, "token": token, **other_ways()}
    return render(request, "accounts/invite.html", values)


def _dead_link(request: HttpRequest, error: DomainError) -> HttpResponse:
    return render(request, "accounts/dead_link.html", {"detail": error.detail}, status=error.status)


@project_page()
@require_safe
def members(request: PageRequest) -> HttpResponse:
    return _members_page(request, InviteForm())


def _members_page(request: PageRequest, form: InviteForm, **values: Any) -> HttpResponse:
    invites = request.project.invites.filter(used_at=None, expires_at__gt=timezone.now())
    values |= {
        "project": request.project,
        "members": _member_rows(request),
        "invites": invites.select_related("created_by") if request.may["admin"] else [],
        "roles": Role.choices,
        "form": form,
    }
    return render(request, "accounts/members.html", values, status=409 if "refused" in values else form_status(form))


def _member_rows(request: PageRequest) -> Sequence[Membership]:
    """The memberships, with whether their users have two-step sign-in, and whether the reader may make them a link."""
    steps = Authenticator.objects.filter(user=OuterRef("user_id")).exclude(type=Authenticator.Type.RECOVERY_CODES)
    rows = list(
        request.project.memberships.select_related("user").annotate(two_step=Exists(steps)).order_by("user__username")
    )
    may = access.may_set_passwords(request.user, [row.user for row in rows]) if request.may["manager"] else set()
    for row in rows:
        row.__dict__["may_set_password"] = row.user_id in may
    return rows


@project_action("manager")
def password_link(request: PageRequest, user_id: int) -> HttpResponse:
    """A link that sets a member's password, to be given to them by hand."""
    member = _member(request, user_id)
    if not access.may_set_passwords(request.user, [member]):
        raise Forbidden(_("You can't make this link: they have as many rights as you, or rights in other projects."))
    recorder.record(AuditKind.PASSWORD_LINK, AuditAction.CREATED, member.get_username(), project=request.project)
    url = public_url(request) + password_mail.path(member)
    return _members_page(request, InviteForm(), password_of=member, password_url=url)


@project_action("admin")
def invite_create(request: PageRequest) -> HttpResponse:
    form = InviteForm(request.POST)
    made = attempt(
        form, lambda: services.invite(request.project, request.user, form.cleaned_data["role"], ttl=form.ttl)
    )
    if made is None:
        return _members_page(request, form)
    invite, token = made
    url = public_url(request) + reverse("invite-accept", args=[token])
    return _members_page(request, InviteForm(), new_invite=invite, invite_url=url)


@project_action("admin")
def invite_withdraw(request: PageRequest, invite_id: int) -> HttpResponse:
    services.withdraw_invite(request.project, invite_id)
    return _back_to_members(request, _("Invite withdrawn."))


@project_action("admin")
def member_role(request: PageRequest, user_id: int) -> HttpResponse:
    try:
        changed = services.set_role(request.project, _member(request, user_id), request.POST.get("role", ""))
    except Conflict as error:
        return _members_page(request, InviteForm(), refused=error.detail)
    return _back_to_members(
        request, _("%(user)s now has the role %(role)s.") % {"user": changed.user, "role": changed.role}
    )


@project_action()
def member_remove(request: PageRequest, user_id: int) -> HttpResponse:
    """Admins remove members; members may leave."""
    member = _member(request, user_id)
    if member != request.user and not request.may["admin"]:
        raise Forbidden(_("Only project admins can remove other members."))
    try:
        services.remove_member(request.project, member)
    except Conflict as error:
        return _members_page(request, InviteForm(), refused=error.detail)
    if member == request.user and not member.is_superuser:
        return done(request, _("You left %(project)s.") % {"project": request.project}, "/")
    return _back_to_members(request, _("%(user)s was removed.") % {"user": member})


def _member(request: PageRequest, user_id: int) -> User:
    member = User.objects.filter(pk=user_id, memberships__project=request.project).first()
    if member is None:
        raise NotFound(_("Not a member of this project."))
    return member


def _back_to_members(request: PageRequest, text: str) -> HttpResponse:
    return done(request, text, "members", request.project.name)


@project_page("member")
@require_safe
def secrets(request: PageRequest) -> HttpResponse:
    return _secrets_page(request, SecretForm())


def _secrets_page(request: PageRequest, form: SecretForm) -> HttpResponse:
    values = {
        "project": request.project,
        "isolation": [(host_words.isolation(how), listing(hosts)) for how, hosts in names_by_isolation().items()],
        "shared_with": [
            (backend, listing(sorted({*projects} - {request.project.name})))
            for backend, projects in registry.shared_users().items()
            if request.project.name in projects
        ],
        "secrets": request.project.secrets.defer("ciphertext").select_related("updated_by"),
        "form": form,
    }
    return render(request, "accounts/secrets.html", values, status=form_status(form))


@project_action("admin")
def secret_set(request: PageRequest) -> HttpResponse:
    form = SecretForm(request.POST)
    made = attempt(form, lambda: services.set_secret(request.project, by=request.user, **form.cleaned_data))
    if made is None:
        return _secrets_page(request, form)
    text = _("Secret %(name)s saved. New runs get the new value.") % {"name": made.name}
    return done(request, text, "secrets", request.project.name)


@project_action("admin")
def secret_delete(request: PageRequest, name: str) -> HttpResponse:
    services.delete_secret(request.project, name)
    text = _("Secret %(name)s deleted.") % {"name": name}
    return done(request, text, "secrets", request.project.name)


@account_page
@require_safe
def tokens(request: PageRequest) -> HttpResponse:
    return _tokens_page(request, TokenForm(request.user))


def _tokens_page(request: PageRequest, form: TokenForm, **values: Any) -> HttpResponse:
    live = request.user.api_tokens.filter(revoked_at=None)
    live = live.select_related("project")
    values |= {"tokens": live, "now": timezone.now(), "form": form, "api_url": settings.DSTACKWEB_API_URL}
    return render(request, "accounts/tokens.html", values, status=form_status(form))


@account_action
def token_create(request: PageRequest) -> HttpResponse:
    form = TokenForm(request.user, request.POST)
    made = attempt(form, form.create)
    if made is None:
        return _tokens_page(request, form)
    row, plaintext = made
    return _tokens_page(request, TokenForm(request.user), new_token=row, plaintext=plaintext)


@account_action
def token_revoke(request: PageRequest, token_id: int) -> HttpResponse:
    services.revoke_token(request.user, token_id)
    return done(request, _("Token revoked."), "tokens")


@account_page
@require_safe
def sessions_page(request: PageRequest) -> HttpResponse:
    found = sessions.of_user(request.user, request.session.session_key or "")
    idle = units.duration(settings.SESSION_COOKIE_AGE)
    return render(request, "accounts/sessions.html", {"sessions": found, "idle": idle})


@account_action
def session_end(request: PageRequest, handle: str) -> HttpResponse:
    sessions.end(request.user, handle, request)
    return done(request, _("Signed out there."), "sessions")


@account_action
def sessions_end_others(request: PageRequest) -> HttpResponse:
    ended = sessions.end_others(request.user, request.session.session_key or "", request)
    text = ngettext("Signed out in %d other browser.", "Signed out in %d other browsers.", ended) % ended
    return done(request, text, "sessions")
