"""API tokens and one-time sign-in links."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from dstackweb.accounts import services, tokens
from dstackweb.accounts.models import ApiToken, LoginLink, User
from dstackweb.lib.errors import Conflict, DomainError, Invalid, NotFound
from tests.factories import make_user

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]


@pytest.fixture
def ada() -> User:
    return make_user("ada")


def test_a_token_authenticates_its_user(ada: User) -> None:
    _row, token = services.create_token(ada, "laptop")
    assert token.startswith("dw_")
    assert tokens.authenticate_token(token) == ada


def test_a_token_is_stored_only_as_a_digest_and_a_hint(ada: User) -> None:
    row, token = services.create_token(ada, "laptop")
    stored = ApiToken.objects.filter(pk=row.pk).values().get()
    assert not any(token in str(value) for value in stored.values())
    assert row.hint == f"…{token[-4:]}"
    assert token not in repr(row)


def test_a_revoked_unknown_or_empty_token_authenticates_no_user(ada: User) -> None:
    row, token = services.create_token(ada, "laptop")
    services.revoke_token(ada, row.pk)
    for plaintext in (token, "dw_unknown", "", row.digest):
        assert tokens.authenticate_token(plaintext) is None


def test_the_token_of_an_inactive_user_is_refused(ada: User) -> None:
    _row, token = services.create_token(ada, "laptop")
    User.objects.filter(pk=ada.pk).update(is_active=False)
    assert tokens.authenticate_token(token) is None


def test_only_its_owner_revokes_a_token_and_only_once(ada: User) -> None:
    row, token = services.create_token(ada, "laptop")
    with pytest.raises(NotFound):
        services.revoke_token(make_user(), row.pk)
    assert tokens.authenticate_token(token) == ada
    services.revoke_token(ada, row.pk)
    with pytest.raises(NotFound):
        services.revoke_token(ada, row.pk)
    assert not ada.api_tokens.filter(revoked_at=None).exists()


def test_last_use_is_written_once_a_minute(ada: User, django_assert_num_queries: DjangoAssertNumQueries) -> None:
    row, token = services.create_token(ada, "laptop")
    with django_assert_num_queries(2):
        tokens.authenticate_token(token)
    with django_assert_num_queries(1):
        tokens.authenticate_token(token)
    earlier = timezone.now() - timedelta(seconds=61)
    ApiToken.objects.filter(pk=row.pk).update(last_used_at=earlier)
    tokens.authenticate_token(token)
    row.refresh_from_db()
    assert row.last_used_at
    assert row.last_used_at > earlier + timedelta(seconds=60)


@pytest.mark.parametrize("name", ["", "   ", "x" * 81, "environment", " environment "])
def test_a_token_needs_a_name_that_is_not_the_environments(ada: User, name: str) -> None:
    with pytest.raises(Invalid) as refused:
        services.create_token(ada, name)
    assert refused.value.errors[0]["loc"] == ["name"]


def test_a_login_link_signs_its_user_in_once(ada: User) -> None:
    token = services.make_login_link(ada)
    assert services.open_login_link(token).user == ada
    assert services.use_login_link(token) == ada
    with pytest.raises(Conflict, match="already used"):
        services.use_login_link(token)


def test_a_login_link_is_stored_only_as_a_digest(ada: User) -> None:
    token = services.make_login_link(ada)
    assert not any(token in str(value) for value in LoginLink.objects.values().get().values())


def test_an_expired_or_unknown_login_link_is_refused_with_its_reason(ada: User) -> None:
    expired = services.make_login_link(ada, ttl=timedelta(0))
    for token, words in {expired: "expired", "in_unknown": "exist"}.items():
        with pytest.raises(DomainError, match=words):
            services.use_login_link(token)


def test_an_inactive_user_gets_no_link_and_an_old_one_is_dead(ada: User) -> None:
    token = services.make_login_link(ada)
    User.objects.filter(pk=ada.pk).update(is_active=False)
    ada.refresh_from_db()
    with pytest.raises(Conflict, match="not active"):
        services.make_login_link(ada)
    with pytest.raises(NotFound):
        services.use_login_link(token)
