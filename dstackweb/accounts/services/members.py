"""Projects, their members, and invites, which need no mail server."""

from __future__ import annotations

from datetime import timedelta

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils import timezone

from dstackweb.accounts.access import role_in
from dstackweb.accounts.models import Invite, Membership, Project, Role, User
from dstackweb.accounts.services.checks import check, field_errors, invalid
from dstackweb.lib.errors import Conflict, FieldError, Invalid, NotFound
from dstackweb.lib.secrets import digest, new_token

INVITE_TTL = timedelta(days=7)


def create_project(user: User, name: str) -> Project:
    """A new project with `user` as its admin. Raises Invalid for a bad name, Conflict for a taken one."""
    project = Project(name=name)
    check(project, "name")
    try:
        with transaction.atomic():
            project.save()
            Membership.objects.create(project=project, user=user, role=Role.ADMIN)
    except IntegrityError:
        raise Conflict(f"A project named {name} already exists.") from None
    return project


def set_role(project: Project, user: User, role: str) -> Membership:
    """Change a member's role. Raises NotFound if the user is not a member, Conflict for the last admin."""
    _check_role(role)
    with transaction.atomic():
        membership = _locked_membership(project, user, stays_admin=role == Role.ADMIN)
        membership.role = role
        membership.save(update_fields=["role"])
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
        raise NotFound(f"{user} is not a member of {project}.")
    if membership.role == Role.ADMIN and not stays_admin:
        admins = Membership.objects.filter(project=project, role=Role.ADMIN, user__is_active=True)
        if not admins.exclude(user=user).exists():
            raise Conflict(f"{user} is the last admin of {project}. Make another member an admin first.")
    return membership


def _check_role(role: str) -> None:
    if role not in Role.values:
        raise Invalid.at("role", msg=f"Unknown role {role}. Roles are {', '.join(Role.values)}.")


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
    deleted, _ = Invite.objects.filter(project=project, pk=invite_id, used_at=None).delete()
    if not deleted:
        raise NotFound("This invite was already used or withdrawn.")


def open_invite(token: str) -> Invite:
    """The valid invite of a token.

    Raises NotFound if unknown, Conflict if used, expired, or created by a user who is no longer an admin.
    """
    row = Invite.objects.select_related("project", "created_by").filter(digest=digest(token)).first()
    if row is None:
        raise NotFound("This invite does not exist or was withdrawn. Ask for a new one.")
    if row.used_at is not None:
        raise Conflict("This single-use invite was already used. Ask for a new one.")
    if row.expires_at <= timezone.now():
        raise Conflict("This invite has expired. Ask for a new one.")
    if role_in(row.project, row.created_by) != Role.ADMIN:
        raise Conflict(f"The creator of this invite is no longer an admin of {row.project}. Ask for a new one.")
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
        raise Invalid.at("username", msg="This username is taken.") from None


def join_by_invite(token: str, user: User) -> Membership:
    """Join with an existing account. Raises Conflict for members; their role and the invite stay unchanged."""
    row = open_invite(token)
    try:
        with transaction.atomic():
            return _join(row, user)
    except IntegrityError:
        raise Conflict(f"You are already a member of {row.project}.") from None


def _join(row: Invite, user: User) -> Membership:
    # Two users may open one invite at once: the first UPDATE wins. It reads no other table: PostgreSQL would show it
    # the state before the other commit.
    now = timezone.now()
    if not Invite.objects.filter(pk=row.pk, used_at=None, expires_at__gt=now).update(used_at=now, used_by=user):
        raise Conflict("This single-use invite was already used. Ask for a new one.")
    return Membership.objects.create(project=row.project, user=user, role=row.role)


def _check_account(user: User, password: str) -> None:
    errors: list[FieldError] = []
    try:
        check(user, "username")
        # A username that differs only in case could impersonate another user.
        if User.objects.filter(username__iexact=user.username).exists():
            errors.append({"loc": ["username"], "line": None, "msg": "This username is taken."})
    except Invalid as error:
        errors += error.errors
    try:
        validate_password(password, user)
    except ValidationError as error:
        errors += field_errors(error, "password")
    if errors:
        raise invalid(errors)
