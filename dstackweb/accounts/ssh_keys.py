"""The SSH keys of users: public ones, with which they enter their dev environments."""

from __future__ import annotations

from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from dstackweb.accounts.models import SSHKey, TokenLimit, TokenScope, User
from dstackweb.accounts.services import check
from dstackweb.lib.errors import Conflict, Forbidden, Invalid, NotFound
from dstackweb.lib.ssh_keys import read_public_key

MOST = 50
"""Keys of one user."""


def add(user: User, public_key: str, name: str = "") -> SSHKey:
    """Add a public key; without a name it has that of its comment.

    Raises Invalid for what is no key, Conflict for one that is there, Forbidden with a limited token: a key is not.
    """
    if user.token_limit not in (None, TokenLimit(TokenScope.ADMIN, None)):
        raise Forbidden(_("This token is limited, and an SSH key is not: use a token with the scope “everything”."))
    try:
        line, fingerprint = read_public_key(public_key)
    except ValueError as error:
        raise Invalid.at("public_key", msg=str(error)) from None
    comment = " ".join(public_key.split()[2:])
    row = SSHKey(user=user, name=(name.strip() or comment or line.split()[0])[:80], public_key=line)
    row.fingerprint = fingerprint
    check(row, "name", "public_key")
    if user.ssh_keys.count() >= MOST:
        raise Conflict(_("You have %(most)s SSH keys. Remove one first.") % {"most": MOST})
    try:
        with transaction.atomic():
            row.save()
    except IntegrityError:
        raise Conflict(_("You have added this key already.")) from None
    return row


def remove(user: User, key_id: int) -> SSHKey:
    """Remove a key of this user. Raises NotFound."""
    row = SSHKey.objects.filter(user=user, pk=key_id).first()
    if row is None:
        raise NotFound(_("You have no such SSH key."))
    row.delete()
    return row
