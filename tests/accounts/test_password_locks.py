"""Ten wrong passwords lock a name for the network that they came from."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from django.contrib.auth.signals import user_login_failed
from django.test import Client

from dstackweb.accounts import attempts, services
from dstackweb.accounts.models import PasswordFailures, User
from tests.accounts.races import at_once
from tests.factories import make_user
from tests.forms import open_form, submit

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]
PASSWORD, NEW = "correct horse battery", "another long password"
HERE, NEARBY, ELSEWHERE = "2001:db8::7", "2001:db8::8", "198.51.100.8"
NOW = 6_000_000_100.0


@pytest.fixture
def ada(monkeypatch: pytest.MonkeyPatch) -> User:
    monkeypatch.setattr(attempts.time, "time", lambda: NOW)
    return make_user("ada", password=PASSWORD)


def give_password(name: str = "ada", password: str = PASSWORD, address: str = HERE) -> Any:
    """Sign in with a browser that is new here: the answer."""
    return submit(Client(), "/login/", {"username": name, "password": password}, REMOTE_ADDR=address)


def sign_in(name: str = "ada", password: str = PASSWORD, address: str = HERE) -> int:
    return int(give_password(name, password, address).status_code)


def at_the_same_moment(times: int, password: str) -> list[int]:
    """Open the page so many times, then send all of them: the statuses of the answers."""
    forms = [open_form(Client(), "/login/", having="username") for _ in range(times)]
    typed = {"username": "ada", "password": password}
    return [answer.status_code for answer in at_once(*[partial(form.send, typed, REMOTE_ADDR=HERE) for form in forms])]


def fail(times: int, name: str = "ada") -> list[int]:
    return [sign_in(name, "wrong") for _ in range(times)]


def test_the_tenth_wrong_password_locks_the_name_for_its_network_alone(ada: User) -> None:
    make_user("grace", password=PASSWORD)
    assert fail(10) == 9 * [200] + [429]
    assert [sign_in(), sign_in(address=NEARBY)] == [429, 429]
    assert [sign_in(address=ELSEWHERE), sign_in("grace")] == [302, 302]


def test_the_page_says_when_to_try_again_and_then_it_works(ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(10)
    for later, words in ((0, "in 10 min"), (250.5, "in 5 min"), (599, "in 1 s")):
        monkeypatch.setattr(attempts.time, "time", lambda later=later: NOW + later)
        answer = give_password()
        assert answer.status_code == 429
        assert words in answer.text
        assert NOW + later + int(answer["Retry-After"]) >= NOW + 600
    monkeypatch.setattr(attempts.time, "time", lambda: NOW + 600)
    assert sign_in() == 302


def test_failures_with_pauses_of_less_than_ten_minutes_add_up(ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        monkeypatch.setattr(attempts.time, "time", lambda number=number: NOW + number * 599)
        fail(1)
    assert sign_in() == 429


def test_a_sign_in_forgets_earlier_failures(ada: User) -> None:
    fail(9)
    assert sign_in() == 302
    assert fail(9) == 9 * [200]
    assert sign_in() == 302
    assert not PasswordFailures.objects.exists()


def test_a_sign_in_by_link_opens_the_lock_as_its_page_says(client: Client, ada: User) -> None:
    fail(10)
    submit(client, f"/login/{services.make_login_link(ada)}/", REMOTE_ADDR=HERE)
    assert sign_in() == 302


def test_names_that_no_one_has_are_answered_in_the_same_way(ada: User) -> None:
    def answers(name: str) -> list[tuple[int, str]]:
        """Without the page's time and its CSRF token."""
        posts = [give_password(name, "wrong") for _ in range(11)]
        pages = [re.sub(r'data-now="\d+"|name="csrfmiddlewaretoken" value="\w+"', "", post.text) for post in posts]
        return [(post.status_code, page.replace(name, "NAME")) for post, page in zip(posts, pages, strict=True)]

    known, unknown = answers("ada"), answers("eve")
    assert [status for status, _page in known] == 9 * [200] + [429, 429]
    assert known == unknown


@pytest.mark.parametrize("written", [" ada", "ada  ", "\uff41\uff44\uff41"])
def test_a_name_counts_as_sign_in_reads_it(ada: User, written: str) -> None:
    fail(9)
    fail(1, written)
    assert sign_in() == 429


def test_a_name_in_other_letters_is_another_name(ada: User) -> None:
    fail(10, "ADA")
    assert sign_in() == 302


@pytest.mark.parametrize(
    "name", ["n" * 150, "n" * 1000, "a\0da", "\u202eada", "ada from 2001:db8::/64", "'; --", "\U0001f600"]
)
def test_odd_names_are_answered_as_wrong_ones(ada: User, name: str) -> None:
    assert {*fail(11, name)} <= {200, 429}
    assert sign_in() == 302


def test_passwords_tried_at_the_same_moment_are_checked_ten_times_at_most(ada: User, transactional_db: None) -> None:
    checked = []

    def count(**signal: Any) -> None:
        checked.append(signal["credentials"]["username"])

    user_login_failed.connect(count)
    try:
        statuses = at_the_same_moment(16, "wrong")
    finally:
        user_login_failed.disconnect(count)
    assert checked == 10 * ["ada"]
    assert {*statuses} <= {200, 429}
    assert PasswordFailures.objects.get().count == 10
    assert sign_in() == 429


def test_right_passwords_at_the_same_moment_all_sign_in(ada: User, transactional_db: None) -> None:
    assert at_the_same_moment(4, PASSWORD) == 4 * [302]


@pytest.mark.parametrize(
    ("page", "field", "new"),
    [
        ("/account/confirm/", "password", {}),
        (
            "/account/password/",
            "old_password",
            {"new_password1": NEW, "new_password2": NEW},
        ),
    ],
)
def test_every_page_that_asks_for_the_password_counts_for_the_name(
    client: Client, ada: User, page: str, field: str, new: dict[str, str]
) -> None:
    client.force_login(ada)
    for _ in range(10):
        answer = submit(client, page, {field: "wrong", **new}, REMOTE_ADDR=HERE)
    assert answer.status_code == 429
    assert "<b>ada</b>" in answer.text
    right = submit(client, page, {field: PASSWORD, **new}, REMOTE_ADDR=HERE)
    assert (right.status_code, sign_in()) == (429, 429)
    ada.refresh_from_db()
    assert ada.check_password(PASSWORD)


def test_an_admin_sees_who_is_locked_out_and_lifts_that(ada: User) -> None:
    fail(10)
    admin = Client()
    admin.force_login(make_user("root", is_superuser=True, is_staff=True))
    page = admin.get("/admin/accounts/passwordfailures/").text
    assert [value for value in ("ada", "2001:db8::/64", ">10<") if value not in page] == []
    row = PasswordFailures.objects.get()
    submit(admin, f"/admin/accounts/passwordfailures/{row.pk}/delete/", having="post")
    assert sign_in() == 302


def test_counts_are_deleted_once_they_lock_nothing(ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(10)
    attempts.forget_old()
    assert sign_in() == 429
    monkeypatch.setattr(attempts.time, "time", lambda: NOW + attempts.WINDOW_S)
    attempts.forget_old()
    assert not PasswordFailures.objects.exists()
