"""Signing in: by password, by a one-time link, by an invite."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from django.utils.http import urlencode

from dstackweb.accounts import attempts, services
from dstackweb.accounts.access import role_in
from dstackweb.accounts.models import LoginLink, Project, User
from tests.factories import join, make_project, make_user
from tests.forms import open_form, submit

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery"


@pytest.fixture
def ada() -> User:
    return make_user("ada", password=PASSWORD)


@pytest.fixture
def project(ada: User) -> Project:
    project = make_project("vision")
    join(project, ada, "admin")
    return project


def signed_in(client: Client) -> str | None:
    """Who this browser is signed in as."""
    pk = client.session.get("_auth_user_id")
    return User.objects.get(pk=pk).username if pk else None


def give_password(client: Client, name: str = "ada", password: str = PASSWORD, page: Any = "/login/") -> Any:
    return submit(client, page, {"username": name, "password": password})


def test_a_correct_password_signs_in_and_redirects_to_the_requested_page(client: Client, ada: User) -> None:
    asked = client.get("/account/tokens/")
    assert asked["Location"] == "/login/?next=/account/tokens/"
    assert give_password(client, page=asked["Location"])["Location"] == "/account/tokens/"
    assert signed_in(client) == "ada"


def test_a_wrong_password_shows_an_error_and_keeps_the_name(client: Client, ada: User) -> None:
    page = give_password(client, "ada", "sesame").content.decode()
    assert 'value="ada"' in page
    assert 'role="alert"' in page
    assert "sesame" not in page
    assert signed_in(client) is None


@pytest.mark.parametrize(
    "next_url", ["https://evil.example/", "//evil.example/", "javascript:alert(1)", "/\\evil.example"]
)
def test_an_open_redirect_is_refused(client: Client, ada: User, next_url: str) -> None:
    """By the form of a page that a link leads to, and by forms with such a field, which no page sends."""
    assert give_password(client, page=f"/login/?{urlencode({'next': next_url})}")["Location"] == "/"
    answer = client.post("/login/", {"username": "ada", "password": PASSWORD, "next": next_url})
    assert answer["Location"] == "/"
    assert client.post("/logout/", {"next": next_url})["Location"] == "/login/"


def test_too_many_wrong_passwords_lock_the_name_for_a_time_shown_on_the_page(
    client: Client, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts.time, "time", lambda: 6_000_000_100.0)
    for _attempt in range(10):
        answer = give_password(client, "ada", "wrong")
    assert answer.status_code == 429
    assert "Too many attempts" in answer.content.decode()
    locked = give_password(client)
    assert "10 min" in locked.content.decode()
    assert signed_in(client) is None


def test_signing_out_requires_a_post(client: Client, ada: User) -> None:
    client.force_login(ada)
    assert client.get("/logout/").status_code == 405
    submit(client, "/account/", to="/logout/")
    assert signed_in(client) is None


def test_previewing_a_login_link_does_not_use_it_up(client: Client, ada: User) -> None:
    url = f"/login/{services.make_login_link(ada)}/"
    for _preview in range(3):
        assert "ada" in client.get(url).content.decode()
    assert signed_in(client) is None
    assert submit(client, url)["Location"] == "/"
    assert signed_in(client) == "ada"


def test_a_used_expired_or_unknown_login_link_shows_its_reason(client: Client, ada: User) -> None:
    """Also to who opened its page before: such links have none, and only a form of then is still sent."""
    used, expired = services.make_login_link(ada), services.make_login_link(ada)
    forms = {token: open_form(client, f"/login/{token}/") for token in (used, expired)}
    services.use_login_link(used)
    LoginLink.objects.filter(used_at=None).update(expires_at=timezone.now())
    for token, words, status in [(used, "already used", 409), (expired, "expired", 409), ("in_x", "exist", 404)]:
        by_form = forms[token].send() if token in forms else client.post(f"/login/{token}/")
        for answer in (client.get(f"/login/{token}/"), by_form):
            assert answer.status_code == status
            assert words in answer.content.decode()
    assert signed_in(client) is None


def test_an_invite_makes_an_account_and_signs_it_in(client: Client, project: Project, ada: User) -> None:
    _row, token = services.invite(project, ada, "manager")
    page = client.get(f"/invite/{token}/")
    assert "vision" in page.content.decode()
    assert "ada invites you" in page.content.decode()
    answer = give_password(client, "grace", page=page)
    assert answer["Location"] == "/"
    assert signed_in(client) == "grace"
    assert role_in(project, User.objects.get(username="grace")) == "manager"


def test_a_refused_account_shows_the_error_at_its_field_and_keeps_the_name(
    client: Client, project: Project, ada: User
) -> None:
    _row, token = services.invite(project, ada, "member")
    answer = give_password(client, "ada", "short", page=f"/invite/{token}/")
    page = answer.content.decode()
    assert answer.context["form"].errors.keys() == {"username", "password"}
    assert 'value="ada"' in page
    assert "is-invalid" in page
    assert "short." in page
    assert give_password(client, "grace", page=answer).status_code == 302


def test_a_signed_in_user_joins_with_one_button(client: Client, project: Project, ada: User) -> None:
    _row, token = services.invite(project, ada, "member")
    bob = make_user("bob")
    client.force_login(bob)
    submit(client, f"/invite/{token}/", button="Join as bob")
    assert role_in(project, bob) == "member"


def test_a_join_form_opened_by_another_user_adds_no_member(client: Client, project: Project, ada: User) -> None:
    _row, token = services.invite(project, ada, "member")
    address, bob = f"/invite/{token}/", make_user("bob")
    of_nobody = open_form(client, address)
    client.force_login(make_user("grace"))
    of_grace = open_form(client, address)
    client.force_login(bob)
    for answer in (of_nobody.send({"username": "lea", "password": PASSWORD}), of_grace.send()):
        assert "Join as bob" in answer.content.decode()
    assert role_in(project, bob) is None


def test_an_unusable_invite_shows_its_reason(client: Client, project: Project, ada: User) -> None:
    _row, token = services.invite(project, ada, "member")
    form = open_form(client, f"/invite/{token}/")
    services.accept_invite(token, "grace", PASSWORD)
    for answer in (client.get(f"/invite/{token}/"), form.send({"username": "x"})):
        assert answer.status_code == 409
        assert "already used" in answer.content.decode()
    assert client.get("/invite/inv_x/").status_code == 404


def test_a_post_without_a_csrf_token_does_nothing(project: Project, ada: User) -> None:
    """As the page of another site sends a form."""
    client = Client(enforce_csrf_checks=True)
    link, (_row, invite) = services.make_login_link(ada), services.invite(project, ada, "member")
    for url in ("/login/", f"/login/{link}/", f"/invite/{invite}/", "/logout/"):
        answer = client.post(url, {"username": "ada", "password": PASSWORD})
        assert answer.status_code == 403
    assert services.use_login_link(link) == ada
    assert signed_in(client) is None


def test_changing_a_password_requires_the_current_one(client: Client, ada: User) -> None:
    client.force_login(ada)
    new = "another long password"
    page, changes = "/account/password/", {"new_password1": new, "new_password2": new}
    wrong = submit(client, page, {"old_password": "x", **changes})
    assert "old_password" in wrong.context["form"].errors
    submit(client, page, {"old_password": PASSWORD, **changes})
    ada.refresh_from_db()
    assert ada.check_password(new)
    assert signed_in(client) == "ada"


def test_the_admin_site_has_no_sign_in_of_its_own(client: Client, ada: User) -> None:
    asked = client.get("/admin/accounts/user/", follow=True)
    assert asked.redirect_chain[-1][0] == "/login/?next=/admin/accounts/user/"
    by_hand = client.post("/admin/login/", {"username": "ada", "password": PASSWORD})  # which no page sends there
    assert by_hand.status_code == 405
    assert signed_in(client) is None
    client.force_login(ada)
    assert client.get("/admin/", follow=True).status_code == 403
    client.force_login(make_user("root", is_superuser=True, is_staff=True))
    assert client.get("/admin/").status_code == 200
