"""Tokens, which are stored as digests, and secrets, which are stored encrypted."""

from __future__ import annotations

import base64
import hashlib
import secrets
from functools import lru_cache

from cryptography.fernet import Fernet, InvalidToken
from django.conf import settings
from django.utils.translation import gettext as _

from dstackweb.lib.errors import DomainError


def new_token(prefix: str) -> str:
    """A random token of 256 bits with a prefix for its kind: `dw_…`."""
    return f"{prefix}_{secrets.token_urlsafe(32)}"


def digest(token: str) -> str:
    """The SHA-256 of a token in hex, which is stored. A random token needs no slow hash."""
    return hashlib.sha256(token.encode()).hexdigest()


def encrypt(plain: str) -> str:
    """`plain` encrypted with the deployment's secret key; different each time."""
    return _fernet(settings.SECRET_KEY).encrypt(plain.encode()).decode()


def decrypt(encrypted: str) -> str:
    """The inverse of `encrypt`. Raises DomainError if it was encrypted with another secret key."""
    try:
        return _fernet(settings.SECRET_KEY).decrypt(encrypted.encode()).decode()
    except InvalidToken:
        raise DomainError(_("a stored secret can't be decrypted: it was encrypted with another secret key")) from None


@lru_cache(maxsize=2)
def _fernet(secret_key: str) -> Fernet:
    # The prefix makes this key different from the one that Django signs with.
    key = hashlib.sha256(b"dstackweb secrets\0" + secret_key.encode()).digest()
    return Fernet(base64.urlsafe_b64encode(key))
