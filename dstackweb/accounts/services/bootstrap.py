"""What a deployment needs before anybody can sign in, made at the first start and kept up at every other."""

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
    """What a start found or made. `password` is set only when this start made one up: show it once."""

    created: bool
    username: str
    password: str | None = field(default=None, repr=False)


def first_admin() -> User | None:
    """The oldest active superuser: whom DSTACKWEB_ADMIN_PASSWORD and DSTACKWEB_ADMIN_TOKEN mean."""
    return User.objects.filter(is_superuser=True, is_active=True).order_by("pk").first()


def bootstrap() -> Bootstrap:
    """Make the superuser `admin` and the project `main` if there is no admin yet; apply the environment's
    password and token. Every process may call it at every start, also several at once: one of them makes the
    admin, and only that one knows the password.

    Raises Conflict if nobody is an active superuser while `admin` is taken by somebody else.
    """
    wanted: str = settings.DSTACKWEB_ADMIN_PASSWORD
    made = Bootstrap(False, "")
    admin = first_admin()
    if admin is None:
        password = wanted or secrets.token_urlsafe(12)
        admin, created = _create_admin(password)
        made = Bootstrap(created, "", password if created and not wanted else None)
    # Setting a password ends its owner's sessions, so the one that holds already is left alone.
    if wanted and not admin.check_password(wanted):
        admin.set_password(wanted)
        admin.save(update_fields=["password"])
    if settings.DSTACKWEB_ADMIN_TOKEN:
        _apply_token(admin, settings.DSTACKWEB_ADMIN_TOKEN)
    return replace(made, username=admin.username)


def _create_admin(password: str) -> tuple[User, bool]:
    """The first admin, and whether this call made it: another start may have been first."""
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
                f"There is no active superuser, and the name {ADMIN} is taken by an account that isn't one. "
                "Make one with `manage.py createsuperuser`."
            ) from None
        return other, False


def _apply_token(admin: User, plaintext: str) -> None:
    """The environment is the truth: its value is a live token of the first admin, and earlier values are not."""
    current = digest(plaintext)
    values = {"user": admin, "name": ENVIRONMENT, "hint": hint(plaintext), "revoked_at": None}
    with transaction.atomic():
        ApiToken.objects.update_or_create(digest=current, defaults=values)
        earlier = ApiToken.objects.filter(name=ENVIRONMENT, revoked_at=None).exclude(digest=current)
        earlier.update(revoked_at=timezone.now())
