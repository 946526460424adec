"""Single sign-on with a real OpenID Connect provider, over HTTP: accounts, roles by group, connecting an account."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret
from allauth.socialaccount.models import SocialAccount, SocialToken
from django.test import Client

from dstackweb.accounts import services
from dstackweb.accounts.access import role_in
from dstackweb.accounts.adapters import groups_in, roles_of
from dstackweb.accounts.models import Invite, Membership, Project, User
from dstackweb.audit.models import AuditAction, AuditEntry
from dstackweb.env import GroupRole
from tests.factories import join, make_project, make_user
from tests.forms import open_form, submit

pytestmark = [pytest.mark.django_db, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
PASSWORD = "correct horse battery"


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    """The URL of a provider that is alive."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own libraries
        from oidc_provider_mock import run_server_in_thread
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with run_server_in_thread() as server:
        url = f"http://localhost:{server.server_port}"
        assert httpx.get(f"{url}/.well-known/openid-configuration").json()["issuer"] == url
        yield url


@pytest.fixture(autouse=True)
def configured(provider: str, settings: Any) -> None:
    settings.DSTACKWEB_OIDC_URL = provider
    settings.DSTACKWEB_OIDC_NAME = "Example login"
    settings.DSTACKWEB_OIDC_ROLES = [GroupRole("ml-team", "main", "member"), GroupRole("ops", "main", "manager")]
    providers = copy.deepcopy(settings.SOCIALACCOUNT_PROVIDERS)
    providers["openid_connect"]["APPS"] = [
        {"provider_id": "sso", "name": "Example login", "client_id": "dstackweb", "secret": "s3cret",
         "settings": {"server_url": provider, "oauth_pkce_enabled": True, "scope": ["openid", "profile", "email"]}}
    ]  # fmt: skip
    settings.SOCIALACCOUNT_PROVIDERS = providers


@pytest.fixture
def project() -> Project:
    return make_project("main")


def person(provider: str, sub: str, groups: Sequence[str] = (), **claims: Any) -> str:
    """Make somebody known to the provider; returns their id there."""
    claims = {"preferred_username": sub, "groups": [*groups], **claims}
    httpx.put(f"{provider}/users/{sub}", json=claims).raise_for_status()
    return sub


def go_there(client: Client, page: Any) -> Any:
    """Press the page's button of the provider."""
    return submit(client, page, to="/login/sso/")


def come_back(client: Client, sub: str, page: Any = "/login/") -> Any:
    """Go to the provider from this page, say there who one is, and come back."""
    there = go_there(client, page)
    assert there.status_code == 302, there.content.decode()
    allowed = httpx.post(there["Location"], data={"sub": sub})
    back = urlsplit(allowed.headers["Location"])
    assert back.path == "/login/sso/callback/"
    return client.get(f"{back.path}?{back.query}")


def signed_in(client: Client) -> str | None:
    pk = client.session.get("_auth_user_id")
    return User.objects.get(pk=pk).username if pk else None


def test_a_member_of_a_mapped_group_gets_an_account_and_the_role(
    client: Client, provider: str, project: Project
) -> None:
    assert "Continue with Example login" in " ".join(client.get("/login/").content.decode().split())
    ann = person(provider, "ann", ["ml-team", "other"], name="Ann Lee", email="ann@example.org")
    assert come_back(client, ann, "/login/?next=/p/main/runs/")["Location"] == "/p/main/runs/"
    assert signed_in(client) == "ann"
    user = User.objects.get(username="ann")
    assert (user.get_full_name(), user.email) == ("Ann Lee", "ann@example.org")
    assert not user.has_usable_password()
    assert role_in(project, user) == "member"
    assert not SocialToken.objects.exists()
    entry = AuditEntry.objects.get(action=AuditAction.SIGNED_IN)
    assert (entry.name, entry.changes) == ("ann", {"with": [None, "single sign-on"]})


def test_roles_follow_the_groups_at_each_sign_in(provider: str, project: Project) -> None:
    def role_with(*groups: str) -> str | None:
        come_back(Client(), person(provider, "bea", groups))
        return role_in(project, User.objects.get(username="bea"))

    assert role_with("ml-team") == "member"
    assert role_with("ml-team", "ops") == "manager"
    assert role_with("ml-team") == "member"
    assert role_with() is None
    assert User.objects.filter(username="bea").count() == 1


def test_a_role_given_by_hand_is_never_touched(provider: str, project: Project) -> None:
    come_back(Client(), person(provider, "cem", ["ops"]))
    user = User.objects.get(username="cem")
    services.set_role(project, user, "viewer")
    come_back(Client(), person(provider, "cem", ["ops"]))
    assert role_in(project, user) == "viewer"
    come_back(Client(), person(provider, "cem", []))
    assert role_in(project, user) == "viewer"
    other = make_project("other")
    join(other, user, "admin")
    come_back(Client(), person(provider, "cem", []))
    assert role_in(other, user) == "admin"


def test_without_a_group_or_an_invite_there_is_no_account(client: Client, provider: str, project: Project) -> None:
    page = come_back(client, person(provider, "eve", ["strangers"]))
    assert "You need an invite" in page.content.decode()
    assert signed_in(client) is None
    assert not User.objects.filter(username="eve").exists()


def test_an_invite_lets_in_who_signs_on_elsewhere(client: Client, provider: str, project: Project) -> None:
    ned = join(project, make_user("ned"), "admin")
    _row, token = services.invite(project, ned, "viewer")
    late = Client()
    opened = late.get(f"/invite/{token}/")
    come_back(client, person(provider, "fay"), f"/invite/{token}/")
    user = User.objects.get(username="fay")
    assert role_in(project, user) == "viewer"
    assert not Membership.objects.get(user=user).by_group
    assert Invite.objects.get().used_by == user
    assert "You need an invite" in come_back(late, person(provider, "gus"), opened).content.decode()


def test_an_account_of_the_same_address_is_neither_taken_over_nor_doubled(
    client: Client, provider: str, project: Project
) -> None:
    make_user("hal", email="hal@example.org", password=PASSWORD)
    claims = {"email": "HAL@example.org", "email_verified": True}
    page = come_back(client, person(provider, "hal", ["ops"], **claims))
    assert page.status_code == 409
    assert "Sign in with its password" in page.content.decode()
    assert signed_in(client) is None
    assert User.objects.filter(username__startswith="hal").count() == 1


def test_an_account_is_connected_after_a_confirmation_and_disconnected(
    client: Client, provider: str, project: Project
) -> None:
    ivy = make_user("ivy", password=PASSWORD)
    client.force_login(ivy)
    asked = come_back(client, person(provider, "ivy-there"), "/account/")
    assert not SocialAccount.objects.exists()
    assert submit(client, asked["Location"], {"password": PASSWORD})["Location"] == "/account/"
    assert SocialAccount.objects.get().user == ivy
    other = Client()
    come_back(other, "ivy-there")
    assert signed_in(other) == "ivy"
    submit(client, "/account/", to="/account/sso/disconnect/")
    assert not SocialAccount.objects.exists()


def test_the_only_way_in_is_not_disconnected(client: Client, provider: str, project: Project) -> None:
    come_back(client, person(provider, "jan", ["ops"]))
    answer = submit(client, "/account/", to="/account/sso/disconnect/")
    assert answer.status_code == 409
    assert "Ask an admin for a password link first" in answer.content.decode()
    assert SocialAccount.objects.exists()


def test_the_second_step_is_asked_for_and_roles_come_after_it(client: Client, provider: str, project: Project) -> None:
    come_back(Client(), person(provider, "kim", ["ml-team"]))
    kim = User.objects.get(username="kim")
    TOTP.activate(kim, generate_totp_secret())
    assert come_back(client, person(provider, "kim", ["ops"]))["Location"] == "/login/code/"
    assert signed_in(client) is None
    assert role_in(project, kim) == "member"


def test_an_answer_that_nobody_asked_for_and_a_refusal_sign_nobody_in(client: Client, provider: str) -> None:
    forged = client.get("/login/sso/callback/", {"code": "x", "state": "x"})
    assert forged.status_code == 401
    assert "Single sign-on failed" in forged.content.decode()
    there = go_there(client, "/login/")
    state = re.search(r"state=(\w+)", there["Location"])
    assert state
    refused = client.get("/login/sso/callback/", {"error": "access_denied", "state": state[1]})
    assert refused["Location"] == "/login/sso/cancelled/"
    assert signed_in(client) is None


def test_a_provider_that_is_away_is_an_error_page(client: Client, settings: Any) -> None:
    settings.SOCIALACCOUNT_PROVIDERS["openid_connect"]["APPS"][0]["settings"]["server_url"] = "http://localhost:9"
    answer = go_there(client, "/login/")
    assert answer.status_code == 502
    assert "did not answer as expected" in answer.content.decode()


def test_without_a_provider_there_is_no_button_and_no_address(client: Client, settings: Any) -> None:
    form = open_form(client, "/login/", to="/login/sso/")
    settings.DSTACKWEB_OIDC_URL = ""
    assert "/login/sso/" not in client.get("/login/").content.decode()
    assert form.send().status_code == 404


def test_an_inactive_account_is_not_signed_in(client: Client, provider: str, project: Project) -> None:
    come_back(Client(), person(provider, "lea", ["ops"]))
    User.objects.filter(username="lea").update(is_active=False)
    assert come_back(client, "lea").status_code == 403
    assert signed_in(client) is None


@pytest.mark.parametrize(
    ("claims", "groups"),
    [
        ({"userinfo": {"groups": ["a", "b", 3]}}, {"a", "b"}),
        ({"userinfo": {}, "id_token": {"groups": ["a"]}}, {"a"}),
        ({"userinfo": {"groups": "a"}}, {"a"}),
        ({"userinfo": {"groups": {"a": 1}}}, set()),
        ({}, set()),
    ],
)
def test_groups_are_a_list_or_one_name(claims: dict[str, Any], groups: set[str]) -> None:
    assert groups_in(claims, "groups") == groups


def test_the_highest_role_of_several_groups_counts() -> None:
    mapping = [GroupRole("a", "p", "manager"), GroupRole("b", "p", "viewer"), GroupRole("b", "q", "admin")]
    assert roles_of({"a", "b"}, mapping) == {"p": "manager", "q": "admin"}
    assert roles_of({"c"}, mapping) == {}
