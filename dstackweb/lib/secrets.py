"""Tokens that are shown once and kept as digests; secrets that are kept encrypted."""

from __future__ import annotations

import base64
import hashlib
import secrets
from functools import lru_cache

from cryptography.fernet import Fernet, InvalidToken
from django.conf import settings

from dstackweb.lib.errors import DomainError


def new_token(prefix: str) -> str:
    """A random token of 256 bits that says what it is: `dw_…`."""
    return f"{prefix}_{secrets.token_urlsafe(32)}"


def digest(token: str) -> str:
    """What is stored of a token: its SHA-256 in hex. A random token needs no slow hash."""
    return hashlib.sha256(token.encode()).hexdigest()


def encrypt(plain: str) -> str:
    """`plain`, readable only with the deployment's secret key; different each time."""
    return _fernet(settings.SECRET_KEY).encrypt(plain.encode()).decode()


def decrypt(encrypted: str) -> str:
    """The inverse of `encrypt`. Raises DomainError when it was encrypted with another secret key."""
    try:
        return _fernet(settings.SECRET_KEY).decrypt(encrypted.encode()).decode()
    except InvalidToken:
        raise DomainError("a stored secret can't be read: it was stored under another secret key") from None


@lru_cache(maxsize=2)
def _fernet(secret_key: str) -> Fernet:
    # A purpose in the hash: the key must not be the one that Django signs with.
    key = hashlib.sha256(b"dstackweb secrets\0" + secret_key.encode()).digest()
    return Fernet(base64.urlsafe_b64encode(key))
