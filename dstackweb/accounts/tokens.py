"""Who an API token signs in, and into which project: one query, since every request of the API begins with it."""

from __future__ import annotations

import datetime as dt
import functools
from typing import NamedTuple

from django.utils import timezone

from dstackweb.accounts.access import enter
from dstackweb.accounts.models import ApiToken, Project, TokenLimit, TokenScope, User
from dstackweb.lib import sql
from dstackweb.lib.secrets import digest

USED_EVERY = dt.timedelta(minutes=1)
"""How often the last use of a token is stored, which may be many times a second: so most requests write nothing."""


class TokenUser(NamedTuple):
    """The active user of a token, and the project of the name that was asked for with their membership's role there."""

    user: User
    project: Project | None = None
    role: str | None = None

    def enter(self, name: str) -> tuple[Project, str]:
        """As `access.project_for`."""
        return enter(self.user, name, self.project, self.role)


_STATEMENT = """
SELECT token.id, token.name, token.last_used_at, token.scope, token.project_id, membership.role, {person}, {entered}
FROM accounts_apitoken token JOIN accounts_user person ON person.id = token.user_id
LEFT JOIN accounts_project entered ON entered.name = %s AND entered.deleting_since IS NULL
LEFT JOIN accounts_membership membership ON membership.project_id = entered.id AND membership.user_id = person.id
WHERE token.digest = %s AND token.revoked_at IS NULL AND (token.expires_at IS NULL OR token.expires_at > %s)
"""


@functools.cache
def _columns() -> tuple[sql.ModelColumns[User], sql.ModelColumns[Project], str]:
    """The columns of the user and the project, and the statement that selects them."""
    person, entered = sql.ModelColumns(User, "person"), sql.ModelColumns(Project, "entered")
    return person, entered, _STATEMENT.format(person=person.sql, entered=entered.sql)


def sign_in(plaintext: str, project: str = "") -> TokenUser | None:
    """Whom a valid token signs in; None for any other string, and for a user who is not active.

    Tokens are looked up by digest, so the time does not depend on how much of a guess is right.
    """
    now = timezone.now()
    person, entered, statement = _columns()
    for pk, name, used_at, scope, limited_to, role, *values in sql.rows(statement, [project, digest(plaintext), now]):
        user = person.instance(values[: person.number])
        if user is None or not user.is_active:
            return None
        user.token_limit, user.token_name = TokenLimit(TokenScope(scope), limited_to), name
        if used_at is None or now - used_at >= USED_EVERY:
            ApiToken.objects.filter(pk=pk).update(last_used_at=now)
        return TokenUser(user, entered.instance(values[person.number :]), role)
    return None


def authenticate_token(plaintext: str) -> User | None:
    """The active user of a valid token, or None."""
    found = sign_in(plaintext)
    return found.user if found else None
