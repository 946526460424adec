"""What signs a person in without a password: API tokens, and links that work once."""

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
# A token is used many times a second; when it was last used is told to the minute, so that reads stay reads.
USED_EVERY = timedelta(minutes=1)


def hint(token: str) -> str:
    """The end of a token, by which its owner knows it: too little to guess the rest from."""
    return f"…{token[-4:]}" if len(token) >= 20 else "…"


def create_token(user: User, name: str) -> tuple[ApiToken, str]:
    """An API token and its plain text, which is in no row and can't be shown again. Raises Invalid at `name`."""
    token = new_token("dw")
    row = ApiToken(user=user, name=name.strip(), digest=digest(token), hint=hint(token))
    check(row, "name")
    row.save()
    return row, token


def revoke_token(user: User, token_id: int) -> None:
    """End a token of this user at once. Raises NotFound if they have no such live token."""
    live = ApiToken.objects.filter(pk=token_id, user=user, revoked_at=None)
    if not live.update(revoked_at=timezone.now()):
        raise NotFound("You have no such token, or it is revoked already.")


_WHOSE = """
SELECT person.*, token.id AS token_id, token.last_used_at AS token_used_at
FROM accounts_apitoken token JOIN accounts_user person ON person.id = token.user_id
WHERE token.digest = %s AND token.revoked_at IS NULL
"""


def authenticate_token(plaintext: str) -> User | None:
    """The active user of a live token, or None.

    The look-up is by digest, so its time says nothing about how much of a guess was right.
    """
    user: Any = next(iter(User.objects.raw(_WHOSE, [digest(plaintext)])), None)
    if user is None or not user.is_active:
        return None
    now = timezone.now()
    if user.token_used_at is None or now - sql.utc(user.token_used_at) >= USED_EVERY:
        ApiToken.objects.filter(pk=user.token_id).update(last_used_at=now)
    return cast(User, user)


def make_login_link(user: User, ttl: timedelta = LOGIN_LINK_TTL) -> str:
    """The token of a link that signs this user in once. Raises Conflict for an inactive user."""
    if not user.is_active:
        raise Conflict(f"{user} is not active and can't sign in.")
    token = new_token("in")
    LoginLink.objects.create(user=user, digest=digest(token), expires_at=timezone.now() + ttl)
    return token


def open_login_link(token: str) -> LoginLink:
    """The link of a token that would work now. Raises NotFound if unknown, Conflict if used or expired."""
    link = LoginLink.objects.select_related("user").filter(digest=digest(token)).first()
    if link is None or not link.user.is_active:
        raise NotFound("This sign-in link doesn't exist.")
    if link.used_at is not None:
        raise Conflict("This sign-in link has been used already; each works once.")
    if link.expires_at <= timezone.now():
        raise Conflict("This sign-in link has expired.")
    return link


def use_login_link(token: str) -> User:
    """Use the link up, and say whom it signs in. Raises what `open_login_link` raises."""
    link = open_login_link(token)
    # Two browsers may press the button at once: whoever's UPDATE finds the link unused is signed in. It names no
    # other table, as PostgreSQL would judge those by the state before the other's commit.
    now = timezone.now()
    if not LoginLink.objects.filter(pk=link.pk, used_at=None, expires_at__gt=now).update(used_at=now):
        raise Conflict("This sign-in link has been used already; each works once.")
    return link.user
