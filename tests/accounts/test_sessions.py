"""Browsers that are signed in: listed, signed out one by one, and by themselves once they are not used."""

from __future__ import annotations

import datetime as dt

import pytest
from django.conf import settings
from django.test import Client
from django.utils import timezone

from dstackweb.accounts import sessions
from dstackweb.accounts.models import Session, User
from dstackweb.audit.models import AuditAction, AuditEntry
from dstackweb.lib.errors import NotFound
from tests.factories import make_user
from tests.forms import open_form, submit

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery"
PAGE = "/account/sessions/"


@pytest.fixture
def ada() -> User:
    return make_user("ada", password=PASSWORD)


def browser(user: User, program: str = "Firefox", address: str = "192.0.2.7") -> Client:
    client = Client(headers={"User-Agent": program}, REMOTE_ADDR=address)
    answer = submit(client, "/login/", {"username": user.username, "password": PASSWORD})
    assert answer.status_code == 302
    return client


def is_in(client: Client) -> bool:
    return client.get(PAGE).status_code == 200


def key_of(client: Client) -> str:
    return str(client.cookies[settings.SESSION_COOKIE_NAME].value)


def test_all_browsers_of_a_user_are_listed_and_none_of_others(ada: User) -> None:
    here, _there = browser(ada), browser(ada, "curl/8 <b>", "198.51.100.9")
    browser(make_user("bob", password=PASSWORD), "Safari")
    page = here.get(PAGE).content.decode()
    for shown in ("Firefox", "192.0.2.7", "curl/8 &lt;b&gt;", "198.51.100.9", "this browser"):
        assert shown in page
    assert "Safari" not in page
    assert key_of(here) not in page
    assert {one.is_this for one in sessions.of_user(ada, key_of(here))} == {True, False}


def test_a_browser_is_signed_out_from_another(ada: User) -> None:
    here, there = browser(ada), browser(ada)
    (other,) = (one for one in sessions.of_user(ada, key_of(here)) if not one.is_this)
    sign_out = open_form(here, PAGE, to=f"/{other.handle}/end/")
    assert sign_out.send().status_code == 302
    assert is_in(here)
    assert not is_in(there)
    assert sign_out.send().status_code == 404
    assert AuditEntry.objects.filter(action=AuditAction.SIGNED_OUT, actor_id=ada.pk, name="ada").count() == 1


def test_all_others_are_signed_out_at_once(ada: User) -> None:
    here, others = browser(ada), [browser(ada) for _ in range(3)]
    bob = browser(make_user("bob", password=PASSWORD))
    assert "3 other browsers" in submit(here, PAGE, to="/others/end/", follow=True).content.decode()
    assert is_in(here)
    assert is_in(bob)
    assert not any(is_in(client) for client in others)


def test_nobody_signs_out_the_browsers_of_others(ada: User) -> None:
    """No page of theirs names them."""
    mine, bob = browser(ada), make_user("bob", password=PASSWORD)
    (own,) = sessions.of_user(ada)
    assert browser(bob).post(f"{PAGE}{own.handle}/end/").status_code == 404
    assert is_in(mine)
    with pytest.raises(NotFound):
        sessions.end(bob, own.handle)


def test_nothing_in_a_copy_of_the_database_signs_in(ada: User) -> None:
    here = browser(ada)
    (row,) = Session.objects.values()
    for stored in row.values():
        thief = Client()
        thief.cookies[settings.SESSION_COOKIE_NAME] = str(stored)
        assert not is_in(thief)
    assert is_in(here)
    here.post("/logout/")
    assert not Session.objects.exists()


def test_sessions_of_before_a_new_password_are_not_shown(ada: User) -> None:
    old = browser(ada)
    ada.set_password("another horse battery")
    ada.save()
    assert not is_in(old)
    assert sessions.of_user(ada) == []


def test_use_puts_the_end_off_and_writes_only_now_and_then(ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    client = browser(ada)
    first = Session.objects.get()
    assert first.user == ada
    idle = dt.timedelta(seconds=settings.SESSION_COOKIE_AGE)
    assert abs(first.expire_date - timezone.now() - idle) < dt.timedelta(minutes=5)
    assert settings.SESSION_COOKIE_NAME not in client.get(PAGE).cookies

    now = sessions.time.time()
    monkeypatch.setattr(sessions.time, "time", lambda: now + sessions.NOTED_S + 1)
    answer = client.get(PAGE)
    assert answer.cookies[settings.SESSION_COOKIE_NAME]["max-age"] == settings.SESSION_COOKIE_AGE
    assert Session.objects.get().expire_date > first.expire_date
    (seen,) = sessions.of_user(ada)
    assert (seen.used - seen.since).total_seconds() > sessions.NOTED_S


def test_a_browser_that_is_not_used_is_signed_out(ada: User) -> None:
    client = browser(ada)
    Session.objects.update(expire_date=timezone.now() - dt.timedelta(seconds=1))
    assert not is_in(client)
    assert sessions.of_user(ada) == []
