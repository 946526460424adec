"""Members, secrets and API tokens in the browser."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils.html import escape

from dstackweb.accounts import services, tokens
from dstackweb.accounts.access import role_in
from dstackweb.accounts.models import ApiToken, Invite, Project, User
from dstackweb.web.urls import account_pages
from tests.factories import join, make_project, make_user, project_of
from tests.forms import open_form, submit

pytestmark = pytest.mark.django_db
ROLES = ["viewer", "member", "manager", "admin"]


@pytest.fixture
def project() -> Project:
    return make_project("vision")


@pytest.fixture
def ada(project: Project) -> User:
    return join(project, make_user("ada"), "admin")


@pytest.fixture
def bob(project: Project) -> User:
    return join(project, make_user("bob"), "member")


@pytest.fixture
def page(ada: User) -> Client:
    """The browser of ada, who is an admin of vision."""
    client = Client()
    client.force_login(ada)
    return client


def browser(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def project_urls(project: Project, user: User, invite: Invite) -> dict[str, str]:
    """Every address of the account pages under a project, by its name; all but the pages take a POST."""
    values = {"project": project.name, "user_id": user.pk, "invite_id": invite.pk, "name": "HF_TOKEN"}
    urls = {}
    for pattern in account_pages:
        if pattern.name and "project" in pattern.pattern.converters:
            urls[pattern.name] = reverse(pattern.name, kwargs={k: values[k] for k in pattern.pattern.converters})
    return urls


PAGES = {"members", "secrets", "project-notifications"}
MEMBERS, SECRETS, TOKENS = "/p/vision/members/", "/p/vision/secrets/", "/account/tokens/"


def set_secret(client: Client, name: str, value: str, **request: Any) -> Any:
    return submit(client, SECRETS, {"name": name, "value": value}, **request)


def make_token(client: Client, name: str) -> Any:
    return submit(client, TOKENS, {"name": name, "scope": "admin"})


def test_a_stranger_gets_404_at_every_address_of_a_project(project: Project, ada: User, bob: User) -> None:
    """No page leads there."""
    services.set_secret(project, "HF_TOKEN", "hf_abcdefghij", by=ada)
    invite, _token = services.invite(project, ada, "member")
    eve = make_user("eve")
    join(make_project("speech"), eve, "admin")
    urls = project_urls(project, bob, invite)
    assert len(urls) == 11
    for name, url in urls.items():
        answer = browser(eve).get(url) if name in PAGES else browser(eve).post(url, {"role": "admin"})
        assert answer.status_code == 404, url
    assert role_in(project, bob) == "member"
    assert services.secret_names(project) == ["HF_TOKEN"]
    assert Invite.objects.count() == 1


def test_signed_out_users_are_redirected_to_sign_in_and_change_nothing(project: Project, ada: User, bob: User) -> None:
    """Even those who know the fields of forms that no page shows them."""
    invite, _token = services.invite(project, ada, "member")
    urls = [*project_urls(project, bob, invite).values(), "/account/tokens/", "/account/tokens/create/"]
    for url in [*urls, "/account/password/"]:
        for answer in (Client().get(url), Client().post(url, {"name": "laptop"})):
            assert answer["Location"].startswith("/login/?next=")
    assert not ApiToken.objects.exists()


def test_a_member_cannot_use_admin_actions(project: Project, ada: User, bob: User) -> None:
    """Members' pages don't have them."""
    services.set_secret(project, "HF_TOKEN", "hf_abcdefghij", by=ada)
    invite, _token = services.invite(project, ada, "member")
    for name, url in project_urls(project, ada, invite).items():
        if name not in PAGES:
            assert browser(bob).post(url, {"role": "admin"}).status_code == 403, url
    assert services.secret_names(project) == ["HF_TOKEN"]
    assert role_in(project, ada) == "admin"


def test_nothing_works_without_a_csrf_token(project: Project, ada: User, bob: User) -> None:
    """As the page of another site sends a form."""
    invite, _token = services.invite(project, ada, "member")
    client = Client(enforce_csrf_checks=True)
    client.force_login(ada)
    urls = {name: url for name, url in project_urls(project, bob, invite).items() if name not in PAGES}
    for url in [*urls.values(), "/account/tokens/create/", "/account/password/"]:
        assert client.post(url, {"role": "admin", "name": "laptop"}).status_code == 403
    assert role_in(project, bob) == "member"
    assert not ApiToken.objects.exists()


def test_rows_of_another_project_or_person_are_not_found(page: Client, project: Project, ada: User) -> None:
    """No page of this project names them."""
    eve = make_user("eve")
    other = make_project("speech")
    join(other, eve, "admin")
    invite, _token = services.invite(other, eve, "member")
    token, plaintext = services.create_token(eve, "laptop")
    services.set_secret(other, "KEY", "hf_abcdefghij", by=eve)
    for url in (
        f"/p/vision/members/{eve.pk}/role/",
        f"/p/vision/members/{eve.pk}/remove/",
        f"/p/vision/members/invites/{invite.pk}/withdraw/",
        "/p/vision/secrets/KEY/delete/",
        f"/account/tokens/{token.pk}/revoke/",
    ):
        assert page.post(url, {"role": "viewer"}).status_code == 404
    assert role_in(other, eve) == "admin"
    assert tokens.authenticate_token(plaintext) == eve
    assert services.secret_names(other) == ["KEY"]


def test_an_invite_link_is_shown_once_and_adds_a_member(page: Client, project: Project) -> None:
    made = submit(page, MEMBERS, {"role": "manager", "days": "7"}, to="/invite/")
    (path,) = set(re.findall(r'value="http://testserver(/invite/[\w-]+/)"', made.content.decode()))
    assert "no-store" in made["Cache-Control"]
    assert path not in page.get("/p/vision/members/").content.decode()
    token = path.split("/")[2]
    services.accept_invite(token, "grace", "correct horse battery")
    assert role_in(project, User.objects.get(username="grace")) == "manager"


def test_an_invite_with_an_unknown_role_or_time_is_an_error_at_its_field(page: Client) -> None:
    """The page offers neither."""
    form = open_form(page, MEMBERS, to="/invite/")
    answer = page.post("/p/vision/members/invite/", {**form.values, "role": "owner", "days": "9999"})
    assert answer.status_code == 422
    assert answer.context["form"].errors.keys() == {"role", "days"}
    assert not Invite.objects.exists()


def test_the_members_page_lists_the_projects_open_invites(page: Client, project: Project, ada: User) -> None:
    other = project_of(make_user("eve"), "speech")
    services.invite(other, ada, "member")
    services.invite(project, ada, "member", ttl=timedelta(0))
    row, _token = services.invite(project, ada, "member")
    context = page.get("/p/vision/members/").context
    assert [membership.user for membership in context["members"]] == [ada]
    assert list(context["invites"]) == [row]


def test_a_withdrawn_invite_leaves_the_page(page: Client, project: Project, ada: User) -> None:
    invite, _token = services.invite(project, ada, "member")
    assert f'id="invite-{invite.pk}"' in page.get("/p/vision/members/").content.decode()
    answer = submit(page, MEMBERS, to=f"/{invite.pk}/withdraw/", follow=True)
    assert f'id="invite-{invite.pk}"' not in answer.content.decode()


def test_an_admin_changes_roles_and_removes_members(page: Client, project: Project, bob: User) -> None:
    submit(page, MEMBERS, {"role": "manager"}, to=f"/{bob.pk}/role/")
    assert role_in(project, bob) == "manager"
    submit(page, MEMBERS, to=f"/{bob.pk}/remove/")
    assert role_in(project, bob) is None


def test_removing_the_last_admin_is_refused_with_a_reason_on_the_same_page(
    page: Client, project: Project, ada: User
) -> None:
    for to, changes in ((f"/{ada.pk}/role/", {"role": "viewer"}), (f"/{ada.pk}/remove/", {})):
        answer = submit(page, MEMBERS, changes, to=to)
        assert answer.status_code == 409
        assert "last admin" in answer.content.decode()
    assert role_in(project, ada) == "admin"


def test_any_member_may_leave(project: Project, ada: User, bob: User) -> None:
    assert submit(browser(bob), MEMBERS, to=f"/{bob.pk}/remove/")["Location"] == "/"
    assert role_in(project, bob) is None


@pytest.mark.parametrize("role", ROLES)
def test_members_see_each_other_and_only_admins_see_the_controls(project: Project, ada: User, role: str) -> None:
    text = browser(join(project, make_user(), role)).get("/p/vision/members/").content.decode()
    assert "ada" in text
    assert ('name="role"' in text) == (role == "admin")


def test_a_secret_is_set_replaced_and_deleted_and_never_shown(page: Client, project: Project) -> None:
    for value in ("first\r\nsecond line", "hf_abcdefghij"):
        answer = set_secret(page, "HF_TOKEN", value, follow=True)
        assert "${{ secrets.HF_TOKEN }}" in answer.content.decode()
        assert value not in answer.content.decode()
        assert services.secret_values(project) == {"HF_TOKEN": value.replace("\r", "")}
    (row,) = page.get("/p/vision/secrets/").context["secrets"]
    assert "ciphertext" not in row.__dict__, "the page reads no ciphertext"
    submit(page, SECRETS, to="/HF_TOKEN/delete/")
    assert services.secret_names(project) == []


def test_a_refused_secret_keeps_the_name_and_not_the_value(page: Client) -> None:
    answer = set_secret(page, "1ST", "hf_abcdefghij")
    assert answer.status_code == 422
    assert answer.context["form"].errors.keys() == {"name"}
    assert 'value="1ST"' in answer.content.decode()
    assert "hf_abcdefghij" not in answer.content.decode()


def test_a_member_sees_the_names_of_secrets_and_a_viewer_does_not(project: Project, ada: User, bob: User) -> None:
    services.set_secret(project, "HF_TOKEN", "hf_abcdefghij", by=ada)
    assert "HF_TOKEN" in browser(bob).get("/p/vision/secrets/").content.decode()
    assert browser(join(project, make_user(), "viewer")).get("/p/vision/secrets/").status_code == 403


def test_a_token_is_shown_once_works_and_is_revoked(page: Client, ada: User) -> None:
    made = make_token(page, "laptop")
    (token,) = set(re.findall(r'value="(dw_[\w-]+)"', made.content.decode()))
    assert "no-store" in made["Cache-Control"]
    assert tokens.authenticate_token(token) == ada
    assert "dstackweb login http://127.0.0.1:8000" in made.content.decode()
    again = page.get("/account/tokens/").content.decode()
    assert "laptop" in again
    assert token not in again
    revoke = open_form(page, TOKENS, to="/revoke/")
    revoke.send()
    assert tokens.authenticate_token(token) is None
    assert revoke.send().status_code == 404


def test_an_invalid_token_name_is_an_error_at_its_field(page: Client) -> None:
    answer = make_token(page, "environment")
    assert answer.status_code == 422
    assert 'value="environment"' in answer.content.decode()
    assert answer.context["form"].errors.keys() == {"name"}


def test_names_are_escaped_wherever_they_are_shown(page: Client, ada: User) -> None:
    name = '"><script>alert(1)</script>'
    services.create_token(ada, name)
    text = page.get("/account/tokens/").content.decode()
    assert name not in text
    assert escape(name) in text


def test_no_page_has_a_script_style_or_handler_inline(page: Client, project: Project, ada: User, bob: User) -> None:
    services.set_secret(project, "HF_TOKEN", "hf_abcdefghij", by=ada)
    services.create_token(ada, "laptop")
    _invite, invite = services.invite(project, ada, "member")
    link = services.make_login_link(ada)
    inside = ["/p/vision/members/", "/p/vision/secrets/", "/account/tokens/", "/account/password/"]
    answers = [page.get(url) for url in [*inside, f"/invite/{invite}/"]]
    outside = ["/login/", f"/login/{link}/", f"/invite/{invite}/", "/login/in_x/", "/invite/inv_x/"]
    answers += [Client().get(url) for url in outside]
    answers.append(make_token(page, ""))
    for answer in answers:
        text = answer.content.decode()
        assert "unsafe" not in answer["Content-Security-Policy"]
        assert not re.findall(r"<style|<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=", text)


def test_every_input_has_a_label(page: Client, ada: User, bob: User) -> None:
    for url in ("/p/vision/members/", "/p/vision/secrets/", "/account/tokens/", "/account/password/"):
        text = page.get(url).content.decode()
        for tag in re.findall(r"<(?:input|select|textarea)[^>]*>", text):
            named = re.search(r'id="([^"]+)"', tag)
            assert 'type="hidden"' in tag or "aria-label" in tag or (named and f'for="{named[1]}"' in text), tag


def test_a_changed_password_is_confirmed_and_keeps_the_session(page: Client, ada: User) -> None:
    old, new = "the-old-one-of-ada", "a-new-one-of-ada"
    ada.set_password(old)
    ada.save()
    page.force_login(ada)
    changes = {"old_password": old, "new_password1": new, "new_password2": new}
    answer = submit(page, "/account/password/", changes, follow=True)
    assert answer.redirect_chain == [("/account/", 302)]
    assert "Password changed." in answer.content.decode()
    ada.refresh_from_db()
    assert ada.check_password(new)
