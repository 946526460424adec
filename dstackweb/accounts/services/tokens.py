"""Signing in without a password: API tokens, and single-use links."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

from django.utils import timezone

from dstackweb.accounts.models import ApiToken, LoginLink, User
from dstackweb.accounts.services.checks import check
from dstackweb.lib import sql
from dstackweb.lib.errors import Conflict, NotFound
from dstackweb.lib.secrets import digest, new_token

LOGIN_LINK_TTL = timedelta(minutes=15)
# A token may be used many times a second: its last use is stored once a minute, so that most requests write nothing.
USED_EVERY = timedelta(minutes=1)


def hint(token: str) -> str:
    """The last characters of a token, which identify it to its owner."""
    return f"…{token[-4:]}" if len(token) >= 20 else "…"


def create_token(user: User, name: str) -> tuple[ApiToken, str]:
    """A new API token and its plain text, which is not stored and can't be shown again. Raises Invalid at `name`."""
    token = new_token("dw")
    row = ApiToken(user=user, name=name.strip(), digest=digest(token), hint=hint(token))
    check(row, "name")
    row.save()
    return row, token


def revoke_token(user: User, token_id: int) -> None:
    """Revoke a token of this user. Raises NotFound if they have no such valid token."""
    live = ApiToken.objects.filter(pk=token_id, user=user, revoked_at=None)
    if not live.update(revoked_at=timezone.now()):
        raise NotFound("This token does not exist or was already revoked.")


_WHOSE = """
SELECT person.*, token.id AS token_id, token.last_used_at AS token_used_at
FROM accounts_apitoken token JOIN accounts_user person ON person.id = token.user_id
WHERE token.digest = %s AND token.revoked_at IS NULL
"""


def authenticate_token(plaintext: str) -> User | None:
    """The active user of a valid token, or None.

    Tokens are looked up by digest, so the time does not depend on how much of a guess is right.
    """
    user: Any = next(iter(User.objects.raw(_WHOSE, [digest(plaintext)])), None)
    if user is None or not user.is_active:
        return None
    now = timezone.now()
    if user.token_used_at is None or now - sql.utc(user.token_used_at) >= USED_EVERY:
        ApiToken.objects.filter(pk=user.token_id).update(last_used_at=now)
    return cast(User, user)


def make_login_link(user: User, ttl: timedelta = LOGIN_LINK_TTL) -> str:
    """The token of a new single-use sign-in link. Raises Conflict for an inactive user."""
    if not user.is_active:
        raise Conflict(f"{user} is not active and can't sign in.")
    token = new_token("in")
    LoginLink.objects.create(user=user, digest=digest(token), expires_at=timezone.now() + ttl)
    return token


def open_login_link(token: str) -> LoginLink:
    """The valid link of a token. Raises NotFound if unknown, Conflict if used or expired."""
    link = LoginLink.objects.select_related("user").filter(digest=digest(token)).first()
    if link is None or not link.user.is_active:
        raise NotFound("This sign-in link does not exist.")
    if link.used_at is not None:
        raise Conflict("This single-use sign-in link was already used.")
    if link.expires_at <= timezone.now():
        raise Conflict("This sign-in link has expired.")
    return link


def use_login_link(token: str) -> User:
    """Mark the link as used, and return its user. Raises what `open_login_link` raises."""
    link = open_login_link(token)
    # Two browsers may use the link at once: the first UPDATE wins. It reads no other table: PostgreSQL would show it
    # the state before the other commit.
    now = timezone.now()
    if not LoginLink.objects.filter(pk=link.pk, used_at=None, expires_at__gt=now).update(used_at=now):
        raise Conflict("This single-use sign-in link was already used.")
    return link.user
