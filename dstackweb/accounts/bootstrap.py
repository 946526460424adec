"""The first admin of a deployment, made at its start, with the environment's password and token."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from django.conf import settings
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils import timezone

from dstackweb.accounts.models import ENVIRONMENT, ApiToken, Membership, Project, Role, User
from dstackweb.accounts.services import hint
from dstackweb.lib.commands import server_command
from dstackweb.lib.errors import Conflict, Invalid
from dstackweb.lib.secrets import digest

TOKEN_LEAST = 20
"""Characters of DSTACKWEB_ADMIN_TOKEN."""
ADMIN = "admin"
FIRST_PROJECT = "main"


@dataclass(frozen=True)
class Bootstrap:
    """The result of a start. `password` is set only if this start generated it: show it once."""

    created: bool
    username: str
    password: str | None = field(default=None, repr=False)


def first_admin() -> User | None:
    """The oldest active superuser: the user of DSTACKWEB_ADMIN_PASSWORD and DSTACKWEB_ADMIN_TOKEN."""
    return User.objects.filter(is_superuser=True, is_active=True).order_by("pk").first()


def bootstrap() -> Bootstrap:
    """Create the superuser `admin` and the project `main` if there is no admin; set the environment's password, token.

    Of several processes at once one creates the admin, and only that one knows the password. Raises Conflict if there
    is no active superuser, and another account is called `admin`, and Invalid if password or token are too weak.
    """
    wanted: str = settings.DSTACKWEB_ADMIN_PASSWORD
    _check_strength(wanted, settings.DSTACKWEB_ADMIN_TOKEN)
    password = wanted or secrets.token_urlsafe(12)
    found = first_admin()
    admin, created = (found, False) if found else _create_admin(password)
    # Setting a password ends the user's sessions, so an unchanged password is not set again.
    if wanted and not admin.check_password(wanted):
        admin.set_password(wanted)
        admin.save(update_fields=["password"])
    if settings.DSTACKWEB_ADMIN_TOKEN:
        _apply_token(admin, settings.DSTACKWEB_ADMIN_TOKEN)
    return Bootstrap(created, admin.username, password if created and not wanted else None)


def _check_strength(password: str, token: str) -> None:
    if password:
        try:
            validate_password(password, User(username=ADMIN))
        except ValidationError as error:
            raise Invalid(f"DSTACKWEB_ADMIN_PASSWORD is too weak: {' '.join(error.messages)}", []) from None
    if token and (len(token) < TOKEN_LEAST or len(set(token)) < TOKEN_LEAST / 2):
        text = f"at least {TOKEN_LEAST} characters, such as the output of `openssl rand -hex 32`"
        raise Invalid(f"DSTACKWEB_ADMIN_TOKEN is too weak: it needs {text}", [])


def _create_admin(password: str) -> tuple[User, bool]:
    """The first admin, and whether this call created it: another process may have been faster."""
    admin = User(username=ADMIN, is_staff=True, is_superuser=True)
    admin.set_password(password)
    try:
        with transaction.atomic():
            admin.save()
            project, _ = Project.objects.get_or_create(name=FIRST_PROJECT)
            Membership.objects.create(project=project, user=admin, role=Role.ADMIN)
        return admin, True
    except IntegrityError:
        other = first_admin()
        if other is None:
            raise Conflict(
                f"There is no active superuser, and the account {ADMIN} is not one. "
                f"Create a superuser with `{server_command('createsuperuser')}`."
            ) from None
        return other, False


def _apply_token(admin: User, plaintext: str) -> None:
    """Make the environment's value a valid token of the first admin, and revoke earlier values."""
    current = digest(plaintext)
    values = {"user": admin, "name": ENVIRONMENT, "hint": hint(plaintext), "revoked_at": None}
    with transaction.atomic():
        ApiToken.objects.update_or_create(digest=current, defaults=values)
        for earlier in ApiToken.objects.filter(name=ENVIRONMENT, revoked_at=None).exclude(digest=current):
            earlier.revoked_at = timezone.now()
            earlier.save(update_fields=["revoked_at"])
