"""Changes to accounts. Functions validate their input, not permissions: callers check those with `access` first."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from allauth.mfa.models import Authenticator
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.db import IntegrityError, transaction
from django.db.models import Model
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.access import role_in
from dstackweb.accounts.models import (
    ApiToken,
    Invite,
    LoginLink,
    Membership,
    Project,
    ProjectSecret,
    Role,
    TokenScope,
    User,
)
from dstackweb.lib.errors import Conflict, DomainError, FieldError, Invalid, NotFound
from dstackweb.lib.secrets import decrypt, digest, encrypt, new_token
from dstackweb.spec.env import SECRET_MIN, is_weak

INVITE_TTL = timedelta(days=7)


def set_role(project: Project, user: User, role: str) -> Membership:
    """Change a role, no longer one by a group. Raises NotFound for who is no member, Conflict for the last admin."""
    _check_role(role)
    with transaction.atomic():
        membership = _locked_membership(project, user, stays_admin=role == Role.ADMIN)
        membership.role, membership.by_group = role, False
        membership.save(update_fields=["role", "by_group"])
    return membership


def remove_member(project: Project, user: User) -> None:
    """Remove a member. Raises NotFound if the user is not a member, Conflict for the last admin."""
    with transaction.atomic():
        _locked_membership(project, user, stays_admin=False).delete()


def _locked_membership(project: Project, user: User, stays_admin: bool) -> Membership:
    """The membership, with the project's row locked until the transaction ends.

    The lock puts role changes in order: two admins who remove each other at the same time must not both succeed.
    (On SQLite the transaction has the write lock from its start.)
    """
    Project.objects.select_for_update().get(pk=project.pk)
    membership = Membership.objects.filter(project=project, user=user).first()
    if membership is None:
        raise NotFound(_("%(user)s is not a member of %(project)s.") % {"user": user, "project": project})
    if membership.role == Role.ADMIN and not stays_admin:
        admins = Membership.objects.filter(project=project, role=Role.ADMIN, user__is_active=True)
        if not admins.exclude(user=user).exists():
            raise Conflict(
                _("%(user)s is the last admin of %(project)s. Make another member an admin first.")
                % {"user": user, "project": project}
            )
    return membership


def _check_role(role: str) -> None:
    if role not in Role.values:
        raise Invalid.at(
            "role",
            msg=_("Unknown role %(role)s. Roles are %(values)s.") % {"role": role, "values": ", ".join(Role.values)},
        )


def invite(project: Project, by: User, role: str, ttl: timedelta = INVITE_TTL) -> tuple[Invite, str]:
    """A new invite and its token, which is not stored and can't be shown again."""
    _check_role(role)
    token = new_token("inv")
    row = Invite.objects.create(
        project=project, role=role, created_by=by, digest=digest(token), expires_at=timezone.now() + ttl
    )
    return row, token


def withdraw_invite(project: Project, invite_id: int) -> None:
    """Delete an unused invite of this project. Raises NotFound if there is none."""
    if not Invite.objects.filter(project=project, pk=invite_id, used_at=None).delete()[0]:
        raise NotFound(_("This invite was already used or withdrawn."))


def open_invite(token: str) -> Invite:
    """The valid invite of a token. Raises NotFound if unknown, Conflict if used, expired, or by no admin any more."""
    row = Invite.objects.select_related("project", "created_by").filter(digest=digest(token)).first()
    if row is None:
        raise NotFound(_("This invite does not exist or was withdrawn. Ask for a new one."))
    _check_open(row, _("invite"))
    if role_in(row.project, row.created_by) != Role.ADMIN:
        raise Conflict(
            _("The creator of this invite is no longer an admin of %(project)s. Ask for a new one.")
            % {"project": row.project}
        )
    return row


def accept_invite(token: str, username: str, password: str) -> Membership:
    """Create an account that joins the project. After an error the invite is still unused.

    Raises Invalid at `username` or `password`, and what `open_invite` raises.
    """
    row = open_invite(token)
    user = User(username=User.normalize_username(username.strip()))
    _check_account(user, password)
    user.set_password(password)
    try:
        with transaction.atomic():
            user.save()
            return _join(row, user)
    except IntegrityError:
        raise Invalid.at("username", msg=_("This username is taken.")) from None


def join_by_invite(token: str, user: User) -> Membership:
    """Join with an existing account. Raises Conflict for members; their role and the invite stay unchanged."""
    row = open_invite(token)
    try:
        with transaction.atomic():
            return _join(row, user)
    except IntegrityError:
        raise Conflict(_("You are already a member of %(project)s.") % {"project": row.project}) from None


def _join(row: Invite, user: User) -> Membership:
    _use(row, _("invite"), used_by=user)
    return Membership.objects.create(project=row.project, user=user, role=row.role)


def _check_account(user: User, password: str) -> None:
    errors: list[FieldError] = []
    try:
        check(user, "username")
        # A username that differs only in case could impersonate another user.
        if User.objects.filter(username__iexact=user.username).exists():
            errors.append({"loc": ["username"], "line": None, "msg": _("This username is taken.")})
    except Invalid as error:
        errors += error.errors
    try:
        validate_password(password, user)
    except ValidationError as error:
        errors += field_errors(error, "password")
    if errors:
        raise invalid(errors)


LOGIN_LINK_TTL = timedelta(minutes=15)


def hint(token: str) -> str:
    """The last characters of a token, which identify it to its owner."""
    return f"…{token[-4:]}" if len(token) >= 20 else "…"


def create_token(
    user: User,
    name: str,
    *,
    scope: str = TokenScope.ADMIN,
    project: Project | None = None,
    expires_at: datetime | None = None,
) -> tuple[ApiToken, str]:
    """A new API token and its plain text, which is not stored and can't be shown again.

    Without `expires_at` it never expires. Raises Invalid at `name` or `scope`, NotFound for a project of others.
    """
    if project is not None and role_in(project, user) is None:
        raise NotFound(_("There is no project %(project)s, or you are not a member of it.") % {"project": project.name})
    token = new_token("dw")
    row = ApiToken(
        user=user, name=name.strip(), digest=digest(token), hint=hint(token), scope=scope, project=project,
        expires_at=expires_at,
    )  # fmt: skip
    check(row, "name", "scope")
    row.save()
    return row, token


def revoke_token(user: User, token_id: int) -> None:
    """Revoke a token of this user. Raises NotFound if they have no such valid token."""
    with transaction.atomic():
        live = ApiToken.objects.select_for_update().filter(pk=token_id, user=user, revoked_at=None).first()
        if live is None:
            raise NotFound(_("This token does not exist or was already revoked."))
        live.revoked_at = timezone.now()
        live.save(update_fields=["revoked_at"])


def revoke_all_tokens(user: User) -> int:
    """Revoke all tokens of this user; returns how many were valid."""
    live = user.api_tokens.filter(revoked_at=None)
    for token in live:
        token.revoked_at = timezone.now()
        token.save(update_fields=["revoked_at"])
    return len(live)


def make_login_link(user: User, ttl: timedelta = LOGIN_LINK_TTL) -> str:
    """The token of a new single-use sign-in link. Raises Conflict for an inactive user."""
    if not user.is_active:
        raise Conflict(_("%(user)s is not active and can't sign in.") % {"user": user})
    token = new_token("in")
    LoginLink.objects.create(user=user, digest=digest(token), expires_at=timezone.now() + ttl)
    return token


def open_login_link(token: str) -> LoginLink:
    """The valid link of a token. Raises NotFound if unknown, Conflict if used or expired."""
    link = LoginLink.objects.select_related("user").filter(digest=digest(token)).first()
    if link is None or not link.user.is_active:
        raise NotFound(_("This sign-in link does not exist."))
    _check_open(link, _("sign-in link"))
    return link


def use_login_link(token: str) -> User:
    """Mark the link as used, and return its user. Raises what `open_login_link` raises."""
    link = open_login_link(token)
    _use(link, _("sign-in link"))
    return link.user


def reset_second_step(user: User) -> int:
    """Remove the user's app, passkeys and recovery codes, for when they have lost them; returns how many there were."""
    rows = list(Authenticator.objects.filter(user=user))
    for row in rows:
        row.delete()
    return len(rows)


def _check_open(row: Invite | LoginLink, what: str) -> None:
    if row.used_at is not None:
        raise Conflict(_("This single-use %(what)s was already used. Ask for a new one.") % {"what": what})
    if row.expires_at <= timezone.now():
        raise Conflict(_("This %(what)s has expired. Ask for a new one.") % {"what": what})


def _use(row: Invite | LoginLink, what: str, **values: Any) -> None:
    """Mark as used. Of two users at once the first UPDATE wins.

    It reads no other table: PostgreSQL would show it the state before the other commit.
    """
    now = timezone.now()
    unused = type(row)._default_manager.filter(pk=row.pk, used_at=None, expires_at__gt=now)
    if not unused.update(used_at=now, **values):
        raise Conflict(_("This single-use %(what)s was already used. Ask for a new one.") % {"what": what})


VALUE_LIMIT = 64 * 1024


def check_value(value: str) -> None:
    """Raise Invalid unless an environment variable can have the value, and logs can hide it."""
    if not value:
        raise Invalid.at("value", msg=_("The value is empty."))
    if "\0" in value:
        raise Invalid.at("value", msg=_("The value can't contain NUL characters."))
    if len(value.encode()) > VALUE_LIMIT:
        raise Invalid.at("value", msg=_("The value is larger than 64 KiB."))
    if is_weak(value):
        msg = _(
            "The value has fewer than %(secret_min)s characters, or is a common word, so it can't be hidden in logs. "
            "Choose another, or write what is not secret into env of the run file."
        ) % {"secret_min": SECRET_MIN}
        raise Invalid.at("value", msg=msg)


def set_secret(project: Project, name: str, value: str, by: User) -> ProjectSecret:
    """Create a secret or replace its value. Raises Invalid at `name` or `value`."""
    check(ProjectSecret(project=project, name=name), "name")
    check_value(value)
    row, _created = ProjectSecret.objects.update_or_create(
        project=project,
        name=name,
        defaults={"ciphertext": encrypt(value), "updated_by": by, "updated_at": timezone.now()},
    )
    return row


def delete_secret(project: Project, name: str) -> None:
    """Delete a secret. Raises NotFound if there is none of this name."""
    if not ProjectSecret.objects.filter(project=project, name=name).delete()[0]:
        raise NotFound(_("%(project)s has no secret %(name)s.") % {"project": project, "name": name})


def secret_names(project: Project) -> list[str]:
    return list(ProjectSecret.objects.filter(project=project).order_by("name").values_list("name", flat=True))


def secret_values(project: Project) -> dict[str, str]:
    """All secrets in plain text by name, for a run's environment and for masking its log; never for a page.

    Raises Conflict for a secret that was encrypted with another secret key.
    """
    values = {}
    for row in ProjectSecret.objects.filter(project=project):
        try:
            values[row.name] = decrypt(row.ciphertext)
        except DomainError:
            raise Conflict(
                _("The secret %(row)s of %(project)s was encrypted with another secret key. Set it again.")
                % {"row": row.name, "project": project}
            ) from None
    return values


def check(row: Model, *fields: str) -> None:
    """Validate these fields of an unsaved row; raises Invalid with an error for each.

    Uniqueness is left to the database: only there it can be checked without a race.
    """
    others = {field.name for field in row._meta.get_fields()} - set(fields)
    try:
        row.clean_fields(exclude=others)
    except ValidationError as error:
        raise invalid(list(field_errors(error))) from None


def field_errors(error: ValidationError, field: str = "") -> Iterator[FieldError]:
    """The messages of a ValidationError with their fields; a message without a field gets `field`."""
    by_field = error.message_dict if hasattr(error, "error_dict") else {field: error.messages}
    for name, messages in by_field.items():
        loc: list[str | int] = [name] if name and name != NON_FIELD_ERRORS else []
        for message in messages:
            yield {"loc": loc, "line": None, "msg": message}


def invalid(errors: list[FieldError]) -> Invalid:
    """An Invalid with several field errors; its text names each field."""
    return Invalid(" ".join(": ".join([*map(str, e["loc"]), e["msg"]]) for e in errors), errors)
