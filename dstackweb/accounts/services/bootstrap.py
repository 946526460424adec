"""The first admin and project, created at the first start; password and token are updated at each start."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone

from dstackweb.accounts.models import ENVIRONMENT, ApiToken, Membership, Project, Role, User
from dstackweb.accounts.services.tokens import hint
from dstackweb.lib.errors import Conflict
from dstackweb.lib.secrets import digest

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
    """Create the superuser `admin` and the project `main` if there is no admin, and set the environment's password
    and token. Safe to call by several processes at once: one of them creates the admin, and only that one knows the
    password.

    Raises Conflict if there is no active superuser, and another account has the name `admin`.
    """
    wanted: str = settings.DSTACKWEB_ADMIN_PASSWORD
    made = Bootstrap(False, "")
    admin = first_admin()
    if admin is None:
        password = wanted or secrets.token_urlsafe(12)
        admin, created = _create_admin(password)
        made = Bootstrap(created, "", password if created and not wanted else None)
    # Setting a password ends the user's sessions, so an unchanged password is not set again.
    if wanted and not admin.check_password(wanted):
        admin.set_password(wanted)
        admin.save(update_fields=["password"])
    if settings.DSTACKWEB_ADMIN_TOKEN:
        _apply_token(admin, settings.DSTACKWEB_ADMIN_TOKEN)
    return replace(made, username=admin.username)


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
                "Create a superuser with `manage.py createsuperuser`."
            ) from None
        return other, False


def _apply_token(admin: User, plaintext: str) -> None:
    """Make the environment's value a valid token of the first admin, and revoke earlier values."""
    current = digest(plaintext)
    values = {"user": admin, "name": ENVIRONMENT, "hint": hint(plaintext), "revoked_at": None}
    with transaction.atomic():
        ApiToken.objects.update_or_create(digest=current, defaults=values)
        earlier = ApiToken.objects.filter(name=ENVIRONMENT, revoked_at=None).exclude(digest=current)
        earlier.update(revoked_at=timezone.now())
