"""Tokens and stored secrets."""

from __future__ import annotations

import pytest
from django.test import override_settings

from dstackweb.lib.errors import DomainError
from dstackweb.lib.secrets import decrypt, digest, encrypt, new_token


def test_tokens_have_a_prefix_and_never_repeat() -> None:
    tokens = {new_token("dw") for _ in range(100)}

    assert len(tokens) == 100
    assert all(token.startswith("dw_") and len(token) >= 40 for token in tokens)


def test_a_digest_is_stable_and_shows_nothing_of_its_token() -> None:
    token = new_token("dw")

    assert digest(token) == digest(token) != digest(token + "x")
    assert len(digest(token)) == 64
    assert token not in digest(token)


def test_a_secret_is_decrypted_unchanged() -> None:
    assert decrypt(encrypt("hünter2\n密")) == "hünter2\n密"
    assert encrypt("same") != encrypt("same")


def test_a_secret_stored_under_another_key_is_an_error_of_its_own() -> None:
    stored = encrypt("hunter2")

    with override_settings(SECRET_KEY="another"), pytest.raises(DomainError, match="another secret key"):
        decrypt(stored)
