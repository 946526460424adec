"""Nobody can try many passwords or tokens from one address."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.core.cache import caches
from django.db import connection
from django.test import Client

from dstackweb.accounts import attempts, services
from dstackweb.accounts.models import AddressFailures, Project, User
from dstackweb.lib.errors import TooMany
from tests.factories import join, make_user
from tests.forms import submit

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]
PASSWORD = "correct horse battery"
HERE, ELSEWHERE = "198.51.100.7", "198.51.100.8"


@pytest.fixture
def ada(project: Project, monkeypatch: pytest.MonkeyPatch) -> User:
    monkeypatch.setattr(attempts, "MOST", 3)
    monkeypatch.setattr(attempts.time, "time", lambda: 6_000_000_100.0)
    return join(project, make_user("ada", password=PASSWORD))


def give_password(client: Client, address: str, name: str) -> Any:
    return submit(client, "/login/", {"username": name, "password": PASSWORD}, REMOTE_ADDR=address)


def sign_in(client: Client, address: str, name: str) -> int:
    return int(give_password(client, address, name).status_code)


def test_an_address_that_tried_many_names_is_locked_and_others_are_not(client: Client, ada: User) -> None:
    assert [sign_in(client, HERE, f"guess-{number}") for number in range(4)] == [200, 200, 200, 429]
    answer = give_password(client, HERE, "ada")
    assert answer.status_code == 429
    assert "from your address" in answer.content.decode()
    assert "8 min" in answer.content.decode()
    assert sign_in(client, ELSEWHERE, "ada") == 302


def test_after_the_window_it_may_try_again(client: Client, ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        sign_in(client, HERE, f"guess-{number}")
    monkeypatch.setattr(attempts.time, "time", lambda: 6_000_000_100.0 + attempts.WINDOW_S)
    assert sign_in(client, HERE, "ada") == 302


def test_a_stolen_session_does_not_find_the_password_out(client: Client, ada: User) -> None:
    client.force_login(ada)
    new = {"new_password1": "another long password", "new_password2": "another long password"}

    def change(old: str, **fields: str) -> int:
        changes = {"old_password": old, **new, **fields}
        return int(submit(client, "/account/password/", changes, REMOTE_ADDR=HERE).status_code)

    assert change(PASSWORD, new_password2="other") == 200  # no guess
    assert [change(f"guess-{number}") for number in range(4)] == [200, 200, 200, 429]
    assert change(PASSWORD) == 429
    ada.refresh_from_db()
    assert ada.check_password(PASSWORD)


def test_the_admin_site_has_no_password_page_of_its_own(client: Client) -> None:
    """Nor does it take what no page sends there."""
    client.force_login(make_user("root", is_superuser=True, is_staff=True))
    for answer in (
        client.get("/admin/password_change/"),
        client.post("/admin/password_change/", {"old_password": "x"}),
    ):
        assert (answer.status_code, answer["Location"]) == (302, "/account/password/")


def test_wrong_tokens_count_and_a_valid_one_always_works(client: Client, ada: User) -> None:
    _row, token = services.create_token(ada, "ci")

    def ask(given: str) -> int:
        headers = {"Authorization": f"Bearer {given}"}
        return client.get("/api/v1/projects", headers=headers, REMOTE_ADDR=HERE).status_code

    assert [ask("dw_wrong") for _ in range(4)] == [401, 401, 401, 429]
    assert ask(token) == 200


def test_addresses_of_one_ipv6_network_count_together(ada: User) -> None:
    for number in range(3):
        attempts.count_failure(f"2001:db8::{number}")
    with pytest.raises(TooMany):
        attempts.check("2001:db8::ffff")
    attempts.check("2001:db8:0:1::1")


def test_failures_at_the_same_moment_all_count(
    ada: User, transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "MOST", 40)

    def fail() -> None:
        for _ in range(10):
            attempts.count_failure(HERE)
        connection.close()

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(fail) for _ in range(4)]:
            done.result()
    with pytest.raises(TooMany):
        attempts.check(HERE)


def test_counts_last_for_their_window_and_are_deleted_then(ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        attempts.count_failure(HERE)
    caches["default"].clear()
    attempts.forget_old()
    with pytest.raises(TooMany):
        attempts.check(HERE)
    monkeypatch.setattr(attempts.time, "time", lambda: 6_000_000_100.0 + 2 * attempts.WINDOW_S)
    attempts.forget_old()
    assert not AddressFailures.objects.exists()
