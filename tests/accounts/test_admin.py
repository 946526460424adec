"""Accounts in the admin site: useful lists, and no secret on any page."""

from __future__ import annotations

import re

import pytest
from django.apps import apps
from django.contrib.auth.models import Permission
from django.test import Client

from dstackweb.accounts import services, tokens
from dstackweb.accounts.models import ApiToken, Membership, Project, ProjectSecret, Session, User
from dstackweb.urls import admin  # with all models registered
from tests.factories import join, make_user, project_of
from tests.forms import open_form, submit

pytestmark = pytest.mark.django_db
MODELS = [
    model
    for model in apps.get_app_config("accounts").get_models()
    if not model._meta.auto_created and model is not Session  # its data is nobody else's
]
PASSWORD = "correct horse battery"


@pytest.fixture
def root(client: Client) -> User:
    user = make_user("root", is_superuser=True, is_staff=True)
    client.force_login(user)
    return user


def test_every_model_is_in_the_admin_with_a_list_a_filter_and_a_search(client: Client, root: User) -> None:
    for model in MODELS:
        page = admin.site._registry[model]
        assert len(page.list_display) > 1
        assert page.search_fields
        response = client.get(f"/admin/accounts/{model._meta.model_name}/", {"q": "x"})
        assert response.status_code == 200


def test_no_page_shows_a_digest_or_a_value(client: Client, root: User) -> None:
    project = project_of(root, "vision")
    token, plaintext = services.create_token(root, "laptop")
    invite, invite_token = services.invite(project, root, "member")
    link_token = services.make_login_link(root)
    link = root.login_links.get()
    secret = services.set_secret(project, "HF_TOKEN", "hf_abcdefghij", by=root)
    hidden = [plaintext, invite_token, link_token, "hf_abcdefghij", secret.ciphertext]
    hidden += [token.digest, invite.digest, link.digest]
    for row in (token, invite, link, secret, root, project):
        for path in ("", f"{row.pk}/change/"):
            response = client.get(f"/admin/accounts/{row._meta.model_name}/{path}")
            assert response.status_code == 200
            assert not [value for value in hidden if value in response.content.decode()]


def test_a_token_made_in_the_admin_is_shown_once_and_works(client: Client, root: User) -> None:
    ada = make_user("ada")
    values = {"user": ada.pk, "name": "CI", "scope": "admin"}
    response = submit(client, "/admin/accounts/apitoken/add/", values, follow=True)
    (token,) = set(re.findall(r"dw_[\w-]{20,}", response.content.decode()))
    assert tokens.authenticate_token(token) == ada
    again = client.get("/admin/accounts/apitoken/")
    assert token not in again.content.decode()


def test_the_reserved_token_name_is_an_error_at_its_field(client: Client, root: User) -> None:
    values = {"user": root.pk, "name": "environment", "scope": "admin"}
    response = submit(client, "/admin/accounts/apitoken/add/", values)
    assert "DSTACKWEB_ADMIN_TOKEN" in response.content.decode()
    assert not ApiToken.objects.exists()


def test_tokens_are_revoked_from_the_list(client: Client, root: User) -> None:
    row, token = services.create_token(root, "laptop")
    submit(client, "/admin/accounts/apitoken/", {"action": "revoke", "_selected_action": [row.pk]})
    assert tokens.authenticate_token(token) is None


def test_a_user_is_made_and_their_page_opens(client: Client, root: User) -> None:
    values = {"username": "grace", "usable_password": "true", "password1": PASSWORD, "password2": PASSWORD}
    submit(client, "/admin/accounts/user/add/", values)
    grace = User.objects.get(username="grace")
    assert grace.check_password(PASSWORD)
    join(project_of(root, "vision"), grace)
    assert "vision" in client.get(f"/admin/accounts/user/{grace.pk}/change/").content.decode()


def test_a_language_and_a_time_zone_are_chosen_from_those_there_are(client: Client, root: User) -> None:
    address = f"/admin/accounts/user/{make_user('grace').pk}/change/"
    page = client.get(address)
    fields = page.context["adminform"].form.fields
    assert {"", "en", "zh-hans"} == {code for code, _name in fields["language"].choices}
    unknown = {"username": "grace", "language": "tlh", "time_zone": "Mars/Base"}  # as no browser sends it
    unknown |= {"memberships-TOTAL_FORMS": "0", "memberships-INITIAL_FORMS": "0"}
    refused = client.post(address, unknown)
    assert set(refused.context["adminform"].form.errors) == {"language", "time_zone"}
    assert submit(client, address, {"language": "zh-hans", "time_zone": "Asia/Shanghai"}).status_code == 302
    grace = User.objects.get(username="grace")
    assert (grace.language, grace.time_zone) == ("zh-hans", "Asia/Shanghai")


def test_a_project_is_created_with_an_admin_and_always_keeps_one(client: Client, root: User) -> None:
    form = open_form(client, "/admin/accounts/project/add/", having="name")
    first = {"name": "vision", "memberships-0-user": root.pk}
    refused = form.send({**first, "memberships-0-role": "member"})
    assert "at least one member with the role admin" in refused.content.decode()
    form.send({**first, "memberships-0-role": "admin"})
    membership = Membership.objects.get()
    form = open_form(client, f"/admin/accounts/project/{membership.project_id}/change/", having="name")
    form.send({"memberships-0-role": "viewer"})
    form.send({"memberships-0-DELETE": True})
    assert Membership.objects.get().role == "admin"


@pytest.mark.parametrize(
    ("field", "value"),
    [("weight", "0"), ("monthly_budget", "-1"), ("member_max_priority", "101"), ("name", "two words")],
)
def test_a_value_out_of_range_is_an_error_at_its_field(client: Client, root: User, field: str, value: str) -> None:
    values = {"name": "vision", "memberships-0-user": root.pk, "memberships-0-role": "admin"}
    response = submit(client, "/admin/accounts/project/add/", {**values, field: value})
    assert field in response.context["adminform"].form.errors
    assert not Project.objects.exists()


def test_a_secret_is_written_and_replaced_but_never_shown(client: Client, root: User) -> None:
    project = project_of(root, "vision")
    values = {"project": project.pk, "name": "KEY", "value": "first\r\nline"}
    submit(client, "/admin/accounts/projectsecret/add/", values)
    row = ProjectSecret.objects.get()
    assert row.updated_by == root
    assert services.secret_values(project) == {"KEY": "first\nline"}
    submit(client, f"/admin/accounts/projectsecret/{row.pk}/change/", {"value": "the second"})
    assert services.secret_values(project) == {"KEY": "the second"}


def test_a_secret_that_no_environment_can_hold_is_refused_and_not_sent_back(client: Client, root: User) -> None:
    project = project_of(root, "vision")
    values = {"project": project.pk, "name": "KEY", "value": "é" * 40_000}
    response = submit(client, "/admin/accounts/projectsecret/add/", values)
    assert "64 KiB" in response.content.decode()
    assert "éé" not in response.content.decode()


@pytest.fixture
def staff(client: Client) -> User:
    """Who may do all to accounts, and is no deployment admin."""
    user = make_user("sam", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(content_type__app_label="accounts"))
    client.force_login(user)
    return user


def test_staff_make_tokens_for_themselves_alone(client: Client, staff: User) -> None:
    others = [make_user("root", is_superuser=True, is_staff=True), make_user("ada")]
    add = "/admin/accounts/apitoken/add/"
    for user in others:  # whom a browser finds in the field, but does not get
        assert submit(client, add, {"user": user.pk, "name": "CI", "scope": "admin"}).status_code == 200
    assert not ApiToken.objects.exists()
    assert submit(client, add, {"user": staff.pk, "name": "CI", "scope": "admin"}).status_code == 302
    assert ApiToken.objects.get().user == staff


def test_staff_cannot_become_deployment_admins(client: Client, staff: User) -> None:
    """Neither by the pages of such accounts, which they can't open, nor by fields that the page of others lacks."""
    root = make_user("root", is_superuser=True, is_staff=True)
    ada = make_user("ada")
    for user, path in ((root, "password/"), (root, "change/"), (root, "delete/"), (staff, "change/")):
        answer = client.post(f"/admin/accounts/user/{user.pk}/{path}", {"password1": PASSWORD, "password2": PASSWORD})
        assert answer.status_code == 403, (user, path)
    page = client.get(f"/admin/accounts/user/{ada.pk}/change/").content.decode()
    assert 'name="email"' in page
    assert 'name="is_superuser"' not in page
    assert 'name="user_permissions"' not in page
    forged = {"username": "ada", "is_active": "on", "is_superuser": "on", "is_staff": "on", "email": "ada@example.org",
            "memberships-TOTAL_FORMS": "0", "memberships-INITIAL_FORMS": "0"}  # fmt: skip
    assert client.post(f"/admin/accounts/user/{ada.pk}/change/", forged).status_code == 302
    ada.refresh_from_db()
    assert (ada.email, ada.is_superuser, ada.is_staff) == ("ada@example.org", False, False)


def test_a_role_that_is_changed_here_is_no_longer_one_of_a_group(client: Client, root: User) -> None:
    project = project_of(root, "vision")
    ada, bob = join(project, make_user("ada")), join(project, make_user("bob"))
    Membership.objects.filter(user__in=[ada, bob]).update(by_group=True)
    number = [row.user for row in project.memberships.order_by("pk")].index(ada)
    page = f"/admin/accounts/project/{project.pk}/change/"
    assert submit(client, page, {f"memberships-{number}-role": "viewer"}).status_code == 302
    found = {row.user.username: (row.role, row.by_group) for row in project.memberships.select_related("user")}
    assert (found["ada"], found["bob"]) == (("viewer", False), ("member", True))
