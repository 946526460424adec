"""Signing in: by password, by a one-time link, by an invite."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client

from dstackweb.accounts import attempts, services
from dstackweb.accounts.access import role_in
from dstackweb.accounts.models import Project, User
from tests.factories import join, make_project, make_user

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


def test_a_correct_password_signs_in_and_redirects_to_the_requested_page(client: Client, ada: User) -> None:
    asked = client.get("/account/tokens/")
    assert asked["Location"] == "/login/?next=/account/tokens/"
    answer = client.post("/login/", {"username": "ada", "password": PASSWORD, "next": "/account/tokens/"})
    assert answer["Location"] == "/account/tokens/"
    assert signed_in(client) == "ada"


def test_a_wrong_password_shows_an_error_and_keeps_the_name(client: Client, ada: User) -> None:
    page = client.post("/login/", {"username": "ada", "password": "sesame"}).content.decode()
    assert 'value="ada"' in page
    assert 'role="alert"' in page
    assert "sesame" not in page
    assert signed_in(client) is None


@pytest.mark.parametrize(
    "next_url", ["https://evil.example/", "//evil.example/", "javascript:alert(1)", "/\\evil.example"]
)
def test_an_open_redirect_is_refused(client: Client, ada: User, next_url: str) -> None:
    answer = client.post("/login/", {"username": "ada", "password": PASSWORD, "next": next_url})
    assert answer["Location"] == "/"
    assert client.post("/logout/", {"next": next_url})["Location"] == "/login/"


def test_too_many_wrong_passwords_lock_the_name_for_a_time_shown_on_the_page(
    client: Client, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts.time, "time", lambda: 6_000_000_100.0)
    for _attempt in range(10):
        answer = client.post("/login/", {"username": "ada", "password": "wrong"})
    assert answer.status_code == 429
    assert "Too many attempts" in answer.content.decode()
    locked = client.post("/login/", {"username": "ada", "password": PASSWORD})
    assert "10 min" in locked.content.decode()
    assert signed_in(client) is None


def test_signing_out_requires_a_post(client: Client, ada: User) -> None:
    client.force_login(ada)
    assert client.get("/logout/").status_code == 405
    client.post("/logout/")
    assert signed_in(client) is None


def test_previewing_a_login_link_does_not_use_it_up(client: Client, ada: User) -> None:
    url = f"/login/{services.make_login_link(ada)}/"
    for _preview in range(3):
        assert "ada" in client.get(url).content.decode()
    assert signed_in(client) is None
    assert client.post(url)["Location"] == "/"
    assert signed_in(client) == "ada"


def test_a_used_expired_or_unknown_login_link_shows_its_reason(client: Client, ada: User) -> None:
    used = services.make_login_link(ada)
    services.use_login_link(used)
    expired = services.make_login_link(ada, ttl=timedelta(0))
    for token, words, status in [(used, "already used", 409), (expired, "expired", 409), ("in_x", "exist", 404)]:
        for answer in (client.get(f"/login/{token}/"), client.post(f"/login/{token}/")):
            assert answer.status_code == status
            assert words in answer.content.decode()
    assert signed_in(client) is None


def test_an_invite_makes_an_account_and_signs_it_in(client: Client, project: Project, ada: User) -> None:
    _row, token = services.invite(project, ada, "manager")
    page = client.get(f"/invite/{token}/").content.decode()
    assert "vision" in page
    assert "ada invites you" in page
    answer = client.post(f"/invite/{token}/", {"username": "grace", "password": PASSWORD})
    assert answer["Location"] == "/"
    assert signed_in(client) == "grace"
    assert role_in(project, User.objects.get(username="grace")) == "manager"


def test_a_refused_account_shows_the_error_at_its_field_and_keeps_the_name(
    client: Client, project: Project, ada: User
) -> None:
    _row, token = services.invite(project, ada, "member")
    answer = client.post(f"/invite/{token}/", {"username": "ada", "password": "short"})
    page = answer.content.decode()
    assert answer.context["form"].errors.keys() == {"username", "password"}
    assert 'value="ada"' in page
    assert "is-invalid" in page
    assert "short." in page
    assert client.post(f"/invite/{token}/", {"username": "grace", "password": PASSWORD}).status_code == 302


def test_a_signed_in_user_joins_with_one_button(client: Client, project: Project, ada: User) -> None:
    _row, token = services.invite(project, ada, "member")
    bob = make_user("bob")
    client.force_login(bob)
    assert "Join as bob" in client.get(f"/invite/{token}/").content.decode()
    client.post(f"/invite/{token}/", {"join_as": "bob"})
    assert role_in(project, bob) == "member"


def test_a_join_form_opened_by_another_user_adds_no_member(client: Client, project: Project, ada: User) -> None:
    _row, token = services.invite(project, ada, "member")
    bob = make_user("bob")
    client.force_login(bob)
    for stale in ({"username": "grace", "password": PASSWORD}, {"join_as": "grace"}):
        assert "Join as bob" in client.post(f"/invite/{token}/", stale).content.decode()
    assert role_in(project, bob) is None


def test_an_unusable_invite_shows_its_reason(client: Client, project: Project, ada: User) -> None:
    _row, token = services.invite(project, ada, "member")
    services.accept_invite(token, "grace", PASSWORD)
    for answer in (client.get(f"/invite/{token}/"), client.post(f"/invite/{token}/", {"username": "x"})):
        assert answer.status_code == 409
        assert "already used" in answer.content.decode()
    assert client.get("/invite/inv_x/").status_code == 404


def test_a_post_without_a_csrf_token_does_nothing(project: Project, ada: User) -> None:
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
    wrong = client.post("/account/password/", {"old_password": "x", "new_password1": new, "new_password2": new})
    assert "old_password" in wrong.context["form"].errors
    client.post("/account/password/", {"old_password": PASSWORD, "new_password1": new, "new_password2": new})
    ada.refresh_from_db()
    assert ada.check_password(new)
    assert signed_in(client) == "ada"


def test_the_admin_site_has_no_sign_in_of_its_own(client: Client, ada: User) -> None:
    asked = client.get("/admin/accounts/user/", follow=True)
    assert asked.redirect_chain[-1][0] == "/login/?next=/admin/accounts/user/"
    assert client.post("/admin/login/", {"username": "ada", "password": PASSWORD}).status_code == 405
    assert signed_in(client) is None
    client.force_login(ada)
    assert client.get("/admin/", follow=True).status_code == 403
    client.force_login(make_user("root", is_superuser=True, is_staff=True))
    assert client.get("/admin/").status_code == 200
